"""vLLM as a worker group of two replicas: tokens, log-probabilities, requests, streams, control, mistakes, deaths."""

import asyncio
import os
import signal
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
from options import OPTIONS

import bandmaster as bm
from bandmaster import Dispatch, register, rl
from bandmaster.rl import Answer, Sampling

GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=200, ignore_eos=True)
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
def engine(model_path):
    with bm.ResourcePool([2], backend="local") as pool:
        group = bm.WorkerGroup(pool, Rollout, model_path, mesh=bm.Mesh(dp=2), **OPTIONS)
        group.generate({"prompt": PROMPTS}, GREEDY)
        group.metrics.all().result()
        yield group


async def n_running(engine):
    return [figures["n_running"] for figures in await engine.metrics.all()]


async def until(engine, expected):
    """Wait until the engines run so many requests."""
    async with asyncio.timeout(60):
        while sorted(await n_running(engine)) != sorted(expected):
            await asyncio.sleep(0.01)


# --- tokens ---


def test_greedy_tokens_are_those_of_transformers(engine, reference):
    rows = engine.generate({"prompt": PROMPTS}, GREEDY)
    assert [one.tolist() for one in rows["answer"]] == [reference.greedy(prompt, 12) for prompt in PROMPTS]
    assert rows["n_tokens"].tolist() == [12] * 4 and rows["finish_reason"] == ["length"] * 4
    assert [one.tolist() for one in rows["versions"]] == [[0] * 12] * 4
    for number, prompt in enumerate(PROMPTS):
        (answer,) = engine.request.options(replica=number % 2)(prompt, GREEDY).result()
        assert answer.tokens == rows["answer"][number].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(engine, reference, temperature):
    prompts = PROMPTS * 4
    sampling = Sampling(max_tokens=20, temperature=temperature)
    rows = engine.generate({"prompt": prompts, "seed": np.arange(16)}, sampling)
    assert {"stop", "length"} >= set(rows["finish_reason"])
    for prompt, answer, log_probs in zip(prompts, rows["answer"], rows["log_probs"], strict=True):
        expected = reference.log_probs(prompt, answer.tolist())[np.arange(len(answer)), answer]
        assert np.abs(expected.numpy() - log_probs).max() <= 1e-4
    assert all(len(one) == n for one, n in zip(rows["answer"], rows["n_tokens"], strict=True))


def test_a_seed_makes_an_answer_and_engines_draw_different_ones(engine):
    seeded = Sampling(max_tokens=20, seed=3, ignore_eos=True)
    first, second = (engine.request.options(replica=n)(PROMPTS[0], seeded).result() for n in (0, 1))
    assert first == second
    unseeded = Sampling(max_tokens=20, ignore_eos=True)
    answers = [engine.request.options(replica=n)(PROMPTS[0], unseeded).result()[0].tokens for n in (0, 1, 0, 1)]
    assert len(set(map(tuple, answers))) == 4


def test_generate_by_handle(engine, reference):
    rows = engine.generate.submit({"prompt": PROMPTS}, GREEDY).select("answer").rename(answer="prompt")
    again = engine.generate.submit(rows, GREEDY).result()["answer"]
    expected = [reference.greedy(reference.greedy(prompt, 12), 12) for prompt in PROMPTS]
    assert [one.tolist() for one in again] == expected


def test_rows_of_none_and_of_one(engine):
    assert engine.generate({"prompt": []}, GREEDY)["answer"] == []
    assert len(engine.generate({"prompt": PROMPTS[:1]}, GREEDY)["answer"]) == 1


# --- requests ---


def test_parts_of_a_stream_join_to_the_whole(engine):
    sampling = Sampling(max_tokens=15, seed=7, n=2, logprobs=2)
    whole = engine.request(PROMPTS[0], sampling).result()
    parts = list(engine.tokens.stream(PROMPTS[0], sampling))
    assert len(parts) > 2
    assert [Answer.joined([part for part in parts if part.number == n]) for n in (0, 1)] == whole
    assert all(len(top) in (2, 3) for answer in whole for top in answer.top_logprobs)


def test_many_requests_at_a_time(engine, reference):
    answers = engine.request.map([list(prompt) for prompt in PROMPTS * 20], sampling=GREEDY).result()
    expected = [reference.greedy(prompt, 12) for prompt in PROMPTS]
    assert [one[0].tokens for one in answers] == expected * 20


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


