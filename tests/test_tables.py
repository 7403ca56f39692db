"""Tables of pandas and of the user's own, cut over the ranks and joined again; what is no table is refused."""

import math
import pickle
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from tensordict import TensorDict, lazy_stack

import bandmaster as bm
from bandmaster import Concat, Dispatch, Gather, PerRank, Split, TransferProtocol, register
from bandmaster.plan.batch import concat_rows, count_rows, take_rows

# pandas 2, the last one for Python 3.10, leaves parts without rows out of the dtype and index, and warns.
joins_empty_parts = pytest.mark.skipif(pandas.__version__ < "3", reason="pandas 2 joins parts without rows differently")


class Columns(NamedTuple):
    ids: np.ndarray
    names: list


@dataclass
class Rollout:
    ids: np.ndarray
    meta: dict


class Labelled(dict):
    """A dict of the user's own."""


class Cutter(bm.Worker):
    @register(TransferProtocol(Split("dp", balance="cost"), Gather()))
    def balanced(self, table):
        return table["row"]

    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def look(self, table):
        return type(table), count_rows(table)

    @register(Dispatch.DP_PROTO)
    def echo(self, table, config=None):
        return table

    @register(TransferProtocol(Split("dp", pad=True), Concat("dp")))
    def echo_padded(self, table):
        return table

    @register(TransferProtocol(PerRank(), Concat("dp")))
    def give(self, part):
        return part

    @register(Dispatch.DP_PROTO)
    def dtypes(self, frame):
        return [list(map(repr, frame.dtypes))] * len(frame)


def tables():
    """One batch of five rows of each kind."""
    frame = pandas.DataFrame({"n": range(5), "kind": pandas.Categorical(list("aabca")), "text": list("vwxyz")})
    return {
        "DataFrame": frame,
        "DataFrame with an index": frame.set_index("text"),
        "Series": frame["text"],
        "UserDict": UserDict(ids=np.arange(5), frame=frame),
        "NamedTuple": Columns(np.arange(5), list("abcde")),
        "dataclass": Rollout(np.arange(5), {"names": list("abcde")}),
    }


every_table = pytest.mark.parametrize("kind", tables())


def plain(value):
    """The rows of a table as lists and dicts, so that they can be compared."""
    if isinstance(value, pandas.DataFrame | pandas.Series):
        return value.to_dict(), str(value.index), str(getattr(value, "dtypes", ""))
    if isinstance(value, dict | UserDict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Columns | Rollout):
        return {name: plain(getattr(value, name)) for name in value.__annotations__}
    return value.tolist() if hasattr(value, "tolist") else value


@every_table
def test_what_is_cut_can_be_joined_again(kind):
    table = tables()[kind]
    parts = [take_rows(table, range(2)), take_rows(table, range(2, 2)), take_rows(table, range(2, 5))]

    assert [count_rows(part) for part in parts] == [2, 0, 3]
    joined = concat_rows([pickle.loads(pickle.dumps(part)) for part in parts])
    assert {type(value) for value in [joined, *parts]} == {type(table)}
    assert plain(joined) == plain(table)
    assert count_rows(concat_rows([parts[1], parts[1]])) == 0


