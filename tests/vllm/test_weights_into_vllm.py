"""Weights from a trainer of dp=2, tp=2 into vLLM: replicas of two ranks and of one, loads that fail, and deaths."""

import asyncio
import logging
import os
import signal
from contextlib import contextmanager
from functools import partial

import psutil
import pytest
import tiny_model
import torch
from engine_contract import Source, versions_of
from small_vllm import OPTIONS

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.rl import Sampling

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [14, 8], [20, 21, 22, 23, 24], [9] * 40]
DEADLINE_S = 300


class Rollout(rl.VLLM):
    """An engine that takes weights of any shapes, as one does whose model has no safetensors files."""

    def weights_specs(self):
        return None

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()


class Wide(Source):
    """A trainer with a tensor of a shape that the engine does not take."""

    def weights(self):
        return {**super().weights(), "model.norm.weight": torch.ones(64)}


@pytest.fixture(scope="module")
def source(model_path):
    with bm.ResourcePool([4], backend="local") as pool:
        make_model = partial(tiny_model.load, model_path)
        yield bm.WorkerGroup(pool, Source, make_model, tiny_model.cut, mesh=bm.Mesh(dp=2, tp=2))


@pytest.fixture(scope="module")
def wrong(model_path):
    with bm.ResourcePool([1], backend="local") as pool:
        yield bm.WorkerGroup(pool, Wide, partial(tiny_model.load, model_path))


@pytest.fixture(scope="module")
def reference(model_path):
    return tiny_model.Reference(model_path)


@contextmanager
def engines(model_path, mesh):
    with bm.ResourcePool([mesh.size], backend="local") as pool:
        yield bm.WorkerGroup(pool, Rollout, model_path, mesh=mesh, **OPTIONS)


def assert_answers_are_those_of(reference, engine, version):
    rows = engine.generate({"prompt": PROMPTS}, GREEDY)
    assert [one.tolist() for one in rows["answer"]] == [reference.greedy(prompt, 12) for prompt in PROMPTS]
    assert {token for one in rows["versions"] for token in one.tolist()} == {version}


def test_weights_to_replicas_of_two_ranks(source, wrong, reference, model_path):
    with engines(model_path, bm.Mesh(dp=2, tp=2)) as engine:
        sync = rl.WeightSync(source, engine, delta=True)
        for version in range(1, 21):
            source.nudge(version)
            sync(version=version)
            reference.follow(source)
            assert_answers_are_those_of(reference, engine, version)
        assert sync.sent_nbytes < 0.1 * sync.plan.nbytes, "a hundredth of the elements has changed"
        with pytest.raises(bm.RemoteError, match=r"Attempted to load weight \(torch.Size\(\[64\]\)\)"):
            rl.WeightSync(wrong, engine)(version=21)
        assert_answers_are_those_of(reference, engine, 20)
        source.draw(22)
        engine.sleep.all().result()
        engine.wake.all("weights").result()
        sync(version=22)
        engine.wake.all("kv_cache").result()
        reference.follow(source)
        assert_answers_are_those_of(reference, engine, 22)


def test_weights_to_one_replica_of_one_rank_that_refuses_some(source, wrong, reference, model_path):
    with engines(model_path, bm.Mesh(dp=1)) as engine:
        with pytest.raises(bm.UsageError, match=r"no rank of .* is on the GPU or in the process of replica or rank 0"):
            rl.WeightSync(source, engine, share=True)  # vLLM has a process of its own
        with pytest.raises(bm.RemoteError):
            rl.WeightSync(wrong, engine)(version=1)
        assert versions_of(engine) == [0]
        fresh = tiny_model.Reference(model_path)
        assert_answers_are_those_of(fresh, engine, 0)
        sync = rl.WeightSync(source, engine)
        for version in range(1, 4):
            source.draw(version)
            sync(version=version)
            reference.follow(source)
            assert_answers_are_those_of(reference, engine, version)

        async def main():
            long = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
            stream = engine.tokens.options(maxsize=1).stream(PROMPTS[0], long)
            parts = [await anext(stream)]
            with pytest.raises(bm.RemoteError):
                await asyncio.to_thread(rl.WeightSync(wrong, engine), 9)
            parts += [part async for part in stream]
            return rl.Answer.joined(parts)

        answer = asyncio.run(main())
        assert answer.tokens == reference.greedy(PROMPTS[0], 200), "the request goes on with the old weights"
        assert set(answer.versions) == {3}


