"""The toy engine of the examples does what every engine does; and what needs no engine to be tried."""

import asyncio
import importlib
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from by_value import sent_by_value
from byte_engine import ByteEngine
from engine_contract import *  # noqa: F403  # its tests are of this module
from engine_contract import Kit, Reference, Source
from installed import has_vllm

import bandmaster as bm
from bandmaster import rl
from bandmaster.rl import Answer, Sampling

pytestmark = pytest.mark.backends("inprocess", "local")
FOLDER = Path(__file__).parent.parent / "examples" / "rlhf"
PROMPTS = [[4, 7, 10], [8, 5, 11, 2], [3], [1, 2, 3]]
# What the workers of these tests would each import.
PRELOAD = ("torch._dynamo", "torch.distributed.tensor.parallel", "transformers.models.llama.modeling_llama")
GREEDY = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)


def small_model():
    return importlib.import_module("models").language_model(None, 3)


def cut(model, worker):
    return importlib.import_module("models").parallel(model, worker, "tp")


@pytest.fixture(scope="module")
def limits():
    return 16, 64


@pytest.fixture(scope="module")
def kit(backend):
    mesh = bm.Mesh(dp=2, tp=1 if backend == "inprocess" else 2)

    @contextmanager
    def make_source():
        with bm.ResourcePool([mesh.size], backend=backend, preload=PRELOAD) as pool:
            yield bm.WorkerGroup(pool, Source, small_model, cut, mesh=mesh)

    with (
        sent_by_value(FOLDER, "toy_engine"),
        bm.ResourcePool([2], backend=backend, preload=PRELOAD) as pool,
        make_source() as source,
    ):
        toy = importlib.import_module("toy_engine").ToyEngine
        engine = bm.WorkerGroup(pool, toy, None, 3, mesh=bm.Mesh(dp=2, tp=1))
        engine.generate({"prompt": PROMPTS}, GREEDY)  # event loops begin
        sync = rl.WeightSync(source, engine)
        sync(version=0)  # memory and threads that stay
        long = Sampling(max_tokens=50, temperature=0.0, ignore_eos=True)
        yield Kit(engine, Reference(small_model()), PROMPTS, GREEDY, long, source, sync, make_source)


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


@pytest.mark.parametrize("prompts", [[], PROMPTS[:1]], ids=["no row", "one row"])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_rows_have_log_probs_if_they_are_asked_for_also_where_there_are_none(engine, prompts, logprobs):
    rows = engine.generate({"prompt": prompts}, replace(GREEDY, logprobs=logprobs))
    assert len(rows["answer"]) == len(prompts) and ("log_probs" in rows) == (logprobs == 0)


def test_a_pause_gives_up_all_answers_of_a_request(kit):
    async def main():
        stream = kit.engine.tokens.options(replica=0, maxsize=100).stream(PROMPTS[0], sampling)
        await anext(stream)
        await kit.engine.pause.all("abort")
        parts = [part async for part in stream]  # the engine is paused
        await kit.engine.resume.all()
        return [Answer.joined([part for part in parts if part.number == number]) for number in range(3)]

    sampling = Sampling(max_tokens=20, ignore_eos=True, seed=1, n=3)
    answers = asyncio.run(main())
    assert [one.finish_reason for one in answers] == ["abort"] * 3
    assert [len(one.tokens) for one in answers[1:]] == [0, 0]


class Careless(ByteEngine):
    async def answers(self, prompt, sampling):
        (answer,) = await super().answers(prompt, sampling)
        return answer if sampling.seed else [answer._replace(log_probs=[0.0])]


def test_an_engine_that_answers_what_is_no_answer_is_told_so(make_group):
    engine = make_group(1, Careless)
    said = r"Careless has answered [1-9]\d+ tokens with 1 log_probs; an rl\.Answer has one for each token"
    prompt, sampling = list(b"one and two"), Sampling(max_tokens=20)
    for ask in (
        lambda: engine.request(prompt, sampling).result(),
        lambda: engine.generate({"prompt": [prompt]}, sampling),
        lambda: engine.complete(rl.Prompt(ids=prompt), sampling).result(),
    ):
        with pytest.raises(bm.RemoteError, match=said):
            ask()
    with pytest.raises(bm.RemoteError, match=r"Careless\.answers must return a list of rl\.Answer, got one of list"):
        engine.request(prompt, replace(sampling, seed=1)).result()


class Silent(ByteEngine):
    async def answers(self, prompt, sampling):
        return [rl.Answer([1, 2], None, [0, 0], "stop")]


def test_rows_of_an_engine_without_log_probs_have_no_column_of_them(make_group):
    rows = make_group(1, Silent).generate({"prompt": [[1], [2]]}, Sampling(max_tokens=2))
    assert "log_probs" not in rows and [list(answer) for answer in rows["answer"]] == [[1, 2], [1, 2]]


# --- requests of servers ---