def test_a_cancelled_request_is_aborted_in_the_engine(engine):
    async def main():
        task = asyncio.ensure_future(engine.request(PROMPTS[0], LONG))
        await until(engine, [0, 1])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await until(engine, [0, 0])

    asyncio.run(main())


def test_a_closed_stream_is_aborted_in_the_engine(engine):
    async def main():
        async for _ in engine.tokens.stream(PROMPTS[0], LONG):
            break
        await until(engine, [0, 0])

    asyncio.run(main())


# --- control ---


def test_keep_holds_requests_and_goes_on(engine):
    async def main():
        asked = [engine.request.options(replica=0)(prompt, GREEDY) for prompt in PROMPTS]
        await engine.pause.all("keep")
        late = engine.request.options(replica=0)(PROMPTS[0], GREEDY)
        await engine.metrics.all()
        assert not late.done()
        await engine.resume.all()
        return [(await one)[0].tokens for one in [*asked, late]]

    first, *_, last = asyncio.run(main())
    assert first == last


def test_abort_returns_what_there_is(engine):
    async def main(stop):
        stream = engine.tokens.stream(PROMPTS[0], LONG)
        parts = [await anext(stream)]
        await stop()
        parts += [part async for part in stream]
        await until(engine, [0, 0])
        await engine.resume.all()
        return Answer.joined(parts)

    for stop in (engine.abort.all, lambda: engine.pause.all("abort")):
        answer = asyncio.run(main(stop))
        assert answer.finish_reason == "abort" and 0 < len(answer.tokens) < 200
        assert len(answer.tokens) == len(answer.log_probs) == len(answer.versions)


def test_wait_lets_requests_end_and_holds_new_ones(engine):
    async def main():
        first = engine.request.options(replica=0)(PROMPTS[0], LONG)
        await until(engine, [0, 1])
        await engine.pause.all("wait")
        assert (await first)[0].finish_reason == "length"
        second = engine.request.options(replica=0)(PROMPTS[0], GREEDY)
        await engine.metrics.all()
        assert not second.done()
        await engine.resume.all()
        return await second

    assert len(asyncio.run(main())[0].tokens) == 12


def test_sleep_and_wake(engine, reference):
    async def main():
        await engine.sleep.all()
        late = engine.request(PROMPTS[0], GREEDY)
        await engine.metrics.all()
        assert not late.done()
        await engine.wake.all()
        return await late

    assert asyncio.run(main())[0].tokens == reference.greedy(PROMPTS[0], 12)


def test_a_batch_for_an_engine_that_is_paused_or_asleep_is_an_error(engine):
    for begin, end in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
        begin.all().result()
        with pytest.raises(bm.RemoteError, match=r"paused or asleep; call resume.all\(\) or wake.all\(\)"):
            engine.generate({"prompt": PROMPTS}, GREEDY)
        end.all().result()
    assert engine.generate({"prompt": PROMPTS}, GREEDY)["n_tokens"].tolist() == [12] * 4


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


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "the prompt is empty"),
        ([64], "the token id 64, but those of the model are 0 to 63"),
        ([-1], "the token id -1"),
        ([1] * 256, "has 256 tokens, but the engine takes 256 with the answer"),
        ("1+2=", "must be a list of token ids"),
        ([{"content": {}}, 3], "which are whole numbers"),
    ],
    ids=["empty", "too high", "negative", "too long", "text", "mixed"],
)
def test_a_bad_prompt_is_an_error_and_the_engine_stays_usable(engine, prompt, said):
    with pytest.raises(bm.RemoteError, match=said):
        engine.request(prompt, GREEDY).result()
    with pytest.raises(bm.RemoteError, match=said):
        list(engine.tokens.stream(prompt, GREEDY))
    if not isinstance(prompt, str):
        with pytest.raises(bm.RemoteError, match="prompt 1 "):
            engine.generate({"prompt": [[1], [1], [1], prompt]}, GREEDY)
    assert len(engine.request(PROMPTS[0], GREEDY).result()[0].tokens) == 12


def test_bad_sampling_is_an_error_and_the_engine_stays_usable(engine):
    with pytest.raises(bm.UsageError, match="max_tokens of Sampling must be a whole number of 1 or more, got 0"):
        Sampling(max_tokens=0)
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