def test_an_engine_takes_weights_before_it_takes_the_memory_of_its_cache(source, reference, model_path):
    with engines(model_path, bm.Mesh(dp=1)) as engine:
        sync = rl.WeightSync(source, engine)
        engine.sleep.all(2).result()
        with pytest.raises(bm.RemoteError, match="got 'cache'"):
            engine.wake.all("cache").result()
        with pytest.raises(bm.RemoteError, match="asleep"):
            sync(version=1)
        with pytest.raises(bm.RemoteError, match="paused or asleep"):
            engine.generate({"prompt": PROMPTS}, GREEDY)
        early = engine.request(PROMPTS[0], GREEDY)
        engine.wake.all("weights").result()
        source.draw(7)
        reference.follow(source)
        sync(version=2)
        with pytest.raises(bm.RemoteError, match=r"kv_cache of the engine still sleeps; call wake\.all"):
            engine.sleep.all().result()
        assert not early.done()
        engine.wake.all().result()
        assert early.result()[0].tokens == reference.greedy(PROMPTS[0], 12)
        assert_answers_are_those_of(reference, engine, 2)
        engine.sleep.all(2).result()
        engine.wake.all().result()
        with pytest.raises(bm.RemoteError, match=r"rank 0 has no weights.*; generate after the next sync"):
            engine.generate({"prompt": PROMPTS}, GREEDY)
        sync(version=3)
        assert_answers_are_those_of(reference, engine, 3)
        engine.sleep.all().result()
        engine.sleep.all(2).result()
        engine.wake.all().result()
        assert_answers_are_those_of(reference, engine, 3)


def test_replicas_and_engines_that_die_are_replaced_while_requests_run(source, reference, model_path, caplog):
    with engines(model_path, bm.Mesh(dp=2)) as engine:
        sync = rl.WeightSync(source, engine, heals=True)
        source.draw(40)
        sync(version=1)
        reference.follow(source)
        expected = [reference.greedy(prompt, 12) for prompt in PROMPTS]

        async def ask():
            asked = [engine.request.options(retries=2, timeout=DEADLINE_S)(prompt, GREEDY) for prompt in PROMPTS * 10]
            await engine.metrics.options(replica=0)()
            os.kill(engine.workers[1].pid, signal.SIGKILL)
            return [(await one)[0].tokens for one in asked]

        with caplog.at_level(logging.WARNING, "bandmaster.rl"):
            assert asyncio.run(ask()) == expected * 10, "no answer is lost"
            source.draw(41)  # training goes on
            sync(version=2)
            reference.follow(source)
            expected = [reference.greedy(prompt, 12) for prompt in PROMPTS]
            assert sync.wait_until_healed(DEADLINE_S)
            for replica in (0, 1):
                asked = engine.request.options(replica=replica, min_version=2, timeout=DEADLINE_S)
                assert [asked(prompt, GREEDY).result()[0].tokens for prompt in PROMPTS] == expected
            # The engine of a worker that lives: the next sync finds it out.
            worker = psutil.Process(engine.workers[0].pid)
            (core,) = [child for child in worker.children() if "EngineCore" in " ".join(child.cmdline())]
            core.kill()
            with pytest.raises(bm.RemoteError, match="the vLLM engine of rank 0 has died"):
                engine.request.options(replica=0)(PROMPTS[0], GREEDY).result(DEADLINE_S)
            sync(version=3)
            assert sync.wait_until_healed(DEADLINE_S)
            assert_answers_are_those_of(reference, engine, 3)
        told = [record.getMessage() for record in caplog.records if record.name == "bandmaster.rl"]
        assert len(told) == 2 and all("died, and was replaced" in one for one in told)