TURN = [{"role": "user", "content": "47+85="}]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_completion_has_the_ids_of_its_prompt_and_a_message(engine, is_stream):
    prompt = [4, 7, 10, 8, 5, 11]
    (expected,) = engine.request(prompt, GREEDY).result()
    for given in (rl.Prompt(messages=TURN), rl.Prompt(text="47+85="), rl.Prompt(ids=prompt)):
        if is_stream:
            first, *rest = engine.completion_parts.stream(given, GREEDY)
            assert first.ids.tolist() == prompt and all(part.ids is None for part in rest)
            answer = rl.Answer.joined([part.answer for part in (first, *rest)])
            said = "".join(part.delta["content"] for part in (first, *rest) if part.delta)
        else:
            completion = engine.complete(given, GREEDY).result()
            assert completion.ids.tolist() == prompt and completion.n_known == 0
            ((answer, message),) = completion.choices
            said = message.get("content", "")
        assert answer == expected
        assert said == (expected.text if given.messages else "")


def test_the_next_turn_begins_with_the_tokens_that_are_known(engine):
    known = rl.Known(2, np.array([9, 9, 9, 3], np.int32))  # not those that the messages would have
    messages = [*TURN, {"role": "assistant", "content": "231."}, {"role": "user", "content": "1+2="}]
    completion = engine.complete(rl.Prompt(messages=messages, known=known), GREEDY).result()
    assert completion.n_known == 4
    assert completion.ids.tolist() == [13, 1, 10, 2, 11], "the answer had no end, so it gets one"
    ended = rl.Known(2, np.array([9, 9, 9, 13], np.int32))
    assert engine.complete(rl.Prompt(messages=messages, known=ended), GREEDY).result().ids.tolist() == [1, 10, 2, 11]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (lambda: rl.Prompt(text="a"), "got 'a'"),
        (lambda: rl.Prompt(text=""), "the prompt is empty"),
        (lambda: rl.Prompt(messages=TURN, tools=[{}]), "neither tools"),
        (lambda: rl.Prompt(ids=[99]), "the token id 99"),
        (lambda: [1, 2], "complete takes a rl.Prompt, got list"),
    ],
    ids=["unknown", "empty", "tools", "id", "list"],
)
def test_a_bad_completion_is_an_error(engine, prompt, said):
    for call in (lambda: engine.complete(prompt()).result(), lambda: list(engine.completion_parts.stream(prompt()))):
        with pytest.raises(bm.RemoteError, match=said) as raised:
            call()
        assert isinstance(raised.value.__cause__, bm.UsageError)
    with pytest.raises(bm.UsageError, match="one of messages, text and ids, got none"):
        rl.Prompt()


def test_facts(engine):
    assert {(fact.model, fact.vocab_size, fact.is_ready) for fact in engine.facts.all().result()} == {
        ("ToyEngine", 16, True)
    }


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
        ({"seed": 0.5}, "seed of Sampling must be a whole number of 64 bits, got 0.5"),
        ({"seed": -(1 << 70)}, "seed of Sampling must be a whole number of 64 bits, got -1180591620717411303424"),
        ({"max_tokens": 1 << 70}, "max_tokens of Sampling must be a whole number of 64 bits, got 11805916"),
        ({"top_k": 1 << 70}, "top_k of Sampling must be a whole number of 64 bits"),
        ({"n": 2, "temperature": 0}, "with temperature=0 all answers are equal"),
        ({"extra": 3}, "extra of Sampling takes parameters by their names, got 3"),
        ({"min_tokens": 20}, "min_tokens of Sampling is 20, above max_tokens, 16"),
    ],
    ids=str,
)
def test_sampling_is_checked_where_it_is_made(options, said):
    with pytest.raises(bm.UsageError, match=said):
        Sampling(**options)


def test_a_sampling_may_have_numbers_of_numpy():
    made = Sampling(
        max_tokens=np.int64(4),
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        seed=np.arange(3)[1],
        stop_token_ids=np.array([1, 2]),
    )
    assert made == Sampling(max_tokens=4, temperature=0.5, top_p=0.25, seed=1, stop_token_ids=(1, 2))
    assert {type(one) for one in (made.max_tokens, made.seed, *made.stop_token_ids)} == {int}
    assert {type(one) for one in (made.temperature, made.top_p)} == {float}
    assert Sampling(stop_token_ids=torch.tensor([3])).stop_token_ids == (3,)
    assert Sampling(seed=(1 << 64) - 1).seed == (1 << 64) - 1
    with pytest.raises(bm.UsageError, match="stop_token_ids of Sampling takes token ids"):
        Sampling(stop_token_ids=np.array([[1, 2]]))
    for value in (Fraction(10**400), np.longdouble("1e4000")):
        with pytest.raises(bm.UsageError, match="temperature of Sampling must be a number of 0 or more"):
            Sampling(temperature=value)
    with pytest.raises(bm.UsageError, match="top_p of Sampling must be above 0"):
        Sampling(top_p=Fraction(1, 10**400))


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
