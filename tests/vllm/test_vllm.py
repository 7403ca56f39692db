"""vLLM does what every engine does, as a worker group of two replicas; and what vLLM does beside that; and deaths."""

import asyncio
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psutil
import pytest
import tiny_model
from engine_contract import *  # noqa: F403  # its tests are of this module
from engine_contract import Kit, Source
from small_vllm import OPTIONS

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.rl import Sampling

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=200, ignore_eos=True)
GREEDY_LONG = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [14, 8], [20, 21, 22, 23, 24], [9] * 40]


@dataclass(frozen=True, kw_only=True)
class Biased(Sampling):
    """A sampling that makes a token certain."""

    token: int


class Rollout(rl.VLLM):
    """vLLM with a hook, and its process."""

    def sampling_params(self, sampling):
        params = super().sampling_params(sampling)
        if isinstance(sampling, Biased):
            params.allowed_token_ids = [sampling.token]
        return params

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()


@pytest.fixture(scope="module")
def limits():
    return tiny_model.VOCAB_SIZE, OPTIONS["max_model_len"]


@pytest.fixture(scope="module")
def kit(model_path):
    make_model = partial(tiny_model.load, model_path)

    @contextmanager
    def make_source():
        with bm.ResourcePool([4], backend="local") as pool:
            yield bm.WorkerGroup(pool, Source, make_model, tiny_model.cut, mesh=bm.Mesh(dp=2, tp=2))

    with bm.ResourcePool([2], backend="local") as pool, make_source() as source:
        group = bm.WorkerGroup(pool, Rollout, model_path, mesh=bm.Mesh(dp=2), **OPTIONS)
        group.generate({"prompt": PROMPTS}, GREEDY)
        group.metrics.all().result()
        sync = rl.WeightSync(source, group)
        yield Kit(group, tiny_model.Reference(model_path), PROMPTS, GREEDY, GREEDY_LONG, source, sync, make_source)


def test_chat_messages_become_a_prompt(engine):
    (by_chat,) = engine.request([{"role": "user", "content": "1+2"}], GREEDY).result()
    (by_ids,) = engine.request([5, 14, 6, 15], GREEDY).result()
    assert by_chat == by_ids


def test_stops(engine, reference):
    tokens = reference.greedy(PROMPTS[0], 12)
    third = tokens[2]
    (answer,) = engine.request(PROMPTS[0], Sampling(temperature=0.0, stop_token_ids=[third], ignore_eos=True)).result()
    end = tokens.index(third) + 1
    assert answer.tokens == tokens[:end] and answer.finish_reason == "stop"
    (whole,) = engine.request(PROMPTS[0], GREEDY).result()
    character = whole.text[2]
    (answer,) = engine.request(PROMPTS[0], Sampling(temperature=0.0, stop=character, ignore_eos=True)).result()
    assert answer.finish_reason == "stop" and answer.text == whole.text[: whole.text.index(character)]


def test_a_hook_changes_the_sampling(engine):
    (answer,) = engine.request(PROMPTS[0], Biased(token=33, max_tokens=5)).result()
    assert answer.tokens == [33] * 5


# --- control ---


def test_the_cache_is_reset(engine):
    request = engine.request.options(replica=0)
    prompt = [30, 31] * 100  # more than a block of the cache

    def hits():
        request(prompt, GREEDY).result()
        return engine.metrics.options(replica=0)().result()["vllm:prefix_cache_hits"]

    hits()
    before = hits()
    assert hits() > before, "the prompt is in the cache"
    before = hits()
    engine.reset_cache.all().result()
    assert hits() == before


# --- mistakes ---


def test_bad_sampling_is_an_error_and_the_engine_stays_usable(engine):
    with pytest.raises(bm.UsageError, match="max_tokens of Sampling must be a whole number of 1 or more, got 0"):
        Sampling(max_tokens=0)
    for wrong in (Sampling(temperature=2.5), Sampling(extra={"repetition_penalty": 0})):
        with pytest.raises(bm.RemoteError, match="vLLM refuses the sampling") as raised:
            engine.request(PROMPTS[0], wrong).result()
        assert isinstance(raised.value.__cause__, bm.UsageError)
    with pytest.raises(bm.RemoteError, match="vLLM refuses the request"):
        engine.request(PROMPTS[0], Sampling(logprobs=1000)).result()
    with pytest.raises(bm.RemoteError, match="vLLM refuses the request"):
        engine.request(PROMPTS[0], Sampling(stop_token_ids=[1 << 40])).result()
    assert len(engine.request(PROMPTS[0], GREEDY).result()[0].tokens) == 12


def test_a_long_answer_ends_with_the_context(engine):
    (answer,) = engine.request([5] * 250, Sampling(max_tokens=100, ignore_eos=True)).result()
    assert answer.finish_reason == "length" and len(answer.tokens) == 6


# --- deaths: last, as one replica is left ---


def test_a_replica_dies_under_requests(engine, reference):
    victim = engine.process()[1]

    async def main(**options):
        asked = [engine.request.options(**options)(prompt, GREEDY) for prompt in PROMPTS * 10]
        asked += [engine.request.options(replica=1)(PROMPTS[0], LONG)]
        await engine.metrics.all()
        children = psutil.Process(victim).children(recursive=True)
        assert children, "the model runs in a child process"
        os.kill(victim, signal.SIGKILL)
        return children, await asyncio.gather(*asked, return_exceptions=True)

    children, answers = asyncio.run(main(retries=1))
    *answers, last = answers
    assert isinstance(last, bm.WorkerDied) and last.rank == 1
    assert [one[0].tokens for one in answers] == [reference.greedy(prompt, 12) for prompt in PROMPTS] * 10
    assert engine.request(PROMPTS[0], GREEDY).result()[0].tokens == reference.greedy(PROMPTS[0], 12)
    assert not any(child.is_running() for child in children), "no process is left"
