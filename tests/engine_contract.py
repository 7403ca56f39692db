"""What every engine does, whichever runs it: batches, requests, streams, control, mistakes, weights from a trainer.

A module of tests imports all names of this one, and has a fixture ``kit`` of module scope, a `Kit`. The tests of
weights come last, as the reference follows the trainer from there on.
"""

import asyncio
import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.rl import Answer, Sampling

DEADLINE_S = 120


@dataclass(frozen=True)
class Kit:
    """A group of two replicas, and what its answers are compared with.

    Attributes:
        engine: The group.
        reference: Has the model by transformers.
        prompts: Four prompts of different lengths.
        greedy: A sampling of the most probable tokens, up to `n_tokens`.
        long: A sampling of as many tokens as fit.
        source: A group of `Source`, with a model of the same architecture.
        sync: From the source to the engine.
        make_source: Returns a context with another such group.
    """

    engine: Any
    reference: Any
    prompts: list[list[int]]
    greedy: Sampling
    long: Sampling
    source: Any
    sync: rl.WeightSync
    make_source: Any

    def expected(self, prompt):
        return self.reference.greedy(prompt, self.greedy.max_tokens)


class Reference:
    """A model by transformers in this process.

    Args:
        model: The model.
    """

    def __init__(self, model):
        self.model = model.eval()

    @torch.no_grad()
    def log_probs(self, prompt, answer):
        """The log-probabilities of all tokens where those of an answer were chosen: float32 (tokens, vocabulary)."""
        tokens = torch.tensor([[*prompt, *answer]])
        return self.model(tokens[:, :-1]).logits[0, -len(answer) :].float().log_softmax(dim=-1)

    def greedy(self, prompt, n_tokens):
        """The most probable tokens, beyond the end-of-sequence token."""
        tokens = []
        for _ in range(n_tokens):
            tokens.append(int(self.log_probs([*prompt, *tokens], [0])[-1].argmax()))
        return tokens

    def follow(self, source):
        """Take the weights of a source."""
        self.model.load_state_dict(source.whole()[0])