@pytest.fixture(scope="module")
def cutter(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        yield bm.WorkerGroup(pool, Cutter)


@every_table
def test_each_rank_gets_its_rows_in_the_type_of_the_table(cutter, kind):
    table = tables()[kind]

    assert cutter.look(table) == [(type(table), 3), (type(table), 2)]
    assert plain(cutter.echo(table)) == plain(table)


@joins_empty_parts
def test_padding_of_a_table_does_not_come_back(cutter):
    table = tables()["DataFrame"]

    assert plain(cutter.echo_padded(table)) == plain(table)


few_backends = pytest.mark.backends("inprocess", "local")  # as no backend looks into a table


def every_dtype():
    """A frame of six rows with a column of each kind of dtype."""
    days = pandas.date_range("2024-01-01 08:00", periods=6, tz="Asia/Tokyo")
    texts, numbers = ["a", None, "c", "d", "e", "f"], [1, None, 3, 4, 5, 6]
    dictionary = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    columns = {
        "time with a zone": days,
        "time": days.tz_localize(None),
        "duration": days - days[0],
        "category": pandas.Categorical(list("abcabc")),
        "ordered category": pandas.Categorical(list("abcabc"), categories=list("cba"), ordered=True),
        "Int8": pandas.array(numbers, dtype="Int8"),
        "Float32": pandas.array(numbers, dtype="Float32"),
        "boolean": pandas.array([True, None, False] * 2, dtype="boolean"),
        "string in Python": pandas.array(texts, dtype=pandas.StringDtype("python")),
        "string in Arrow": pandas.array(texts, dtype=pandas.StringDtype("pyarrow")),
        "default string": pandas.Series(list("abcdef")),
        "objects": pandas.Series(texts, dtype=object),
        "period": pandas.period_range("2024-01", periods=6, freq="M"),
        "interval": pandas.interval_range(0, 6),
        "sparse": pandas.arrays.SparseArray([0, 0, 1, 0, 2, 0]),
        "Arrow": pandas.array(numbers, dtype="int64[pyarrow]"),
        "Arrow, time": pandas.Series(days).astype(pandas.ArrowDtype(pyarrow.timestamp("us", tz="Asia/Tokyo"))),
        "Arrow, dictionary": pandas.array(list("abcabc"), dtype=pandas.ArrowDtype(dictionary)),
        0: np.arange(6, dtype="f4"),
    }
    return pandas.DataFrame(columns)


def assert_same(found, expected):
    """They are equal, and so are all dtypes, with categories, storages and time zones."""
    both = [value.to_frame() if isinstance(value, pandas.Series) else value for value in (found, expected)]
    pandas.testing.assert_frame_equal(*both, check_freq=False)
    assert type(found) is type(expected)
    assert list(map(repr, both[0].dtypes)) == list(map(repr, both[1].dtypes))


INDICES = {
    "numbers": None,
    "times": pandas.date_range("2024-01-01", periods=6, tz="Asia/Tokyo"),
    "categories": pandas.CategoricalIndex(list("abcdef")),
    "two levels": pandas.MultiIndex.from_product([["x", "y"], [1, 2, 3]], names=["letter", "number"]),
    "not unique": pandas.Index([1, 1, 1, 2, 2, 2], name="id"),
}


@few_backends
@pytest.mark.parametrize("index", INDICES)
def test_operations_on_rows_keep_every_dtype_of_pandas(cutter, index):
    frame = every_dtype().rename_axis(columns="kind")
    if INDICES[index] is not None:
        frame.index = INDICES[index]
    rows, names = cutter.echo.submit(frame), list(frame.columns)
    cases = {
        "all": (rows, frame),
        "a slice": (rows[1:4], frame.iloc[1:4]),
        "no rows": (rows[2:2], frame.iloc[2:2]),
        "another order": (rows[[5, 0, 3, 3]], frame.iloc[[5, 0, 3, 3]]),
        "columns": (rows.select(*names[::-2]), frame[names[::-2]]),
        "without columns": (rows.drop(0, "period"), frame.drop(columns=[0, "period"])),
        "other names": (rows.rename({0: "zero"}, time="t"), frame.rename(columns={0: "zero", "time": "t"})),
        "joined": (rows.select(*names[9:]).join(rows.select(*names[:9])), frame[names[9:] + names[:9]]),
        "joined, in part": (rows.select(*names[:9]).join(rows.select(*names[9:]))[[4, 1]], frame.iloc[[4, 1]]),
        "stacked": (bm.concat([rows[3:], rows[:2]]), pandas.concat([frame.iloc[3:], frame.iloc[:2]])),
    }
    for operated, expected in cases.values():
        assert_same(operated.result(), expected)
        assert_same(cutter.echo(operated), cutter.echo(expected))
    assert cutter.dtypes(cases["joined"][0]) == cutter.dtypes(cases["joined"][1])
    for name in names:
        column = frame[name]
        rows = cutter.echo.submit(column)
        assert_same(rows[1:4].result(), column.iloc[1:4])
        assert_same(bm.concat([rows[[5, 0]], rows]).result(), pandas.concat([column.iloc[[5, 0]], column]))


@few_backends
@pytest.mark.parametrize("size", [1, 20_000])
@pytest.mark.parametrize("lengths", [[3, 1, 2, 4], [3, 3, 1, 2]], ids=["ragged", "equal on one rank"])
def test_a_lazy_stack_of_unequal_rows_is_a_handle(cutter, size, lengths):
    def lengths_of(stack, name="ids"):
        return [len(row[name]) // size for row in stack.unbind(0)]

    stack = lazy_stack([TensorDict({"ids": torch.zeros(n * size), "n": torch.tensor(n)}) for n in lengths])
    rows = cutter.echo.submit(stack)
    assert (len(rows), list(rows.schema)) == (4, ["ids", "n"])
    assert lengths_of(cutter.echo(rows)) == lengths_of(rows.result()) == lengths
    assert lengths_of(rows[[3, 0]].result()) == [lengths[3], lengths[0]]
    assert lengths_of(bm.concat([rows, cutter.put(stack)]).result()) == lengths * 2
    assert lengths_of(rows.sort_by("n").rename(ids="tokens").select("tokens").result(), "tokens") == sorted(lengths)


@few_backends
def test_frames_without_columns_are_concatenated_by_handle(cutter):
    rows = cutter.echo.submit(pandas.DataFrame(index=range(4)))
    assert bm.concat([rows, rows[:1]]).result().shape == (5, 0)


@few_backends
@pytest.mark.parametrize("name", ["ordered category", "Int8", "time with a zone", "default string", "period", 0])
def test_rows_are_sorted_as_pandas_sorts_them(cutter, name):
    frame = every_dtype()
    assert_same(cutter.echo.submit(frame).sort_by(name).result(), frame.sort_values(name, kind="stable"))


@few_backends
@pytest.mark.parametrize(
    "column",
    [
        *([2**63 + 2, 2**63 + 1, -1], [2**53 + 1, 2**53, 0.5], ["b", "a\0", "a"], [3, 1.5, True], []),
        *([np.float32(2), np.float32(1)], [torch.tensor(2), torch.tensor(1)]),
    ],
    ids=str,
)
def test_rows_are_sorted_by_a_list_as_python_sorts_it(cutter, column):
    assert cutter.echo.submit({"key": column}).sort_by("key").result()["key"] == sorted(column)


@few_backends
def test_nan_in_a_list_is_sorted_last(cutter):
    rows = cutter.echo.submit({"key": [3.0, math.nan, 1.0, math.nan, 2.0], "row": [0, 1, 2, 3, 4]})
    assert rows.sort_by("key").result()["row"] == [2, 4, 0, 1, 3]


@few_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_rows_are_sorted_and_balanced_by_tensors_of_any_dtype_in_one_column(cutter, dtype):
    table = {"cost": torch.tensor([[8], [1], [4], [2]]).to(dtype), "row": [0, 1, 2, 3]}
    assert cutter.echo.submit(table).sort_by("cost").result()["row"] == [1, 3, 2, 0]
    for rows in table, cutter.echo.submit(table):
        assert cutter.balanced(rows) == [[0, 1], [2, 3]]


@few_backends
def test_a_column_of_columns_is_described_by_its_type(cutter):
    nested = TensorDict({"x": torch.zeros(5, 2), "y": torch.zeros(5, 3)}, [5])
    assert str(dict(cutter.echo.submit(TensorDict({"n": nested}, [5])).schema)) == "{'n': TensorDict}"


@few_backends
@pytest.mark.parametrize(
    "column",
    [
        *(np.ones((2, 2)), torch.ones(2, 2), [(1, 2), (1, 1)], [[1], [1, 2]]),
        *([None, 1], [10, "9"], [{}, {1: 2}], pandas.Series([(), 1])),
    ],
)
def test_a_column_by_which_rows_cannot_be_sorted_is_named(cutter, column):
    with pytest.raises(bm.BatchError, match=r"cannot sort by column 'key': that takes one value for each row"):
        cutter.echo.submit({"key": column}).sort_by("key")
    with pytest.raises(bm.BatchError, match="cannot sort rows: its rows have no named columns"):
        cutter.echo.submit([2, 1]).sort_by(None)


@few_backends
@pytest.mark.parametrize(
    "columns",
    [
        [pandas.Categorical(list("aba")), pandas.Categorical(list("cdc"))],
        [pandas.Categorical(list("ab"), list("ab")), pandas.Categorical(list("ab"), list("ba"))],
        [pandas.array(["a"], dtype=pandas.StringDtype(storage)) for storage in ("python", "pyarrow")],
        [pandas.array([1, 2, 3], dtype="Int8"), np.array([1.5])],
        [pandas.date_range("2024", periods=2, tz=zone) for zone in ("UTC", "Asia/Tokyo")],
        [pandas.arrays.SparseArray([1, 0]), np.array([1.5, 0])],
        [np.array([1, 2]), np.array([1.5])],
    ],
    ids=["categories", "order of categories", "storages", "nullable", "time zones", "sparse", "numbers"],
)
@pytest.mark.parametrize("are_frames", [True, False])
@joins_empty_parts
def test_ranks_may_return_different_dtypes_of_a_column(cutter, columns, are_frames):
    parts = [{"x": pandas.Series(column), "y": np.arange(len(column))} for column in columns]
    parts = [pandas.DataFrame(part) for part in parts] if are_frames else parts
    whole = cutter.give(parts)  # as the plain call joins them
    rows = cutter.give.submit(parts)
    last = len(parts[0]["y"])
    assert len(rows.schema["x"].dtype.split(" or ")) == 2

    def check(found, expected):
        assert type(found) is type(expected)
        assert_same(pandas.DataFrame(found), pandas.DataFrame(expected))

    check(rows.result(), whole)
    check(rows[:1].result(), take_rows(whole, range(1)))
    check(rows[last:].result(), take_rows(whole, range(last, len(rows))))
    check(rows[[last, 0]].select("x", "y").result(), take_rows(whole, np.array([last, 0])))
    check(rows[:0].result(), take_rows(whole, range(0)))
    check(cutter.echo(rows[last:]), take_rows(whole, range(last, len(rows))))
    one_by_one = bm.concat([cutter.give.submit([part, take_rows(part, range(0))]) for part in parts])
    check(one_by_one[:1].result(), take_rows(whole, range(1)))


@few_backends
def test_ranks_may_return_arrays_of_strings_of_different_lengths(cutter):
    rows = cutter.give.submit([{"text": np.array(["a", "b"])}, {"text": np.array(["long"])}])
    for table in rows[:1].result(), rows[1:2].select("text").result(), cutter.echo(rows[[0]]):
        assert table["text"].dtype == "<U4"
    assert cutter.echo(rows)["text"].tolist() == ["a", "b", "long"]


@few_backends
@pytest.mark.parametrize("kind", [dict, pandas.DataFrame])
def test_ranks_may_return_columns_in_another_order(cutter, kind):
    parts = [kind({"x": np.arange(2), "y": np.ones(2)}), kind({"y": np.zeros(1), "x": np.array([7])})]
    rows = cutter.give.submit(parts)
    assert list(rows.result()) == list(rows[2:].result()) == list(rows.schema) == ["x", "y"]
    assert cutter.echo(rows[1:])["x"].tolist() == [1, 7]
    other = cutter.give.submit(parts[::-1])
    assert list(bm.concat([rows, other])[3:].result()) == ["x", "y"]


@few_backends
@pytest.mark.parametrize("kind", [OrderedDict, UserDict, Labelled, lambda items: defaultdict(list, items)])
def test_operations_on_columns_keep_the_type_of_a_mapping(cutter, kind):
    table = kind({"a": np.arange(4), "b": list("wxyz"), "c": np.ones(4)})
    rows = cutter.echo.submit(table)
    operated = {
        "a c": rows.select("a", "c"),
        "c a": rows.select("c", "a"),
        "a b": rows.drop("c"),
        "a b d": rows.rename(c="d"),
        "b a c": rows.select("b").join(rows.drop("b")),
    }
    for names, future in operated.items():
        for value in future.result(), cutter.echo(future):
            assert type(value) is type(table)
            assert " ".join(value) == names
            assert value["a"].tolist() == [0, 1, 2, 3]
    assert list(table) == ["a", "b", "c"]


@few_backends
def test_a_frame_that_is_joined_with_columns_it_cannot_hold_is_a_dict(cutter):
    frame, tensors = pandas.DataFrame({"x": range(5), "y": list("abcde")}), torch.ones(5, 2, dtype=torch.bfloat16)
    for other in {"z": tensors}, TensorDict({"z": tensors}, [5]):
        rows = cutter.echo.submit(frame).join(cutter.echo.submit(other))[[3, 0]]
        for table in rows.result(), cutter.echo(rows):
            assert type(table) is dict
            assert list(table) == ["x", "y", "z"]
            assert_same(table["y"], frame["y"].iloc[[3, 0]])
            assert torch.equal(table["z"], tensors[:2])


@few_backends
def test_ranks_without_rows_do_not_determine_the_dtypes(cutter):
    nothing = pandas.DataFrame({"x": []})
    for parts in [nothing, pandas.DataFrame({"x": [1, 2]})], [pandas.DataFrame({"x": [1, 2]}), nothing]:
        rows = cutter.give.submit(parts)
        for table in rows.result(), rows[:0].result(), cutter.echo(rows), cutter.give(parts):
            assert table["x"].dtype == "int64"


class Opaque:
    """A type of the user's own that nothing is known of."""


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ((np.arange(5), np.arange(5)), "'table' is tuple. "),
        (Rollout(np.arange(5), {"seed": 1}), "'table' is test_tables.Rollout, whose field 'meta' is dict. "),
        (Opaque(), "'table' is test_tables.Opaque. "),
    ],
    ids=["tuple", "config", "unknown type"],
)
def test_a_call_without_a_batch_is_refused(cutter, table, words):
    with pytest.raises(bm.BatchError) as refused:
        cutter.echo(table)
    assert f"Cutter.echo splits batches by Split('dp'), but no argument is a batch: {words}" in str(refused.value)
    with pytest.raises(bm.BatchError, match=r"arguments=\{'table': Broadcast\(\), 'config': Broadcast\(\)\}"):
        cutter.echo.submit(table, config=0.5)


def test_a_config_is_broadcast_beside_a_batch(cutter):
    assert cutter.echo([1, 2, 3], config=Rollout(np.arange(5), {"seed": 1})) == [1, 2, 3]
