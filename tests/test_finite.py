"""A class that checks for finite numbers names the rank, the method and the column, and passes what is right."""

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.testing import finite

NAN = float("nan")


class Model(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def logarithm(self, rows):
        return {"inner": {"log": torch.log(torch.as_tensor(rows["p"]))}, "names": ["a"] * len(rows["p"])}

    @register(Dispatch.ONE_TO_ALL)
    def metrics(self, loss):
        return {"loss": loss / 2, "step": 3, "name": "x", "none": None}

    @register(Dispatch.ONE_TO_ALL)
    def same(self, value, *, named=None):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def items(self, loss):
        yield 1.0
        yield [10 * loss - 10 * loss]

    @register(Dispatch.REQUEST, concurrency=4)
    async def parts(self, loss):
        yield 1.0
        yield {"loss": 10 * loss - 10 * loss}

    @register(Dispatch.REQUEST, concurrency=4)
    async def answer(self, loss):
        await asyncio.sleep(0)
        return np.array([1.0, 1.0 / loss])

    @register(Dispatch.ONE_TO_ALL)
    @staticmethod
    def not_a_number():
        return float("nan")

    def helper(self):
        return float("nan")


@pytest.fixture
def checked(make_group):
    return make_group(2, finite(Model))


def why(call):
    error = call.exception(timeout=60)
    assert isinstance(error, bm.RemoteError)
    assert isinstance(error.__cause__, FloatingPointError)
    return error.rank, str(error.__cause__)


def test_what_is_not_finite_is_named(checked):
    p = np.array([1.0, 1.0, 1.0, 0.0, -1.0, 1.0])
    inner = "logarithm returns ['inner']['log'] with 1 NaN and 1 infinite of 3 numbers, the first in row 0"
    assert why(checked.logarithm.submit({"p": p})) == (1, inner)
    assert why(checked.metrics.submit(float("inf"))) == (0, "metrics gets loss = inf")
    assert why(checked.same.submit(0, named=NAN)) == (0, "same gets named = nan")
    waves = np.array([1.0, complex(0.0, NAN)])
    assert why(checked.same.submit(waves))[1] == "same gets value with 1 NaN of 2 numbers, the first in row 1"
    given = {"p": np.array([1.0, np.nan])}
    assert why(checked.logarithm.submit(given)) == (
        1,
        "logarithm gets rows ['p'] with 1 NaN of 1 number, the first in row 0",
    )
    with np.errstate(divide="ignore"):
        assert (
            "answer returns with 1 infinite of 2 numbers, the first in row 1"
            in why(checked.answer.submit(np.float64(0.0)))[1]
        )


def nested(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "right", "wrong", "words"),
    [
        (lambda rows: nested(*rows), [[1.0], [2.0, 3.0]], [[1.0], [2.0, NAN]], "[1] with 1 NaN of 2 numbers"),
        (lambda rows: torch.tensor(rows).to_sparse(), [0.0, 1.0], [0.0, NAN], ".values() with 1 NaN of 1 number,"),
        (lambda rows: torch.tensor(rows).to(torch.float8_e4m3fn), [1.0, 2.0], [1.0, NAN], "with 1 NaN of 2 numbers"),
        (lambda rows: torch.tensor(rows).to(torch.bfloat16), [1.0, 2.0], [1.0, NAN], "with 1 NaN of 2 numbers"),
        (lambda rows: TensorDict({"a": torch.tensor(rows)}), [1.0, 2.0], [1.0, NAN], "['a'] with 1 NaN of 2 numbers"),
    ],
    ids=["nested", "sparse", "float8", "bfloat16", "TensorDict"],
)
def test_tensors_of_every_kind_are_checked(checked, make, right, wrong, words):
    assert len(checked.same(make(right))) == 2
    assert f"same gets value {words}" in why(checked.same.submit(make(wrong)))[1]


@dataclass
class Config:
    batch_size: int = 4
    layout: str = "dense"


def test_settings_are_no_columns(checked):
    assert checked.same(Config()) == [Config()] * 2


def test_the_items_of_a_stream_are_checked(checked):
    assert len(list(checked.items.stream(1.0))) == 2 * 2
    assert len(list(checked.parts.stream(1.0))) == 2
    with pytest.raises(bm.RemoteError, match="items gets loss = inf"):
        list(checked.items.stream(float("inf")))
    with pytest.raises(bm.RemoteError, match=r"items yields \[0\] = nan"):
        list(checked.items.stream(1e308))
    with pytest.raises(bm.RemoteError, match=r"parts yields \['loss'\] = nan"):
        list(checked.parts.stream(1e308))


def test_what_is_finite_passes_and_the_class_is_itself(checked):
    assert checked.metrics(1.0)[0] == {"loss": 0.5, "step": 3, "name": "x", "none": None}
    assert checked.logarithm({"p": np.ones(4)})["names"] == ["a"] * 4
    assert np.isnan(checked.not_a_number()).all(), "a static method is not checked"
    assert finite(Model).__name__ == "Model"
    assert issubclass(finite(Model), Model)
    assert finite(Model, ["metrics"]).logarithm is Model.logarithm, "only what was named is wrapped"


def test_infinite_numbers_may_be_right(make_group):
    group = make_group(1, finite(Model, allow_infinite=True))
    assert torch.isinf(group.logarithm({"p": np.zeros(2)})["inner"]["log"]).all()
    assert "NaN" in why(group.logarithm.submit({"p": np.array([-1.0])}))[1]


def test_a_method_that_is_not_registered():
    with pytest.raises(bm.UsageError, match=r"Model has no registered method 'metric'; did you mean 'metrics'"):
        finite(Model, ["metric"])