class Source(rl.HoldsWeights):
    """A trainer whose weights a test sets.

    Args:
        make_model: Returns the model.
        make_parallel: Cuts it over the ranks.
    """

    def __init__(self, make_model, make_parallel=None):
        torch.set_num_threads(1)
        self.model = make_model()
        if make_parallel is not None:
            self.model = make_parallel(self.model, self)

    @register(Dispatch.ONE_TO_ALL)
    def draw(self, seed):
        """Draw all weights anew, alike on all ranks."""
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                torch.manual_seed(seed * 1000 + number)
                whole = torch.randn(parameter.shape) * 0.1
                self._set(parameter, whole)

    @register(Dispatch.ONE_TO_ALL)
    def nudge(self, seed, share=0.01, size=0.25):
        """Change a share of the elements of each weight."""
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                torch.manual_seed(seed * 1000 + number)
                chosen = torch.rand(parameter.shape) < share
                whole = self._whole(parameter)
                self._set(parameter, torch.where(chosen, whole * (1 + size), whole))

    @register(Dispatch.ONE_TO_ALL)
    def whole(self):
        return {name: self._whole(weight).clone() for name, weight in self.weights().items()}

    @register(Dispatch.ONE_TO_ALL)
    def process(self):
        return os.getpid()

    def on_replace(self, rank, state):
        pass

    @staticmethod
    def _whole(weight):
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.detach()

    @staticmethod
    def _set(parameter, whole):
        if hasattr(parameter, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(whole)


@pytest.fixture(scope="module")
def engine(kit):
    return kit.engine


@pytest.fixture(scope="module")
def reference(kit):
    return kit.reference


async def n_running(engine):
    return [figures["n_running"] for figures in await engine.metrics.all()]


async def until(engine, expected):
    """Wait until the engines run so many requests."""
    deadline = time.monotonic() + DEADLINE_S
    while sorted(await n_running(engine)) != sorted(expected):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def is_idle(engine):
    asyncio.run(until(engine, [0, 0]))
    return True


# --- batches ---


def test_a_batch_comes_back_in_order_with_all_columns(kit):
    rows, n = kit.engine.generate({"prompt": kit.prompts}, kit.greedy), kit.greedy.max_tokens
    assert [one.tolist() for one in rows["answer"]] == [kit.expected(prompt) for prompt in kit.prompts]
    assert rows["n_tokens"].tolist() == [n] * 4 and rows["finish_reason"] == ["length"] * 4
    assert [one.tolist() for one in rows["versions"]] == [[0] * n] * 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(kit, temperature):
    prompts, sampling = kit.prompts * 4, Sampling(max_tokens=20, temperature=temperature)
    rows = kit.engine.generate({"prompt": prompts, "seed": np.arange(16)}, sampling)
    assert {"stop", "length"} >= set(rows["finish_reason"])
    for prompt, answer, log_probs in zip(prompts, rows["answer"], rows["log_probs"], strict=True):
        expected = kit.reference.log_probs(prompt, answer.tolist())[np.arange(len(answer)), answer]
        assert np.abs(expected.numpy() - log_probs).max() <= 1e-4
    assert all(len(one) == n for one, n in zip(rows["answer"], rows["n_tokens"], strict=True))


def test_a_request_has_the_tokens_of_a_batch(kit):
    rows = kit.engine.generate({"prompt": kit.prompts}, kit.greedy)
    for number, prompt in enumerate(kit.prompts):
        (answer,) = kit.engine.request.options(replica=number % 2)(prompt, kit.greedy).result()
        assert answer.tokens == rows["answer"][number].tolist()
        assert np.allclose(answer.log_probs, rows["log_probs"][number], atol=1e-4)


def test_a_seed_makes_an_answer_and_engines_draw_different_ones(kit):
    seeded = Sampling(max_tokens=20, seed=3, ignore_eos=True)
    first, second = (kit.engine.request.options(replica=n)(kit.prompts[0], seeded).result() for n in (0, 1))
    assert first == second
    unseeded = replace(seeded, seed=None)
    asked = [kit.engine.request.options(replica=n)(kit.prompts[0], unseeded) for n in (0, 1, 0, 1)]
    assert len({tuple(one.result()[0].tokens) for one in asked}) == 4


def test_generate_by_handle(kit):
    rows = kit.engine.generate.submit({"prompt": kit.prompts}, kit.greedy).select("answer").rename(answer="prompt")
    again = kit.engine.generate.submit(rows, kit.greedy).result()["answer"]
    assert [one.tolist() for one in again] == [kit.expected(kit.expected(prompt)) for prompt in kit.prompts]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_any_number_of_rows(kit, n):
    rows = kit.engine.generate({"prompt": kit.prompts[:n]}, kit.greedy)
    assert len(rows["answer"]) == len(rows["finish_reason"]) == n and len(rows["n_tokens"]) == n


# --- requests ---


def test_parts_of_a_stream_join_to_the_whole(kit):
    sampling = Sampling(max_tokens=15, seed=7, n=2, logprobs=2)
    whole = kit.engine.request(kit.prompts[0], sampling).result()
    parts = list(kit.engine.tokens.stream(kit.prompts[0], sampling))
    assert len(parts) > 2
    assert [Answer.joined([part for part in parts if part.number == n]) for n in (0, 1)] == whole
    assert whole[0].tokens != whole[1].tokens
    assert all(len(top) in (2, 3) for answer in whole for top in answer.top_logprobs)


def test_many_requests_at_a_time(kit):
    answers = kit.engine.request.map([list(prompt) for prompt in kit.prompts * 10], sampling=kit.greedy).result()
    assert [one[0].tokens for one in answers] == [kit.expected(prompt) for prompt in kit.prompts] * 10


def test_a_cancelled_request_is_given_up(kit):
    async def main():
        await kit.engine.pause.all("keep")
        task = asyncio.ensure_future(kit.engine.request(kit.prompts[0], kit.long))
        while not any(await n_open(kit.engine)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await kit.engine.resume.all()

    asyncio.run(main())
    assert is_idle(kit.engine)


async def n_open(engine):
    return [figures["n_open"] for figures in await engine.metrics.all()]


def test_a_closed_stream_is_given_up(kit):
    with kit.engine.tokens.stream(kit.prompts[0], kit.long) as stream:
        assert len(next(stream).tokens) >= 1
    assert is_idle(kit.engine)


# --- control ---


def test_keep_holds_requests_and_goes_on(kit):
    async def main():
        asked = [kit.engine.request.options(replica=0)(prompt, kit.greedy) for prompt in kit.prompts]
        await kit.engine.pause.all("keep")
        late = kit.engine.request.options(replica=0)(kit.prompts[0], kit.greedy)
        await kit.engine.metrics.all()
        assert not late.done()
        await kit.engine.resume.all()
        return [(await one)[0].tokens for one in [*asked, late]]

    expected = [kit.expected(prompt) for prompt in [*kit.prompts, kit.prompts[0]]]
    assert asyncio.run(main()) == expected


def test_abort_returns_what_there_is(kit):
    async def main(stop):
        stream = kit.engine.tokens.options(maxsize=4).stream(kit.prompts[0], kit.long)
        parts = [await anext(stream)]
        await stop()
        parts += [part async for part in stream]
        await until(kit.engine, [0, 0])
        await kit.engine.resume.all()
        return Answer.joined(parts)

    for stop in (kit.engine.abort.all, lambda: kit.engine.pause.all("abort")):
        answer = asyncio.run(main(stop))
        assert answer.finish_reason == "abort" and 0 < len(answer.tokens) < kit.long.max_tokens
        assert len(answer.tokens) == len(answer.log_probs) == len(answer.versions)


def test_wait_lets_requests_end_and_holds_new_ones(kit):
    async def main():
        first = kit.engine.request.options(replica=0)(kit.prompts[0], kit.long)
        while not any(await n_open(kit.engine)):
            await asyncio.sleep(0)
        await kit.engine.pause.all("wait")
        assert (await first)[0].finish_reason == "length"
        second = kit.engine.request.options(replica=0)(kit.prompts[0], kit.greedy)
        await kit.engine.metrics.all()
        assert not second.done()
        await kit.engine.resume.all()
        return await second

    assert asyncio.run(main())[0].tokens == kit.expected(kit.prompts[0])


def test_sleep_and_wake(kit):
    async def main():
        await kit.engine.sleep.all()
        late = kit.engine.request(kit.prompts[0], kit.greedy)
        await kit.engine.metrics.all()
        assert not late.done()
        await kit.engine.wake.all()
        return await late

    assert asyncio.run(main())[0].tokens == kit.expected(kit.prompts[0])


def test_a_batch_for_an_engine_that_is_paused_or_asleep_is_an_error(kit):
    engine = kit.engine
    for begin, end in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
        begin.all().result()
        with pytest.raises(bm.RemoteError, match=r"paused or asleep; call resume.all\(\) or wake.all\(\)"):
            engine.generate({"prompt": kit.prompts}, kit.greedy)
        end.all().result()
    assert engine.generate({"prompt": kit.prompts}, kit.greedy)["n_tokens"].tolist() == [kit.greedy.max_tokens] * 4


# --- mistakes ---


def bad_prompts(vocab_size, max_model_len):
    """Prompts, and what is said of each."""
    return [
        ([], "the prompt is empty"),
        ([vocab_size], f"the token id {vocab_size}, but those of the model are 0 to {vocab_size - 1}"),
        ([-1], "the token id -1"),
        ([1] * max_model_len, f"has {max_model_len} tokens, but the engine takes {max_model_len} with the answer"),
        ("1+2=", "must be a list of token ids, got '1\\+2='"),
        ([0.5], "which are whole numbers"),
        ([{"content": {}}, 3], "which are whole numbers"),
    ]


def test_a_bad_prompt_is_an_error_and_the_engine_stays_usable(kit, limits):
    for prompt, said in bad_prompts(*limits):
        with pytest.raises(bm.RemoteError, match=said) as raised:
            kit.engine.request(prompt, kit.greedy).result()
        assert isinstance(raised.value.__cause__, bm.UsageError)
        with pytest.raises(bm.RemoteError, match=said):
            list(kit.engine.tokens.stream(prompt, kit.greedy))
        if isinstance(prompt, list):
            with pytest.raises(bm.RemoteError, match="prompt 1 "):
                kit.engine.generate({"prompt": [[1], [1], [1], prompt]}, kit.greedy)
    assert is_idle(kit.engine)
    assert kit.engine.request(kit.prompts[0], kit.greedy).result()[0].tokens == kit.expected(kit.prompts[0])


def test_rows_and_modes_that_are_no_such_are_errors(kit):
    engine = kit.engine
    with pytest.raises(bm.RemoteError, match=r"a column 'prompt' of token ids, got dict with the columns \['tokens'\]"):
        engine.generate({"tokens": kit.prompts}, kit.greedy)
    with pytest.raises(bm.RemoteError, match="repeat the rows instead of n"):
        engine.generate({"prompt": kit.prompts}, Sampling(n=2))
    with pytest.raises(bm.RemoteError, match=r"must be a rl\.Sampling, got 3"):
        engine.request(kit.prompts[0], 3).result()
    with pytest.raises(bm.RemoteError, match="one of 'keep', 'wait', 'abort', got 'now'"):
        engine.pause.all("now").result()


# --- weights: the reference follows the source from here on ---


def versions_of(engine):
    return [figures["version"] for figures in engine.metrics.all().result()]


def assert_answers_are_those_of(kit, version):
    """The answers of each replica are those of the reference, and say the version."""
    for replica in range(2):
        for prompt in kit.prompts:
            ask = kit.engine.request.options(replica=replica, min_version=version, timeout=DEADLINE_S)
            (answer,) = ask(prompt, kit.greedy).result()
            assert answer.tokens == kit.expected(prompt)
            assert answer.versions == [version] * len(answer.tokens)


def test_weights_of_each_of_several_updates(kit):
    for version in range(1, 6):
        kit.source.draw(version)
        kit.sync(version=version)
        kit.reference.follow(kit.source)
        assert_answers_are_those_of(kit, version)
    rows = kit.engine.generate({"prompt": kit.prompts * 4, "seed": np.arange(16)}, Sampling(max_tokens=20))
    for prompt, answer, log_probs in zip(kit.prompts * 4, rows["answer"], rows["log_probs"], strict=True):
        expected = kit.reference.log_probs(prompt, answer.tolist())[np.arange(len(answer)), answer]
        assert np.abs(expected.numpy() - log_probs).max() <= 1e-4
        assert answer.size and set(rows["versions"][0].tolist()) == {5}


def test_submitted_syncs_bring_the_weights_of_their_moment(kit):
    kit.source.draw(20)
    first = kit.sync.submit(version=20)
    kit.source.draw(21)  # not what the first one brings
    first.result(DEADLINE_S)
    assert versions_of(kit.engine) == [20, 20]
    found = kit.engine.request(kit.prompts[0], kit.greedy).result()[0].tokens
    kit.source.draw(20)
    kit.reference.follow(kit.source)
    assert found == kit.expected(kit.prompts[0])
    kit.sync(version=21)
    assert_answers_are_those_of(kit, 21)


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_requests_in_flight(kit, in_flight):
    """Every token says which version made it, and the tokens of each version are those of its weights."""
    before = versions_of(kit.engine)[0]
    old = Reference(type(kit.reference.model)(kit.reference.model.config))
    old.model.load_state_dict(kit.reference.model.state_dict())

    async def main():
        stream = kit.engine.tokens.options(replica=0, maxsize=1).stream(kit.prompts[0], kit.long)
        parts = [await anext(stream)]
        request = kit.engine.request.options(replica=0)(kit.prompts[1], kit.long)
        changed = asyncio.ensure_future(asyncio.to_thread(kit.sync, before + 1, in_flight))
        parts += [part async for part in stream]
        answer = (await request)[0]
        await changed
        return Answer.joined(parts), answer

    kit.source.draw(30 + before)
    answers = asyncio.run(main())
    kit.reference.follow(kit.source)
    for prompt, answer in zip(kit.prompts, answers, strict=False):
        assert len(answer.versions) == len(answer.tokens) == len(answer.log_probs)
        assert answer.versions == sorted(answer.versions) and set(answer.versions) <= {before, before + 1}
        n_old = answer.versions.count(before)
        if in_flight == "wait":
            assert n_old == len(answer.tokens) or n_old == 0, "a request runs before the change or after it"
        if in_flight == "abort" and answer.finish_reason == "abort":
            assert n_old == len(answer.tokens) < kit.long.max_tokens
        if in_flight != "abort":
            assert answer.finish_reason == "length"
        if n_old:
            expected = old.log_probs(prompt, answer.tokens[:n_old])[range(n_old), answer.tokens[:n_old]]
            assert np.abs(expected.numpy() - answer.log_probs[:n_old]).max() <= 1e-3
        if n_old < len(answer.tokens):
            new = kit.reference.log_probs(prompt, answer.tokens)[range(len(answer.tokens)), answer.tokens]
            assert np.abs(new.numpy() - answer.log_probs)[n_old:].max() <= 1e-3, "all of the answer is computed anew"
    assert_answers_are_those_of(kit, before + 1)


def test_an_aborted_answer_is_continued(kit):
    before = versions_of(kit.engine)[0]

    async def main():
        stream = kit.engine.tokens.options(replica=0, maxsize=1).stream(kit.prompts[0], kit.long)
        parts = [await anext(stream)]
        changed = asyncio.ensure_future(asyncio.to_thread(kit.sync, before + 1, "abort"))
        parts += [part async for part in stream]
        await changed
        return Answer.joined(parts)

    first = asyncio.run(main())
    if first.finish_reason == "abort":  # else it has ended before
        left = replace(kit.long, max_tokens=kit.long.max_tokens - len(first.tokens))
        (rest,) = kit.engine.request(kit.prompts[0] + first.tokens, left).result()
        whole = Answer.joined([first, rest])
        assert whole.finish_reason == "length" and len(whole.tokens) == kit.long.max_tokens
        assert set(whole.versions) == {before, before + 1} and whole.versions == sorted(whole.versions)


def test_a_pause_of_the_user_stays_one(kit):
    version = versions_of(kit.engine)[0] + 1
    kit.engine.pause.all("keep").result()
    late = kit.engine.request(kit.prompts[0], kit.greedy)
    kit.sync(version=version)
    kit.engine.metrics.all().result()
    assert not late.done()
    kit.engine.resume.all().result()
    assert late.result(DEADLINE_S)[0].versions == [version] * kit.greedy.max_tokens


def test_a_sync_to_an_engine_that_sleeps_is_an_error_and_changes_nothing(kit):
    before = versions_of(kit.engine)
    kit.engine.sleep.all().result()
    with pytest.raises(bm.RemoteError, match=r"asleep; call wake\.all\(\) before new weights come"):
        kit.sync(version=1000)
    kit.engine.wake.all().result()
    assert versions_of(kit.engine) == before
    assert kit.engine.request(kit.prompts[0], kit.greedy).result()[0].tokens == kit.expected(kit.prompts[0])


def test_no_weight_goes_through_the_controller(kit):
    with bm.trace() as trace:
        kit.sync(version=versions_of(kit.engine)[0] + 1)
    carried = sum(call.returned_nbytes + call.sent_nbytes for call in trace.calls)
    assert kit.sync.plan.nbytes < kit.sync.sent_nbytes < 1.02 * kit.sync.plan.nbytes + 10_000
    assert carried < 100_000 + 0.01 * kit.sync.plan.nbytes


def test_a_sender_that_dies_leaves_the_old_weights_and_the_groups_usable(kit):
    with kit.make_source() as source:
        if source.process()[0] == os.getpid():
            pytest.skip("the ranks have no processes of their own")
        before, rank = versions_of(kit.engine), source.world_size - 1
        sync = rl.WeightSync(source, kit.engine)
        os.kill(source.process()[rank], signal.SIGKILL)
        with pytest.raises(bm.WorkerDied, match=f"rank {rank}"):
            sync(version=1000)
        assert versions_of(kit.engine) == before
        assert kit.engine.request(kit.prompts[0], kit.greedy).result()[0].tokens == kit.expected(kit.prompts[0])
        source.restart()
        source.draw(99)
        sync(version=before[0] + 1)
        kit.reference.follow(source)
        assert_answers_are_those_of(kit, before[0] + 1)
