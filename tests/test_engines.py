"""The interface of inference engines, by the toy engine of the examples: batches, requests, streams, control."""

import asyncio
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from by_value import sent_by_value
from conftest import has_vllm

import bandmaster as bm
from bandmaster import rl
from bandmaster.rl import Answer, Sampling

pytestmark = pytest.mark.backends("inprocess", "local")
FOLDER = Path(__file__).parent.parent / "examples" / "rlhf"
NAMES = {path.stem for path in FOLDER.glob("*.py")}
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
LONG = Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)
PROMPTS = [[4, 7, 10], [8, 5, 11, 2], [3], [1, 2, 3]]


@pytest.fixture(scope="module", autouse=True)
def modules():
    """The modules of the example, importable here and sent to workers by value."""
    with sent_by_value(FOLDER, "toy_engine"):
        yield


@pytest.fixture(scope="module")
def engine(backend, modules):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, sys.modules["toy_engine"].ToyEngine, mesh=bm.Mesh(dp=2, tp=1))
        group.generate({"prompt": PROMPTS}, GREEDY)  # event loops begin
        group.metrics.all().result()
        yield group


def is_idle(engine):
    return [figures["n_running"] for figures in engine.metrics.all().result()] == [0, 0]


# --- batches ---


def test_a_batch_comes_back_in_order_with_all_columns(engine):
    rows = engine.generate({"prompt": PROMPTS}, GREEDY)
    assert rows["n_tokens"].tolist() == [6] * 4
    assert rows["finish_reason"] == ["length"] * 4
    assert [one.tolist() for one in rows["versions"]] == [[0] * 6] * 4
    model = importlib.import_module("models").language_model(None, 0)
    for prompt, answer, log_probs in zip(PROMPTS, rows["answer"], rows["log_probs"], strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits[0].log_softmax(-1)[-6:]
        assert answer.tolist() == logits.argmax(-1).tolist()
        assert np.allclose(log_probs, logits.max(-1).values, atol=1e-5)


def test_a_request_has_the_tokens_of_a_batch(engine):
    rows = engine.generate({"prompt": PROMPTS, "seed": np.arange(4)}, Sampling(max_tokens=8))
    for number, prompt in enumerate(PROMPTS):
        (answer,) = engine.request(prompt, Sampling(max_tokens=8, seed=number)).result()
        assert answer.tokens == rows["answer"][number].tolist()
        assert np.allclose(answer.log_probs, rows["log_probs"][number], atol=1e-5)


@pytest.mark.parametrize("column", ["arrays", "tensors", "rectangle", "nested", "masked", "frame"])
def test_prompts_may_be_columns_of_any_kind(engine, column):
    expected = [one.tolist() for one in engine.generate({"prompt": PROMPTS}, GREEDY)["answer"]]
    if column == "arrays":
        rows = {"prompt": [np.array(prompt) for prompt in PROMPTS]}
    elif column == "tensors":
        rows = {"prompt": [torch.tensor(prompt) for prompt in PROMPTS]}
    elif column == "nested":
        rows = {"prompt": torch.nested.nested_tensor([torch.tensor(p) for p in PROMPTS], layout=torch.jagged)}
    elif column == "masked":
        left = [[0] * (4 - len(prompt)) for prompt in PROMPTS]
        rows = {
            "prompt": torch.tensor([pad + prompt for pad, prompt in zip(left, PROMPTS, strict=True)]),
            "prompt_mask": torch.tensor([pad + [1] * (4 - len(pad)) for pad in left]),
        }
    elif column == "frame":
        rows = importlib.import_module("pandas").DataFrame({"prompt": PROMPTS})
    else:
        rows = {"prompt": torch.tensor([PROMPTS[0], PROMPTS[3]])}
        expected = [expected[0], expected[3]]
    assert [one.tolist() for one in engine.generate(rows, GREEDY)["answer"]] == expected


def test_a_batch_by_handle_stays_on_its_ranks(engine):
    rows = engine.generate.submit({"prompt": PROMPTS}, GREEDY).select("answer").rename(answer="prompt")
    again = engine.generate.submit(rows, GREEDY).result()
    first = engine.generate({"prompt": PROMPTS}, GREEDY)["answer"]
    expected = engine.generate({"prompt": first}, GREEDY)["answer"]
    assert [one.tolist() for one in again["answer"]] == [one.tolist() for one in expected]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_any_number_of_rows(engine, n):
    rows = engine.generate({"prompt": PROMPTS[:n]}, GREEDY)
    assert len(rows["answer"]) == len(rows["finish_reason"]) == n and len(rows["n_tokens"]) == n


# --- requests ---


def test_parts_of_a_stream_join_to_the_whole(engine):
    sampling = Sampling(max_tokens=7, seed=5, n=2, logprobs=2)
    whole = engine.request(PROMPTS[0], sampling).result()
    parts = list(engine.tokens.stream(PROMPTS[0], sampling))
    assert [Answer.joined([part for part in parts if part.number == n]) for n in (0, 1)] == whole
    assert whole[0].tokens != whole[1].tokens
    assert all(len(top) == 2 for top in whole[0].top_logprobs)


def test_many_requests_at_a_time(engine):
    answers = engine.request.map([list(prompt) for prompt in PROMPTS * 5], sampling=GREEDY).result()
    expected = engine.generate({"prompt": PROMPTS * 5}, GREEDY)["answer"]
    assert [one[0].tokens for one in answers] == [one.tolist() for one in expected]


def test_a_cancelled_request_is_given_up(engine):
    async def main():
        engine.pause.all("keep")
        task = asyncio.ensure_future(engine.request(PROMPTS[0], LONG))
        while all(figures["n_running"] == 0 for figures in await engine.metrics.all()):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.resume.all()

    asyncio.run(main())
    assert is_idle(engine)


def test_a_closed_stream_is_given_up(engine):
    with engine.tokens.stream(PROMPTS[0], LONG) as stream:
        assert len(next(stream).tokens) == 1
    assert is_idle(engine)


# --- control ---


def test_keep_holds_requests_and_goes_on(engine):
    async def main():
        await engine.pause.all("keep")
        asked = [engine.request(prompt, GREEDY) for prompt in PROMPTS]
        await engine.metrics.all()
        assert not any(one.done() for one in asked)
        await engine.resume.all()
        return [(await one)[0] for one in asked]

    answers = asyncio.run(main())
    assert all(answer.finish_reason == "length" and len(answer.tokens) == 6 for answer in answers)


def test_abort_returns_what_there_is(engine):
    async def main():
        stream = engine.tokens.options(maxsize=4).stream(PROMPTS[0], LONG)
        parts = [await anext(stream)]
        await engine.abort.all()
        return parts + [part async for part in stream]

    parts = asyncio.run(main())
    whole = Answer.joined(parts)
    assert whole.finish_reason == "abort" and 0 < len(whole.tokens) < 50
    assert is_idle(engine)


def test_wait_lets_requests_end_and_holds_new_ones(engine):
    async def main():
        first = engine.request(PROMPTS[0], LONG)
        while all(figures["n_running"] == 0 for figures in await engine.metrics.all()):
            await asyncio.sleep(0)
        await engine.pause.all("wait")
        second = engine.request(PROMPTS[0], LONG)
        await engine.metrics.all()
        assert not second.done()
        await engine.resume.all()
        return await first, await second

    first, second = asyncio.run(main())
    assert first == second and first[0].finish_reason == "length"


def test_a_batch_for_an_engine_that_is_paused_or_asleep_is_an_error(engine):
    for begin, end in ((engine.pause, engine.resume), (engine.sleep, engine.wake)):
        begin.all().result()
        with pytest.raises(bm.RemoteError, match=r"paused or asleep; call resume.all\(\) or wake.all\(\)"):
            engine.generate({"prompt": PROMPTS}, GREEDY)
        end.all().result()
    assert engine.generate({"prompt": PROMPTS}, GREEDY)["n_tokens"].tolist() == [6] * 4


# --- mistakes ---


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "the prompt is empty"),
        ([16], "the token id 16, but those of the model are 0 to 15"),
        ([-1], "the token id -1"),
        ([1] * 64, r"has 64 tokens, but the engine takes 64 with the answer"),
        ("1+2=", "must be a list of token ids, got '1\\+2='"),
        ([0.5], "which are whole numbers"),
        ([{"role": "user", "content": "1+2"}], "has no chat template"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_an_error_and_the_engine_stays_usable(engine, prompt, said):
    with pytest.raises(bm.RemoteError, match=said) as raised:
        engine.request(prompt, GREEDY).result()
    assert isinstance(raised.value.__cause__, bm.UsageError)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], dict):
        with pytest.raises(bm.RemoteError, match="prompt 1 "):
            engine.generate({"prompt": [[1], [1], [1], prompt]}, GREEDY)
    assert is_idle(engine)
    assert len(engine.request(PROMPTS[0], GREEDY).result()[0].tokens) == 6


