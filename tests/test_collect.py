"""From the ranks' values to what the caller gets: joined, listed, reduced, or one of them."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from bandmaster import CollectError, Concat, Gather, Mesh, Only, Reduce
from bandmaster.plan.collection import collect
from bandmaster.plan.rows import RealRows, on_mesh, sources


def rows_of(counts, size=None):
    return RealRows(tuple(map(range, counts)), size)


def concat(values, ranks=None, real_rows=None):
    ranks = range(len(values)) if ranks is None else ranks
    return collect(Concat("dp"), ranks, values, "Actor.step", real_rows)


def reduced(op, values):
    return collect(Reduce(op), range(len(values)), values, "Actor.step")


def test_concat_joins_in_the_order_given():
    assert concat([[1, 2], [3], []], ranks=[4, 0, 2]) == [1, 2, 3]
    assert concat([np.array([1]), np.array([2, 3])]).tolist() == [1, 2, 3]
    assert concat([{"a": torch.tensor([1])}, {"a": torch.tensor([2])}])["a"].tolist() == [1, 2]


def test_concat_of_nones_is_none():
    assert concat([None, None]) is None
    assert concat([None, None], real_rows=rows_of((2, 0), 2)) is None


def test_gather_lists_and_only_takes_one():
    values = [None, 3, "x"]

    assert collect(Gather(), [0, 1, 2], values, "C.m") == [None, 3, "x"]
    assert collect(Only(tp=1), [1], [values], "C.m") is values


@pytest.mark.parametrize(
    "wrap",
    [lambda x: x, torch.nn.Parameter, lambda x: {"x": {"y": x}, "n": [1, 2]}, lambda x: TensorDict({"x": x}, [2])],
    ids=["tensor", "parameter", "dict", "TensorDict"],
)
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_what_is_joined_or_reduced_is_detached(wrap, n_ranks):
    values = [wrap(torch.ones(2, requires_grad=True)) for _ in range(n_ranks)]
    losses = [{"loss": torch.ones((), requires_grad=True)} for _ in range(n_ranks)]

    results = [concat(values), reduced("mean", losses), reduced("max", losses)]

    assert [(type(x), x.requires_grad, x.grad_fn) for x in map(tensor_in, results)] == [(torch.Tensor, False, None)] * 3
    assert tensor_in(values[0]).requires_grad, "the rank's own is as it was"


def tensor_in(value):
    return value if isinstance(value, torch.Tensor) else tensor_in(next(iter(value.values())))


# --- padding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [list, np.array, torch.tensor, lambda rows: {"x": np.array(rows)},
     lambda rows: TensorDict({"x": torch.tensor(rows)}, batch_size=[len(rows)])],
    ids=["list", "array", "tensor", "dict", "TensorDict"],
)  # fmt: skip
def test_padding_is_removed_exactly(make):
    joined = concat([make([1, 2]), make([3, 1]), make([1, 2])], real_rows=rows_of((2, 1, 0), 2))

    rows = joined["x"] if hasattr(joined, "keys") else joined
    assert (rows if isinstance(rows, list) else rows.tolist()) == [1, 2, 3]


def test_real_rows_are_those_of_the_collected_ranks():
    assert concat([[1, 2], [3, 1]], ranks=[1, 3], real_rows=rows_of((9, 2, 9, 1), 2)) == [1, 2, 3]


def test_padding_that_cannot_be_told_from_rows_is_refused():
    with pytest.raises(CollectError) as caught:
        concat([[1, 2], [3]], ranks=[0, 2], real_rows=rows_of((2, 2, 1), 2))
    assert str(caught.value) == (
        "Actor.step failed on rank 2: returned 1 rows for 2, 1 of them padding, so the padding cannot be "
        "identified; return one row for each row, or split without pad=True"
    )


def test_padding_that_cannot_be_cut_off_is_the_ranks_failure():
    rows = torch.eye(2).to_sparse_csr()
    with pytest.raises(CollectError) as caught:
        concat([rows, rows], real_rows=rows_of((2, 1), 2))
    start = "Actor.step failed on rank 1: returned rows whose padding cannot be removed: torch cannot cut or join rows"
    assert str(caught.value).startswith(start)


# --- reduce -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "result"), [("sum", [6, 9]), ("mean", [2, 3]), ("min", [1, 2]), ("max", [3, 4])], ids=str
)
def test_reduce_is_elementwise(op, result):
    values = [[1, 4], [2, 3], [3, 2]]

    assert [reduced(op, [value[i] for value in values]) for i in (0, 1)] == result
    assert [reduced(op, [np.float32(value[i]) for value in values]) for i in (0, 1)] == result
    assert reduced(op, [np.array(value) for value in values]).tolist() == result
    assert reduced(op, [torch.tensor(value) for value in values]).tolist() == result
    assert reduced(op, [TensorDict({"x": torch.tensor(value)}, []) for value in values])["x"].tolist() == result
    assert reduced(op, [{"a": value[0], "b": {"c": torch.tensor(value)}} for value in values]) == {
        "a": result[0],
        "b": {"c": pytest.approx(torch.tensor(result))},
    }


@pytest.mark.parametrize("make", [bool, np.bool_, torch.tensor, lambda flag: np.array([flag])])
def test_reduce_counts_booleans(make):
    flags = [make(True), make(True), make(False), make(True)]

    assert reduced("sum", flags) == 3
    assert reduced("mean", flags) == 0.75


def test_reduce_keeps_the_dtype_and_its_inputs():
    values = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)]

    assert reduced("mean", values).dtype == torch.bfloat16
    assert reduced("sum", [np.ones(2, np.int16), np.ones(2, np.int16)]).dtype == np.int16
    assert reduced("sum", values).tolist() == [2, 2]
    assert [value.tolist() for value in values] == [[1, 1], [1, 1]]


@pytest.mark.parametrize("of", [np, torch])
@pytest.mark.parametrize(
    ("dtype", "numbers", "mean"),
    [
        ("uint8", [200, 100, 250, 50], 150),
        ("int8", [100, 100, 100, -100], 50),
        ("int32", [2**31 - 1] * 4, 2**31 - 1),
        ("float16", [60_000, 60_000, 60_000, 20_000], 50_000),
    ],
)
def test_a_mean_does_not_overflow(of, dtype, numbers, mean):
    values = [of.asarray([number], dtype=getattr(of, dtype)) for number in numbers]
    scalars = [value[0] for value in values]
    for found in (
        reduced("mean", values)[0],
        reduced("mean", scalars),
        reduced("mean", [{"a": x} for x in scalars])["a"],
    ):
        assert found == pytest.approx(mean)
        assert found.dtype == (values[0] / 1).dtype


def test_the_mean_of_values_in_two_small_dtypes_is_in_one_that_holds_both():
    values = [torch.tensor(60_000.0, dtype=torch.float16), torch.tensor(80_000.0, dtype=torch.bfloat16)]
    assert reduced("mean", values).dtype == torch.float32


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("make", [float, np.float32, np.array, torch.tensor])
def test_the_least_and_the_largest_of_numbers_with_a_nan_is_that_nan(op, make):
    for at in range(3):
        values = [make(float("nan") if rank == at else float(rank)) for rank in range(3)]
        assert math.isnan(reduced(op, values))
        assert type(reduced(op, values)) is type(values[0]) or make is np.array


def test_numbers_and_arrays_of_no_dim_reduce_to_one():
    assert reduced("sum", [1, np.float32(2), np.array(3), np.True_]) == 7
    assert reduced("mean", [torch.tensor(1.0), 4]) == 2.5


def test_nested_tensors_are_added_up():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [row.tolist() for row in reduced("sum", [rows, rows]).unbind()] == [[2, 2], [2, 2, 2]]


def test_reduce_by_a_function_gets_all_values():
    assert reduced(sorted, [3, 1, 2]) == [1, 2, 3]
    assert reduced("_".join, ["a", "b"]) == "a_b"


def test_a_reducing_function_raises_as_it_is():
    with pytest.raises(ZeroDivisionError):
        reduced(lambda values: values[0] / 0, [1, 2])


# --- a mean weighted by rows --------------------------------------------------------------------------------------


def weighted(values, rows, ranks=None):
    ranks = range(len(values)) if ranks is None else ranks
    return collect(Reduce("mean", weights="rows"), ranks, values, "Actor.step", rows)


@pytest.mark.parametrize(
    "make",
    [float, int, np.float32, np.int64, np.array, torch.tensor, lambda x: {"loss": torch.tensor([x])}["loss"]],
)
def test_the_mean_is_weighted_by_the_rows_of_each_collected_rank(make):
    assert weighted([make(1), make(5)], rows_of((3, 1))) == 2
    assert weighted([make(1), make(5)], rows_of((9, 3, 9, 1)), ranks=[1, 3]) == 2
    assert weighted([{"a": {"b": make(1)}}, {"a": {"b": make(5)}}], rows_of((3, 1))) == {"a": {"b": 2}}


def test_equal_rows_weigh_as_if_there_were_no_weights():
    values = [0.1, 0.2, 0.7]

    assert weighted(values, rows_of((7, 7, 7))) == reduced("mean", values)


def test_padding_does_not_count_and_ranks_without_rows_are_left_out():
    assert weighted([1.0, 5.0, float("nan")], rows_of((3, 1, 0), 3)) == 2
    assert weighted([1.0, 5.0, None], rows_of((3, 1, 0))) == 2
    assert weighted([1.0, 5.0], rows_of((0, 0))) == 3, "no rank has rows: all count alike"


def test_many_rows_do_not_overflow_a_small_dtype():
    losses = [torch.tensor(60_000.0, dtype=torch.float16), torch.tensor(2.0, dtype=torch.float16)]

    assert weighted(losses, rows_of((1000, 3000))).item() == pytest.approx(15_001.5, rel=1e-3)


# --- several collects ---------------------------------------------------------------------------------------------


def collected(incoming, mesh, values, real_rows=None):
    """What the caller gets, of the values of the ranks that are collected."""
    ranks = sources(mesh, incoming)
    return collect(on_mesh(mesh, incoming), ranks, [values[rank] for rank in ranks], "Actor.step", real_rows)


def test_each_item_of_a_tuple_has_its_own_collect():
    incoming = (Concat("dp", tp=1), Gather(tp=0), Reduce("mean", weights="rows"), Only(dp=-1))
    values = [([rank], rank, {"loss": float(rank)}, f"rank {rank}") for rank in range(4)]

    made = collected(incoming, Mesh(dp=2, tp=2), values, rows_of((3, 3, 1, 1)))

    assert made == ([1, 3], [0, 2], {"loss": 1.0}, "rank 2")


def test_padding_is_removed_from_what_is_joined_alone():
    incoming = (Concat("dp"), Gather("dp"), Reduce("sum"), Reduce("mean", weights="rows"))
    values = [([1, 2], [1, 2], 2, 1.0), ([3, 1], [3, 1], 2, 5.0), ([1, 2], [1, 2], 2, 9.0)]

    made = collected(incoming, Mesh(dp=3), values, rows_of((2, 1, 0), 2))

    assert made == ([1, 2, 3], [[1, 2], [3, 1], [1, 2]], 6, pytest.approx(7 / 3))


@pytest.mark.parametrize(
    ("values", "rank", "message"),
    [
        (
            [([1], 1), ([1], 2, 3)],
            1,
            "returned a tuple of 3, expected a tuple of 2: one value for each of Concat('dp'), Reduce",
        ),
        (
            [[[1], 1], ([1], 1)],
            0,
            "returned list, expected a tuple of 2: one value for each of Concat('dp'), Reduce('sum')",
        ),
        ([([1], 1), None], 1, "returned NoneType, expected a tuple of 2"),
        ([([1], 1), (2, 1)], 1, "item 0 of the returned tuple: returned int, which has no rows for Concat"),
        ([([1], 1), ([1], "x")], 0, "item 1 of the returned tuple: returned a value that Reduce('sum') cannot reduce"),
    ],
)
def test_what_does_not_fit_the_collects_names_the_rank_and_the_item(values, rank, message):
    with pytest.raises(CollectError) as caught:
        collected((Concat("dp"), Reduce("sum")), Mesh(dp=2), values)
    assert f"Actor.step failed on rank {rank}: {message}" in str(caught.value)


# --- mistakes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "rank", "message"),
    [
        ([3, 4], 1, "Actor.step failed on rank 1: returned int, which has no rows for Concat to join; return a batch"),
        ([[1], None], 5, "Actor.step failed on rank 5: returned NoneType, which has no rows for Concat to join"),
        (
            [[1], np.array([1])],
            5,
            "rank 5: returned ndarray, but rank 1 returned list; Concat joins values of one type",
        ),
        (
            [[1], {"a": [1], "b": 2}],
            5,
            "rank 5: returned a value that Concat cannot join: a dict mixes batches with other",
        ),
        ([np.ones((1, 2)), np.ones((1, 3))], 1, "(rank 1: ndarray of shape (1, 2), rank 5: ndarray of shape (1, 3))"),
        ([torch.eye(2).to_sparse_csr()] * 2, 1, "cannot join: torch cannot cut or join rows in the torch.sparse_csr"),
        ([{"a": [1]}, {"b": [1]}], 1, "cannot join dicts with keys ['a'] (part 0) and ['b'] (part 1)"),
    ],
)
def test_what_cannot_be_joined_names_the_rank_and_the_type(values, rank, message):
    with pytest.raises(CollectError) as caught:
        concat(values, ranks=[1, 5])
    assert message in str(caught.value)
    assert (caught.value.rank, caught.value.method) == (rank, "Actor.step")


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize(
    ("values", "types"),
    [
        ([None, 1], "(rank 0: NoneType, rank 1: int)"),
        ([[1], [2]], "(rank 0: list, rank 1: list): list is neither a number nor an array, tensor or dict of them"),
        (["a", "b"], "(rank 0: str, rank 1: str): str is neither a number nor an array, tensor or dict of them"),
        ([{"a": 1}, {"b": 1}], "(rank 0: dict, rank 1: dict): dicts with different keys: [['a'], ['b']]"),
        ([{"a": 1}, 1], "(rank 0: dict, rank 1: int)"),
        ([torch.ones(2), torch.ones(1)], "(rank 0: Tensor, rank 1: Tensor): values of different shapes: [(2,), (1,)]"),
        ([{"a": np.ones(2)}, {"a": 1}], "(rank 0: dict, rank 1: dict): values of different shapes: [(2,), ()]; return"),
    ],
)
def test_what_cannot_be_reduced_names_ranks_and_types(op, values, types):
    with pytest.raises(CollectError) as caught:
        reduced(op, values)
    assert f"Actor.step failed on rank 0: returned a value that Reduce({op!r}) cannot reduce {types}" in str(
        caught.value
    )


def test_ranks_without_rows_do_not_decide_about_the_type():
    parts = [np.arange(3), np.array([])]
    joined = collect(Concat("dp"), (0, 1), parts, "W.m")
    assert joined.dtype == parts[0].dtype
    assert joined.tolist() == [0, 1, 2]
    assert collect(Concat("dp"), (0, 1), [np.ones((1, 2)), []], "W.m").shape == (1, 2)