def test_rows_without_prompts_are_an_error(engine):
    with pytest.raises(bm.RemoteError, match=r"a column 'prompt' of token ids, got dict with the columns \['tokens'\]"):
        engine.generate({"tokens": PROMPTS}, GREEDY)
    with pytest.raises(bm.RemoteError, match="repeat the rows instead of n"):
        engine.generate({"prompt": PROMPTS}, Sampling(n=2))
    with pytest.raises(bm.RemoteError, match=r"must be a rl\.Sampling, got 3"):
        engine.request(PROMPTS[0], 3).result()
    with pytest.raises(bm.RemoteError, match="one of 'keep', 'wait', 'abort', got 'now'"):
        engine.pause.all("now").result()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens of Sampling must be a whole number of 1 or more, got 0"),
        ({"max_tokens": True}, "max_tokens of Sampling must be a whole number"),
        ({"temperature": -1}, "temperature of Sampling must be a number of 0 or more, got -1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"top_p": 0}, "top_p of Sampling must be above 0 and at most 1, got 0"),
        ({"top_k": -1}, "top_k of Sampling must be a whole number of 0 or more, got -1"),
        ({"stop": ["a", ""]}, "stop of Sampling takes texts that are not empty"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids of Sampling takes token ids"),
        ({"seed": 0.5}, "seed of Sampling must be a whole number, got 0.5"),
        ({"n": 2, "temperature": 0}, "with temperature=0 all answers are equal"),
        ({"min_tokens": 20}, "min_tokens of Sampling is 20, above max_tokens, 16"),
    ],
    ids=str,
)
def test_sampling_is_checked_where_it_is_made(options, said):
    with pytest.raises(bm.UsageError, match=said):
        Sampling(**options)


def test_padded_columns():
    rows = [np.array([1, 2], np.int32), np.array([], np.int32)]
    assert rl.padded(rows, 3, value=9).tolist() == [[1, 2, 9], [9, 9, 9]]
    assert rl.padded(rows, 3).dtype == np.int32
    assert rl.padded([], 3, dtype=np.float32).shape == (0, 3)
    with pytest.raises(bm.UsageError, match="a row of 2 elements into 1"):
        rl.padded(rows, 1)


@pytest.mark.backends("local")
@pytest.mark.skipif(has_vllm(), reason="vLLM is installed")
def test_a_missing_vllm_is_an_error_that_says_what_to_install(make_group):
    with pytest.raises(bm.ConstructorError, match=r"rl\.VLLM needs vLLM.*pip install 'bandmaster\[vllm\]'"):
        make_group(1, rl.VLLM, "a/model")
