"""A future is a handle: rows stay on the ranks that made them, and go from rank to rank."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import weakref
from enum import Enum
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from clock import idle_time
from ctrl_c import done_when, pressed
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register
from bandmaster.calls.derived import Derived
from bandmaster.calls.future import Claim
from bandmaster.calls.submission import Submitter
from bandmaster.rows.kept import KeptPart, held_by

SMALL, LARGE = 2, 30_000  # columns: of rows that come with the reply, and of rows that stay


def shared_memory(*values):
    """Pairs of columns of some values such that what is written to one shows in the other."""
    columns = {(n, name): value[name] for n, value in enumerate(values) for name in value.keys()}  # noqa: SIM118
    return [(one, other) for one, other in combinations(columns, 2) if _share(columns[one], columns[other])]


def _share(one, other):
    if isinstance(one, list) or isinstance(other, list):
        mutable = [{id(item) for item in column if isinstance(item, list)} for column in (one, other)]
        return not mutable[0].isdisjoint(mutable[1])
    return np.shares_memory(*[getattr(column, "values", column) for column in (one, other)])


class ReadWhen:
    """An object that can be unpickled when a file exists."""

    def __init__(self, gate):
        self.gate = gate

    def __reduce__(self):
        return _read_when, (self.gate,)


def _read_when(gate):
    Path(f"{gate} is waited for").touch()
    while not os.path.exists(gate):
        time.sleep(0.001)


class Rows(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def make(self, ids, width):
        names = [f"row {i}" for i in ids]
        return {"id": ids, "wide": np.repeat(ids[:, None], width, 1).astype("f4"), "name": names}

    @register(Dispatch.DP_PROTO)
    def echo(self, rows):
        return rows

    @register(bm.TransferProtocol(bm.Split("dp", pad=True), bm.Concat("dp")))
    def echo_padded(self, rows):
        return rows

    @register(bm.TransferProtocol(bm.Split("dp", pad=True), bm.Concat("dp")))
    def of_rank(self, ids):
        return {"id": ids + self.rank / 2 if self.rank else ids, "wide": np.zeros((len(ids), 1 + self.rank // 2))}

    @register(bm.TransferProtocol(bm.Split("dp", balance="id"), bm.Concat("dp")))
    def echo_balanced(self, rows):
        assert rows["id"].sum() == 7  # 0 to 6 in three parts
        return rows

    @register(Dispatch.DP_PROTO)
    def who(self, rows):
        return {"id": rows["id"], "rank": np.full(len(rows["id"]), self.rank), "width": rows["wide"][:, 0]}

    @register(Dispatch.ONE_TO_ALL)
    def count(self, rows):
        return len(rows["id"]), float(rows["wide"].sum())

    @register(Dispatch.ONE_TO_ALL)
    def write(self, rows):
        rows["wide"] += 1
        rows["name"].append("mine")
        self.kept = rows
        return float(rows["wide"].sum())

    @register(Dispatch.ONE_TO_ALL)
    def kept_wide(self):
        return float(self.kept["wide"].sum())

    @register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def write_own(self, rows):
        before = [float(rows["wide"].sum()), *rows["name"]]
        rows["wide"] += 1
        rows["name"].append("mine")
        self.kept = rows
        return before

    @register(bm.TransferProtocol(bm.Split("dp"), bm.Gather()), arguments={"narrow": bm.Split("dp", "tp")})
    def ids_of_both(self, wide, narrow):
        return [wide["id"].tolist(), narrow["id"].tolist()]

    @register(Dispatch.DP_PROTO)
    def kept_one(self, ids):
        self.array = np.zeros((len(ids), LARGE))
        return self.array

    @register(Dispatch.ONE_TO_ALL)
    def write_kept(self):
        self.array += 1

    @register(Dispatch.DP_PROTO)
    def tensors(self, ids):
        ids = torch.as_tensor(ids)
        ragged = torch.nested.as_nested_tensor([torch.full((int(i) + 1,), float(i)) for i in ids], layout=torch.jagged)
        columns = {"id": ids, "wide": ids[:, None].expand(-1, LARGE).clone(), "ragged": ragged}
        return TensorDict(columns, batch_size=[len(ids)])

    @register(Dispatch.DP_PROTO)
    def frame(self, ids):
        return pd.DataFrame({"id": ids, "wide": np.zeros(len(ids)), "name": [bytes(LARGE) for _ in ids]})

    @register(Dispatch.DP_PROTO)
    def objects(self, ids):
        return {"id": ids, "wide": [[i, bytes(LARGE)] for i in ids]}

    @register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def sharing(self, one, other):
        return len(one["id"]), len(other["id"]), shared_memory(one, other)

    @register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def same_objects(self, rows):
        return len(rows["wide"]) - len(set(map(id, rows["wide"])))

    @register(Dispatch.DP_PROTO)
    def fail(self, rows):
        raise ValueError("no such row")

    @register(Dispatch.DP_PROTO)
    def bare(self, ids):
        return 7 if self.rank else ids

    @register(Dispatch.ONE_TO_ALL)
    def everywhere(self):
        return self.rank

    @register(Dispatch.DP_PROTO, arguments={"names": bm.Broadcast()})
    def named(self, ids, names):
        return {name: ids * n for n, name in enumerate(names)}

    def process(self):
        return os.getpid()

    @register(Dispatch.DP_PROTO)
    def make_when(self, ids, gate, fails=False):
        while not os.path.exists(gate):
            time.sleep(0.001)
        if fails:
            raise ValueError("no such row")
        return self.make(ids, LARGE)

    @register(Dispatch.DP_PROTO)
    def read_when(self, ids, gate):
        return {"id": ids, "object": [ReadWhen(gate) if i == 5 else None for i in ids]}

    @register(Dispatch.REQUEST)
    def map_when(self, ids, gate):
        return self.make_when(ids, gate)

    @register(Dispatch.REQUEST, concurrency=2)
    async def ids(self, rows):
        return {"id": rows["id"]}

    @register(Dispatch.DP_PROTO, arguments={"entry": bm.Broadcast()})
    def log_rows(self, rows, entry):
        return self.log(entry) and rows

    @register(Dispatch.ONE_TO_ALL)
    def log(self, entry=None):
        self.entries = [*getattr(self, "entries", ()), entry]
        return self.entries


@pytest.fixture(scope="module")
def groups(backend):
    with bm.ResourcePool([4], backend=backend) as four, bm.ResourcePool([3], backend=backend) as three:
        yield bm.WorkerGroup(four, Rows, mesh=Mesh(dp=2, tp=2)), bm.WorkerGroup(three, Rows)


def made(group, n=7, width=LARGE):
    return group.make.submit(np.arange(n), width)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_what_is_known_of_rows_that_stay(two, width):
    rows = made(two, 7, width)
    assert len(rows) == 7
    assert rows
    assert {name: str(column) for name, column in rows.schema.items()} == {
        "id": "int64[]",
        "wide": f"float32[{width}]",
        "name": "list",
    }
    assert 7 * width * 4 < rows.nbytes < 7 * width * 4 + 1000
    assert [(place.method, place.rank, place.n_rows) for place in rows.where] == [
        ("Rows.make", 0, 4),
        ("Rows.make", 2, 3),
    ]
    assert rows.result()["name"] == [f"row {i}" for i in range(7)]


def test_rows_of_more_columns_than_a_message_has_names(two, three):
    names = [f"model.layers.{n}.feature" for n in range(4_000)]
    rows = two.named.submit(np.arange(4), names)
    assert (len(rows), list(rows.schema)) == (4, names)
    assert three.named(rows.select(names[3]).result()[names[3]], ["x"])["x"].tolist() == [0] * 4
    again = three.echo(rows[::-1].select(*names[1:]))
    assert list(again) == names[1:] and again[names[3_999]].tolist() == [3 * 3_999, 2 * 3_999, 3_999, 0]


def test_names_of_columns_may_be_of_any_class(two, three):
    Kind = Enum("Kind", "ACTION REWARD")  # workers cannot import it
    rows = two.named.submit(np.arange(LARGE), list(Kind))
    assert list(rows.schema) == list(Kind)
    assert list(three.echo(rows)) == list(Kind)
    assert rows.select(Kind.REWARD).result()[Kind.REWARD].tolist() == list(range(LARGE))


def test_rows_count_once_though_their_columns_were_joined_again(two, three):
    rows = made(two)
    full = rows.select("id").join(three.who.submit(rows).select("rank"), rows.select("name"))
    places = [(place.method, place.n_rows) for place in full.where]
    assert places[:2] == [("Rows.make", 4), ("Rows.make", 3)]
    assert places[2:] == [("Rows.who", 3), ("Rows.who", 2), ("Rows.who", 2)]
    twice = [(place.method, place.n_rows) for place in bm.concat([full, full[:1]]).where]
    assert twice[:2] == [("Rows.make", 5), ("Rows.make", 3)]


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_ranks_of_another_mesh_read_their_own_rows(two, three, width):
    for n in (0, 1, 2, 7):
        rows = made(two, n, width)
        seen = three.who(rows)
        assert seen["id"].tolist() == list(range(n))
        assert seen["width"].tolist() == list(range(n))
        assert seen["rank"].tolist() == three.who(made(two, n, width).result())["rank"].tolist()
        assert three.count(rows) == [(n, width * n * (n - 1) / 2)] * 3
        back = two.who.submit(three.echo.submit(rows))
        assert back.result()["id"].tolist() == list(range(n))


def test_operations_move_no_rows_and_can_be_chained(two, three):
    rows = made(two)
    ranks = three.who.submit(rows).select("rank")
    full = rows.rename(name="label").join(ranks)
    assert list(full.schema) == ["id", "wide", "label", "rank"]
    shuffled = full.shuffle(seed=0)
    ids = np.random.default_rng(0).permutation(7)
    assert three.who(shuffled)["id"].tolist() == ids.tolist()
    for start, batch in zip((0, 3, 6), shuffled.batches(3), strict=True):
        value = batch.result()
        assert value["id"].tolist() == value["wide"][:, 5].tolist() == ids[start : start + 3].tolist()
        assert value["label"] == [f"row {i}" for i in ids[start : start + 3]]
    assert three.who(shuffled.sort_by("id")[::2])["id"].tolist() == [0, 2, 4, 6]
    assert rows[rows.select("id").result()["id"] > 4].repeat(2).result()["id"].tolist() == [5, 5, 6, 6]
    both = bm.concat([rows[5:], rows[[0, -1]]])
    assert three.echo(both)["name"] == ["row 5", "row 6", "row 0", "row 6"]
    assert sorted(both.drop("wide").schema) == ["id", "name"]
    assert both.drop("wide").nbytes < rows.nbytes / 100


def test_padding_is_for_the_ranks_alone(three, two):
    rows = made(two, 7)
    padded = three.echo_padded.submit(rows)
    assert padded.result()["id"].tolist() == list(range(7))
    assert two.who(padded)["id"].tolist() == list(range(7))
    assert len(padded) == 7


@pytest.mark.parametrize("n", [1, 2])
def test_ranks_with_padding_alone_do_not_determine_the_columns(three, two, n):
    rows, plain = three.of_rank.submit(np.arange(n)), three.of_rank(np.arange(n))
    taken = two.echo(rows)
    assert taken["id"].dtype == rows[0:].result()["id"].dtype == plain["id"].dtype
    np.testing.assert_equal(taken, plain)


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_rows_in_another_order_are_padded(three, two, width):
    rows = made(two, 7, width)[[6, 0, 3, 1, 5, 2, 4]]
    assert three.echo_padded(rows)["id"].tolist() == [6, 0, 3, 1, 5, 2, 4]


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_rows_that_were_split_by_cost_are_in_their_order(three, two, width):
    rows = made(two, 7, width)[[6, 0, 3, 1, 5, 2, 4]]
    balanced = three.echo_balanced.submit(rows)
    assert balanced.result()["id"].tolist() == [6, 0, 3, 1, 5, 2, 4]
    assert two.who(balanced)["id"].tolist() == [6, 0, 3, 1, 5, 2, 4]
    with pytest.raises(bm.BatchError, match="neither a column of 'rows' nor an argument is called 'id'"):
        three.echo_balanced(rows.drop("id"))


def test_tensors_and_ragged_columns(two, three):
    rows = two.tensors.submit(np.arange(5))
    assert {name: repr(column) for name, column in rows.schema.items()} == {
        "id": "int64[]",
        "wide": f"int64[{LARGE}]",
        "ragged": "jagged float32",
    }
    some = three.echo(rows[[3, 0, 4]].rename(ragged="r").join(rows[:3].select("ragged")))
    assert isinstance(some, TensorDict)
    assert some["id"].tolist() == [3, 0, 4]
    assert [row.tolist() for row in some["r"].unbind()] == [[3.0] * 4, [0.0], [4.0] * 5]
    assert [len(row) for row in some["ragged"].unbind()] == [1, 2, 3]


@pytest.mark.parametrize("n", [5, 20_000])
def test_sparse_and_strided_nested_tensors(two, three, n):
    diagonal = torch.sparse_coo_tensor(torch.arange(n).expand(2, n), torch.ones(n), (n, n), check_invariants=True)
    ragged = torch.nested.as_nested_tensor([torch.full((8,), float(i)) for i in range(n)])
    for tensor, column, first in (diagonal, f"float32[{n}]", [0, 1, 0]), (ragged, "jagged float32", [3, 1, 2]):
        rows = two.echo.submit(tensor)
        assert (len(rows), repr(rows.schema[None])) == (n, column)
        for few in rows[[3, 1, 2]].result(), three.echo(rows[[3, 1, 2]]), three.echo(bm.concat([rows[3:4], rows[1:3]])):
            assert few.layout is tensor.layout
            assert [float(row.to_dense()[1]) for row in few.unbind()] == first
        assert three.echo(rows).size(0) == n


@pytest.mark.parametrize("dtype", ["u1", "i1", "u8"])
def test_rows_are_selected_by_integers_of_any_dtype(two, dtype):
    rows = two.put({"id": np.arange(1000)})
    assert rows[np.array([1, 100], dtype)].result()["id"].tolist() == [1, 100]
    if dtype == "i1":
        assert rows[np.array([-1], dtype)].result()["id"].tolist() == [999]
    with pytest.raises(bm.BatchError, match=r"no row 9\d+ among 3 rows"):
        rows[:3][np.array([min(np.iinfo(dtype).max, 99) - 2, 2**64 - 1 if dtype == "u8" else 99], dtype)].result()


def test_rows_are_a_snapshot_and_readers_have_their_own(two, three):
    kept = two.kept_one.submit(np.arange(4))
    assert len(kept) == 4
    two.write_kept()
    rows = made(two, 3)
    total = LARGE * 3.0
    for _ in range(2):
        assert three.write(rows) == [total + 3 * LARGE] * 3
        own = rows[:].result()
        own["wide"][:] = -1
    assert rows.result()["wide"].sum() == total
    assert rows.result()["name"] == ["row 0", "row 1", "row 2"]
    assert not kept.result().any()


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_mini_batches_of_shuffled_rows_are_each_readers_own(two, three, width):
    rows = made(two, 10, width)
    for _ in range(2):
        for batch in rows.shuffle(seed=1).batches(4):
            own = np.array_split(batch.select("id").result()["id"], 3)
            assert three.write_own(batch) == [[sum(ids) * width, *[f"row {i}" for i in ids]] for ids in own]


@pytest.mark.parametrize("some", [slice(None), slice(1, 6), [6, 0, 2, 3, 5, 1]], ids=["all", "range", "numbers"])
@pytest.mark.parametrize("kind", ["make", "tensors", "frame", "objects"])
def test_no_two_arguments_or_columns_share_memory(two, three, kind, some):
    rows = made(two) if kind == "make" else getattr(two, kind).submit(np.arange(7)).select("id", "wide")
    again = rows.rename(id="id_again", wide="wide_again").drop(*(["name"] if kind == "make" else []))
    twice = rows[some].join(again[some])
    whole = np.arange(7)[some]
    counts = [(len(part), len(part), []) for part in np.array_split(whole, 3)]
    assert three.sharing(rows[some], rows[some]) == counts
    assert three.sharing(twice, twice) == counts
    assert three.sharing(bm.concat([twice[:2], twice[2:]]), rows[some]) == counts
    assert shared_memory(twice.result()) == []


def test_a_row_that_is_taken_twice_is_two_objects(two, three):
    rows = two.objects.submit(np.arange(7)).select("wide")
    for twice in [rows.repeat(2), bm.concat([rows[1:4], rows[2:]]), bm.concat([rows, rows])[::-1].repeat(2)]:
        assert three.same_objects(twice) == [0] * 3
        column = twice.result()["wide"]
        assert len(set(map(id, column))) == len(column)


def test_rows_taken_by_number_are_each_readers_own(two, three):
    some = made(two, 6)[[0, 2]]  # no single range of what a rank has made
    for _ in range(2):
        assert three.write(some) == [4.0 * LARGE] * 3
    del some
    for _ in range(3):  # in the memory that the first rows had, perhaps
        assert three.count(two.make.submit(np.arange(10, 16), LARGE)[[0, 2]]) == [(2, 22.0 * LARGE)] * 3
    assert three.kept_wide() == [4.0 * LARGE] * 3


@pytest.mark.parametrize("names", [["name"] * 6, [b"."] * 6, [bytes(5000)] * 6])
def test_the_memory_of_released_rows_can_be_that_of_others(two, three, names):
    for fill in range(4):
        now = [bytes([fill]) * len(name) if isinstance(name, bytes) else name for name in names]
        with two.put({"wide": np.full((6, LARGE), fill, "f4"), "name": now}) as rows:
            assert three.write_own(rows[[5, 0, 4, 1, 3, 2]]) == [[2.0 * LARGE * fill, now[0], now[0]]] * 3


class Prompts:
    def __init__(self, texts):
        self.texts = texts


@pytest.mark.parametrize("n", [6, 20_000])
@pytest.mark.parametrize("is_column", [False, True])
def test_rows_of_a_type_that_only_the_controller_has_registered(two, three, n, is_column):
    functions = {"split": lambda value, start, stop: Prompts(value.texts[start:stop])}
    functions["concat"] = lambda values: Prompts([text for value in values for text in value.texts])
    bm.register_batch_type(Prompts, rows=lambda value: len(value.texts), **functions)
    texts = [f"prompt {i}" for i in range(n)]
    value = {"text": Prompts(texts), "id": np.arange(n)} if is_column else Prompts(texts)
    for rows in two.put(value), two.echo.submit(value), two.echo.submit(two.echo.submit(value)):
        for part, expected in (rows, texts), (rows[1:4], texts[1:4]), (rows[[5, 1]], [texts[5], texts[1]]):
            for found in part.result(), three.echo(part):
                assert (found["text"] if is_column else found).texts == expected


def test_one_handle_can_be_split_in_two_ways(two):
    rows = made(two, 8, SMALL).shuffle(seed=2)
    order = np.random.default_rng(2).permutation(8)
    wide, narrow = np.split(order, 2), np.split(order, 4)
    assert two.ids_of_both(rows, rows) == [[wide[rank // 2].tolist(), narrow[rank].tolist()] for rank in range(4)]


@pytest.mark.backends("local")
def test_rows_of_more_parts_than_a_message_has_descriptors(two, three):
    rows = bm.concat([made(two, 2) for _ in range(70)])
    for batch in rows[np.arange(140)[::-1]], rows:
        assert three.who(batch)["id"].tolist() == batch.select("id").result()["id"].tolist()


def test_who_holds_the_future_of_a_reader_does_not_hold_what_it_read(two, three):
    rows = made(two)
    assert len(rows) == 7  # they are there: no other thread submits, and may hold them for a moment longer
    reading = three.write_own.submit(rows[::-1])
    del rows
    assert len(three.count.submit({"id": [1], "wide": np.ones(1)}).result()) == 3  # behind it
    assert {line.split("  ")[-1].strip() for line in two.describe().splitlines()[2:]} == {"-"}
    assert len(reading.result()) == 3


def test_wrong_uses_are_refused_in_words(two, three):
    rows = made(two)
    with pytest.raises(bm.BatchError, match=r"no row 7 among 7 rows"):
        rows[[7]].result()
    with pytest.raises(bm.BatchError, match=r"a mask of 2 booleans was given for 7 rows"):
        rows[[True, False]].result()
    for wrong in 0, slice(0, 2.0), slice(None, None, 0), [[0], [1, 2]]:
        with pytest.raises(bm.UsageError, match=r"rows\[i:i\+1\] is a single one"):
            rows[wrong]
    with pytest.raises(bm.UsageError, match=r"got 'id'; rows.select\('id'\) has that column alone"):
        rows["id"]
    for n in -1, 3.9, "2":
        with pytest.raises(bm.UsageError, match=rf"repeat takes a whole number of copies, 0 or more, got n={n!r}"):
            rows.repeat(n)
    for seed in -1, "x", None:
        with pytest.raises(bm.UsageError, match=rf"whole number as its seed, 0 or more, got seed={seed!r}"):
            rows.shuffle(seed)
    for n in 0, 2.5:
        with pytest.raises(bm.UsageError, match=rf"batches takes a whole number of rows, 1 or more, got n={n!r}"):
            next(rows.batches(n))
    with pytest.raises(bm.BatchError, match=r"cannot select 'nothing': the columns are id, wide, name"):
        rows.select("nothing").result()
    with pytest.raises(bm.BatchError, match=r"no column would be left after drop: the columns are id, wide, name"):
        rows.drop("id", "wide", "name").result()
    with pytest.raises(bm.BatchError, match=r"rows 0, which has 7 rows, and rows 1, which has 3"):
        rows.join(rows[:3].rename(id="i", wide="w", name="n")).result()
    with pytest.raises(bm.BatchError, match=r"both have a column 'id'"):
        rows.join(rows).result()
    with pytest.raises(bm.BatchError, match=r"the columns 'id'.* and future 1 with the columns 'id', 'wide', 'name'"):
        bm.concat([rows.select("id"), rows]).result()
    with pytest.raises(bm.BatchError, match=r"no named columns"):
        two.echo.submit(np.arange(4)).select("id").result()
    with pytest.raises(bm.ArgumentError, match=r"Rows.everywhere leaves no rows on the ranks"):
        three.echo(two.everywhere.submit())
    with pytest.raises(bm.ArgumentError, match=r"'rows' .*cannot be pickled.*not inside of another value"):
        three.echo([rows])
    with pytest.raises(TypeError, match="not iterable"):
        list(rows)
    assert three.who(rows)["id"].tolist() == list(range(7))


def test_a_failed_call_fails_who_uses_its_rows(two, three):
    failed = two.fail.submit(np.arange(4))
    for use in (lambda: len(failed), lambda: three.echo(failed), lambda: three.echo(failed[:2]), failed.result):
        with pytest.raises(bm.RemoteError, match=r"Rows.fail failed on rank 0"):
            use()
    mixed = three.bare.submit(np.arange(6))
    with pytest.raises(bm.CollectError, match=r"rank 1.*returned int, which has no rows"):
        mixed.result()
    with pytest.raises(bm.CollectError, match=r"rank 1.*returned int"):
        len(mixed)


class Unlike(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def metrics(self, ids, width):
        return {"wide": np.zeros((len(ids), width)), "loss": 0.5}

    @register(Dispatch.DP_PROTO)
    def unpadded(self, ids, width):
        return {"wide": np.zeros((len(ids), width + self.rank))}

    @register(bm.TransferProtocol(bm.Split("dp", pad=True), bm.Concat("dp")))
    def fewer(self, ids, width):
        return {"wide": np.zeros((1, width))}

    @register(Dispatch.DP_PROTO)
    def nothing(self, ids, width):
        return None


@pytest.mark.parametrize("width", [3, 30_000])
@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("metrics", r"rank 0: a dict mixes batches with other values: 'wide' has 2 rows, 'loss' is float without rows"),
        ("unpadded", r"rank 0 has returned \{'wide': float64\[%d\]\}, rank 1 \{'wide': float64\[%d\]\}"),
        ("fewer", r"rank 0 has returned 1 rows for 2"),
        ("nothing", r"rank 0 has returned no batch"),
    ],
)
def test_values_that_are_no_rows_are_laid_to_the_method_that_returned_them(two, three, backend, width, method, reason):
    with bm.ResourcePool([2], backend=backend) as pool:
        unlike = bm.WorkerGroup(pool, Unlike)
        made = getattr(unlike, method).submit(np.arange(4), width)
        reason = reason % (width, width + 1) if "%d" in reason else reason
        message = rf"what Unlike.{method} has returned cannot be passed on as rows: {reason}; return a batch with"
        for use in (lambda: len(made), lambda: three.echo(made), made[:2].result, lambda: three.echo(made[:2])):
            with pytest.raises(bm.BatchError, match=message):
                use()


def test_rows_that_were_released_are_lost(two, three):
    with made(two) as rows:
        part = rows[2:5]
        assert three.who(part)["id"].tolist() == [2, 3, 4]
    for use in (rows.result, lambda: three.who(part), part.result):
        with pytest.raises(bm.RowsLost, match=r"Rows.make has left on rank 0 were released"):
            use()


def test_rows_outlive_their_group(backend, three):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        rows = made(group)
        assert len(rows) == 7
        group.close()
        assert three.who(rows)["id"].tolist() == list(range(7))
    assert rows[3:].result()["id"].tolist() == [3, 4, 5, 6]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_chain_equals_the_same_operations_on_plain_values(groups, data):
    four, three = groups
    n = data.draw(st.integers(0, 6))
    width = data.draw(st.sampled_from([SMALL, LARGE]))
    rows, ids = made(four, n, width), np.arange(n)
    for _ in range(data.draw(st.integers(0, 4))):
        step = data.draw(st.sampled_from(["slice", "index", "shuffle", "repeat", "concat", "move"]))
        if step == "slice":
            start = data.draw(st.integers(0, len(ids)))
            rows, ids = rows[start:], ids[start:]
        elif step == "index":
            index = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=6)) if len(ids) else []
            rows, ids = rows[index], ids[np.array(index, dtype=int)]
        elif step == "shuffle":
            rows, ids = rows.shuffle(1), ids[np.random.default_rng(1).permutation(len(ids))]
        elif step == "repeat":
            rows, ids = rows.repeat(2), ids.repeat(2)
        elif step == "concat":
            rows, ids = bm.concat([rows, rows[:2]]), np.concatenate([ids, ids[:2]])
        else:
            rows = data.draw(st.sampled_from([four, three])).echo.submit(rows)
    value = rows.result()
    assert value["id"].tolist() == ids.tolist() == value["wide"][:, -1].tolist()
    assert value["name"] == [f"row {i}" for i in ids]


def test_rows_are_freed_with_the_last_future(groups):
    four, three = groups

    def use(n):
        for _ in range(n):
            rows = made(four, 4)
            three.echo.submit(rows.shuffle(0)).result()
        del rows
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()  # nothing of a future is left for it
    try:
        before = use(10)
        assert use(60) <= before + 4
    finally:
        gc.enable()


def held(group):
    """What `describe` shows in its last column, for each rank."""
    return [line.split("  ")[-1].strip() for line in group.describe().splitlines()[2:]]


def test_who_holds_how_many_bytes_is_shown(groups):
    four, _ = groups
    assert held(four) == ["-"] * 4
    rows = made(four, 8)
    part = rows[:2]
    assert len(rows) == 8
    assert held(four)[1::2] == ["-", "-"], "tp=1 is not collected"
    n_bytes = [int(text.removesuffix(" B").replace(",", "")) for text in held(four)[::2]]
    assert all(4 * 4 * LARGE < n < 5 * 4 * LARGE for n in n_bytes)
    del rows
    assert held(four) != ["-"] * 4, "some are still needed"
    part.release()
    del part
    assert held(four) == ["-"] * 4


@pytest.mark.backends("inprocess")
def test_rows_that_are_held_are_counted_though_other_threads_keep_more_meanwhile(two):
    rows, more = made(two, 8), []
    assert len(rows) == 8

    def at_line(frame, event, _):
        sys.settrace(None)
        more.append(KeptPart("Rows.make", 0, None, two._ownership.workers()))  # as another thread could do
        sys.settrace(trace)
        return at_line

    def trace(frame, *_):
        return at_line if frame.f_code in (held_by.__code__, weakref.WeakSet.__iter__.__code__) else None

    sys.settrace(trace)
    try:
        assert "Rows" in two.describe()
    finally:
        sys.settrace(None)
    assert more


without_waiting = pytest.mark.backends("local", "ray")


@without_waiting
def test_calls_take_rows_that_are_not_there_yet(two, three, gate):
    rows = two.make_when.submit(np.arange(7), str(gate))
    weights = np.ones(3)
    seen = three.who.submit(rows[::-1])
    logged = three.log_rows.submit(rows, weights)
    after = three.log.submit("after")
    weights[:] = 2
    end = two.who.submit(three.echo.submit(rows.join(seen.select("rank"))))
    assert not any(future.done() for future in (rows, seen, logged, after, end))
    assert repr(seen) == "<Future of Rows.who, waiting for the rows that it takes>"
    gate.touch()
    assert end.result()["id"].tolist() == list(range(7))
    assert seen.result()["id"].tolist() == list(range(6, -1, -1))
    first, second = after.result()[0][-2:]
    assert first.tolist() == [1, 1, 1], "as it was when the call was submitted"
    assert second == "after"
    assert three.log()[0][-3:][1:] == ["after", None]


WAYS_TO_MAKE = {
    "call": lambda group, gate: group.make_when.submit(np.arange(6), gate),
    "map": lambda group, gate: group.map_when.map(np.arange(6), gate, chunk=2).future,
    "sent later": lambda group, gate: group.echo.submit(group.make_when.submit(np.arange(6), gate)),
    "derived": lambda group, gate: group.make_when.submit(np.arange(6), gate).shuffle(0),
}


@without_waiting
@pytest.mark.parametrize("way", WAYS_TO_MAKE)
def test_rows_that_are_released_before_they_are_there_are_freed_then(two, gate, way):
    with WAYS_TO_MAKE[way](two, str(gate)) as rows:
        assert not rows.done()
    gate.touch()
    until = idle_time() + 20
    while not rows.done() or set(held(two)) != {"-"}:
        assert idle_time() < until, held(two)
        time.sleep(0.01)  # polling the thread that reads what nobody waits for
    for use in (rows.result, lambda: two.who(rows)):
        with pytest.raises(bm.RowsLost, match="were released"):
            use()


@without_waiting
@pytest.mark.parametrize("n_times", [1, 2])
def test_calls_get_the_rows_that_were_released_after_their_submission(n_times, two, three, gate):
    there = made(two, 6)
    assert len(there) == 6
    with two.make_when.submit(np.arange(6), str(gate)) as rows, there:
        both = three.who.submit(there.join(rows.select("id").rename(id="same"))[::-1])
        mapped = three.ids.map(rows[1:], chunk=1).future
        last = three.who.submit(there)
        values = three.who.stream(there)  # its rows are there, but calls before it have to be sent
    for released in (rows, there) * (n_times - 1):
        released.release()
    with pytest.raises(bm.RowsLost, match="were released"):
        there.result()  # though calls have still to take them
    gate.touch()
    for call, ids in ((both, range(5, -1, -1)), (mapped, range(1, 6)), (last, range(6))):
        assert call.result(timeout=20)["id"].tolist() == list(ids)
    assert sorted(number for value in values for number in value.result()["id"]) == list(range(6))
    with pytest.raises(bm.RowsLost, match="were released"):
        three.who(there)


@pytest.mark.backends("local")
def test_calls_that_two_threads_submit_at_a_time_both_get_rows_that_are_released_then(two, three, gate):
    rows, late = (two.make_when.submit(np.arange(6), f"{gate}{n}") for n in range(2))
    both = []

    def submit():
        other = threading.Thread(target=lambda: both.append(three.sharing.submit(rows, late)))
        other.start()
        other.join(60)

    with rows, done_when(lambda frame, kind, _: frame.f_code is Claim.__init__.__code__, submit):
        one = two.who.submit(rows)
    Path(f"{gate}0").touch()
    until = idle_time() + 20
    while "waiting for the rows" in repr(one):
        assert idle_time() < until
        time.sleep(0.01)  # polling the thread that sends what nobody waits for
    Path(f"{gate}1").touch()
    assert one.result(timeout=20)["id"].tolist() == list(range(6))
    assert [sizes for *sizes, _ in both[0].result(timeout=20)] == [[2, 2]] * 3


@without_waiting
@pytest.mark.parametrize("how", ["submit", "stream"])
def test_a_call_before_which_another_thread_submits_one_that_waits_has_its_own_arguments(how, two, three, gate):
    rows, there = two.make_when.submit(np.arange(6), str(gate)), made(three, 6)
    assert len(there) == 6
    weights, others = np.ones(3), []

    def submit():
        other = threading.Thread(target=lambda: others.append(three.who.submit(rows)))
        other.start()
        other.join(60)

    is_known = Submitter.submit_anyway  # whether calls wait
    if how == "stream":
        from bandmaster.flow.stream import Stream  # a feature

        is_known = Stream.__init__
    try:
        with there, done_when(lambda frame, kind, _: kind == "call" and frame.f_code is is_known.__code__, submit):
            call = getattr(three.log_rows, how)(there, weights)
        weights[:] = 2
    finally:
        gate.touch()
    assert others[0].result()["id"].tolist() == list(range(6))
    bm.wait([call] if how == "submit" else list(call))
    assert three.log()[0][-2].tolist() == [1, 1, 1], "as it was when the call was submitted"


@pytest.mark.backends("local")
@pytest.mark.parametrize("settled", ["parent", "other"])
def test_a_callback_comes_though_another_thread_settles_an_operation_just_as_it_is_added(settled, two, gate):
    one = two.make_when.submit(np.arange(6), str(gate))[:4]
    other = one[:2]
    called = threading.Event()

    def settle():
        gate.touch()
        (one if settled == "parent" else other).result()

    with done_when(
        lambda frame, kind, _: kind == "call" and frame.f_code is Derived.drive_in_background.__code__, settle
    ):
        other.add_done_callback(lambda _: called.set())
    assert called.wait(60)


@without_waiting
def test_rows_that_are_released_as_another_thread_reads_them_are_lost(two, gate):
    rows = two.read_when.submit(np.arange(6), str(gate))
    two.everywhere()  # has its replies behind those of the first call
    reader = threading.Thread(target=rows.result)
    reader.start()
    try:
        until = idle_time() + 20
        while not os.path.exists(f"{gate} is waited for"):
            assert idle_time() < until
            time.sleep(0.01)  # polling the thread that reads
        rows.release()
    finally:
        gate.touch()
        reader.join(60)
    with pytest.raises(bm.RowsLost, match="were released"):
        rows.result()


@pytest.mark.backends("inprocess", "local")
@pytest.mark.parametrize("way", ["call", "map", "derived"])
def test_rows_that_are_released_just_as_they_are_found_are_read_or_lost(two, way, gate):
    looked_up = KeptPart.kept.fget if way == "call" else Derived.table
    if way == "map":
        from bandmaster.requests.map import MapFeed  # a feature

        looked_up = MapFeed.table
    gate.touch()
    rows = WAYS_TO_MAKE[way](two, str(gate))
    ids = rows.result()["id"].tolist()
    assert len(rows) == 6
    n_lines = 0

    def at_line(frame, event, _):
        nonlocal n_lines
        n_lines += event == "line"
        if n_lines == 2 and event == "line":  # as another thread could do between any two
            sys.settrace(None)
            rows.release()
        return at_line

    sys.settrace(lambda frame, *_: at_line if frame.f_code is looked_up.__code__ else None)
    try:
        with contextlib.suppress(bm.RowsLost):
            assert rows[:2].result()["id"].tolist() == ids[:2]
    finally:
        sys.settrace(None)
    assert n_lines >= 2
    with pytest.raises(bm.RowsLost, match="were released"):
        rows.result()


@pytest.mark.backends("inprocess")
def test_rows_that_are_released_just_as_another_thread_passes_them_on_are_taken_or_lost(two):
    for n in range(1, 1000):
        rows, left = two.make.submit(np.arange(6), SMALL), n
        two.echo.submit(rows).result()

        def at_instruction(frame, event, _, rows=rows):
            nonlocal left
            frame.f_trace_opcodes = True
            left -= event == "opcode"
            if left == 0 and event == "opcode":  # as another thread could do between any two
                rows.release()
            return at_instruction

        sys.settrace(lambda frame, *_, at=at_instruction: at if frame.f_code is KeptPart.placed.__code__ else None)
        try:
            with contextlib.suppress(bm.RowsLost):
                assert two.echo.submit(rows).result()["id"].tolist() == list(range(6))
        finally:
            sys.settrace(None)
        if left > 0:
            break
    assert n > 10


@without_waiting
def test_a_failed_call_whose_rows_were_released_keeps_nothing_of_the_program(two, three, gate):
    def use():
        rows = two.make_when.submit(np.arange(6), str(gate), fails=True)
        taken = three.ids.submit(rows)
        rows.release()
        gate.touch()
        with pytest.raises(bm.RemoteError):
            rows.result()  # the traceback of this error has what this function has
        return weakref.ref(taken)

    taken = use()
    until = idle_time() + 20
    while taken() is not None:
        assert idle_time() < until
        gc.collect()
        time.sleep(0.01)  # polling the threads that read what nobody waits for


@without_waiting
def test_later_changes_of_a_seed_do_not_change_the_order(two, gate):
    seed, ids = [1, 2], np.arange(20)
    rows = two.make_when.submit(ids, gate).shuffle(seed)
    seed[0] = 9
    gate.touch()
    assert rows.result()["id"].tolist() == np.random.default_rng([1, 2]).permutation(ids).tolist()


@without_waiting
def test_calls_are_sent_though_nobody_waits_for_them(two, three, gate):
    told = threading.Event()
    rows = two.make_when.submit(np.arange(7), str(gate))
    end = three.who.submit(three.echo.submit(rows).shuffle(0))
    end.add_done_callback(lambda future: told.set())
    gate.touch()
    assert told.wait(60)
    assert end.result()["id"].tolist() == np.random.default_rng(0).permutation(7).tolist()


@without_waiting
def test_callbacks_of_a_call_behind_one_that_waits_for_rows(two, three, gate):
    rows = two.make_when.submit(np.arange(5), str(gate))
    behind, called = [three.echo.submit(rows), three.everywhere.submit()], threading.Event()
    behind[-1].add_done_callback(lambda _: called.set())
    gate.touch()
    assert called.wait(20)
    assert behind[-1].result() == [0, 1, 2]


@pytest.mark.backends("local")  # in process, a rank runs the method where Ctrl-C comes
def test_ctrl_c_in_a_call_leaves_those_before_it_that_wait_for_rows(two, three, tmp_path):
    n, n_over = 0, 0
    while n_over < 3 and n < 2000:  # the thread of callbacks may send them, too, so that there are fewer steps
        n += 23  # not at each step, for the sake of time
        gate, called = tmp_path / str(n), threading.Event()
        rows = two.make_when.submit(np.arange(5), str(gate))
        before = three.echo.submit(rows)
        before.add_done_callback(lambda _: called.set())  # noqa: B023
        gate.touch()
        n_over = 0 if pressed(three.everywhere, n, again=n % 2 * 7) else n_over + 1
        assert called.wait(20)
        error = before.exception()
        assert error is None or isinstance(error, bm.CallCancelled), n
        assert three.everywhere() == [0, 1, 2]
    assert n > 50


@without_waiting
def test_a_call_waits_for_the_calls_before_it(two, three, gate):
    rows = two.make_when.submit(np.arange(7), str(gate))
    logged = three.log_rows.submit(rows, "before")
    threading.Timer(0.1, gate.touch).start()
    assert three.log("after")[0][-2:] == ["before", "after"]
    assert len(logged) == 7


@without_waiting
def test_a_call_that_was_not_sent_can_be_cancelled(two, three, gate):
    rows = two.make_when.submit(np.arange(7), str(gate))
    seen, other = three.who.submit(rows), three.who.submit(rows)
    assert seen.cancel()
    assert seen.cancelled()
    with pytest.raises(bm.CallCancelled, match=r"Rows.who was cancelled before it was sent"):
        seen.result()
    gate.touch()
    assert other.result()["id"].tolist() == list(range(7))


@without_waiting
@pytest.mark.parametrize("behind", [False, True])
def test_a_thread_that_waits_for_a_call_which_was_not_sent_is_told_that_another_one_cancels_it(
    two, three, gate, behind
):
    seen = three.who.submit(two.make_when.submit(np.arange(7), str(gate)))
    waited = three.log.submit("behind it") if behind else seen
    threading.Timer(0.1, waited.cancel).start()
    with pytest.raises(bm.CallCancelled, match=r"was cancelled before it was sent"):
        waited.result(20.0)
    gate.touch()
    assert three.log("after")[0][-1] == "after"


@without_waiting
def test_calls_by_name_begin_behind_one_that_was_not_sent_though_the_one_between_them_is_cancelled(two, three, gate):
    seen = three.who.submit(two.make_when.submit(np.arange(7), str(gate)))
    between = three.log.submit("between")
    threading.Timer(0.1, between.cancel).start()
    threading.Timer(1.5, gate.touch).start()
    by_name = three.execute_all_async("log", "by name")
    assert gate.exists()
    assert [one.result(20.0)[-1] for one in by_name] == ["by name"] * 3
    seen.result(20.0)


class Asking(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def take(self, rows):
        return sys.asked_for.pop().result() if sys.asked_for else rows  # there, as the class may be sent by value


@pytest.mark.backends("local")
@pytest.mark.parametrize("timeout", [None, 20.0])
def test_a_method_in_process_that_waits_for_what_its_own_thread_sends_next_is_told_so(two, gate, timeout, monkeypatch):
    monkeypatch.setattr(sys, "asked_for", [], raising=False)
    rows = two.make_when.submit(np.arange(7), str(gate))
    with bm.ResourcePool([1], backend="inprocess") as pool:
        asking = bm.WorkerGroup(pool, Asking).take.options(timeout=timeout)
        first, second = asking.submit(rows), asking.submit(rows)
        sys.asked_for.append(second.select("id"))
        gate.touch()
        with pytest.raises(bm.RemoteError, match="take cannot be waited for here: this thread sends it once"):
            first.result()
        assert second.result()["id"].tolist() == list(range(7))


@without_waiting
def test_a_late_call_names_those_it_waits_for(two, three, gate):
    rows = two.make_when.submit(np.arange(7), str(gate))
    seen = three.who.submit(rows[:3])
    with pytest.raises(
        bm.CallTimeout, match=r"Rows.make_when got no reply from rank 0, .*Rows.who takes its rows"
    ) as late:
        seen.result(timeout=0.2)
    assert "in make_when" in str(late.value)
    with pytest.raises(bm.CallTimeout, match=r"Rows.make_when got no reply .*Rows.echo takes its rows"):
        three.echo.options(timeout=0.2)(rows)
    with pytest.raises(
        bm.CallTimeout, match=r"Rows.make_when got no reply .*Rows.log was submitted behind a call that"
    ):
        three.log.options(timeout=0.2)("behind it")
    gate.touch()
    assert late.value.future.result()["id"].tolist() == [0, 1, 2]


@without_waiting
def test_the_first_cause_reaches_who_waits_for_the_rows(two, three, gate):
    rows = two.make_when.submit(np.arange(7), str(gate), fails=True)
    ends = [three.who.submit(rows), three.echo.submit(three.echo.submit(rows)[:2]), rows.shuffle(0)]
    gate.touch()
    for end in ends:
        with pytest.raises(bm.RemoteError, match=r"Rows.make_when failed on rank 0"):
            end.result()
    assert three.who(made(two))["id"].tolist() == list(range(7))
    cancelled = two.make_when.submit(np.arange(7), str(gate) + " of another")
    end = three.who.submit(cancelled)
    cancelled.cancel()
    with pytest.raises(bm.CallCancelled, match=r"Rows.make_when was cancelled"):
        end.result()


@without_waiting
def test_mistakes_are_errors_though_the_rows_are_not_there(two, three, gate):
    rows = two.make_when.submit(np.arange(7), str(gate))
    with pytest.raises(bm.ArgumentError, match="missing"):
        three.log_rows.submit(rows)
    for send in (three.sharing.submit, three.sharing.stream):
        with pytest.raises(bm.ArgumentError, match=r"argument '\w+' of .*sharing \(lock\) cannot be pickled"):
            send(rows, threading.Lock())
    with pytest.raises(bm.UsageError, match="takes futures"):
        rows.join({"id": 1})
    wrong = three.who.submit(rows.select("nothing"))
    gate.touch()
    with pytest.raises(bm.BatchError, match=r"cannot select 'nothing': the columns are [^;]+$"):
        wrong.result()


@pytest.mark.parametrize("width", [SMALL, LARGE])
def test_rows_of_the_controller_are_sent_once_and_sliced_often(two, three, width):
    batch = {"id": np.arange(9), "wide": np.ones((9, width), "f4") * np.arange(9)[:, None], "name": list("abcdefghi")}
    rows = two.put(batch)
    batch["id"][:] = -1
    assert [(place.method, place.rank, place.n_rows) for place in rows.where] == [("Rows.put", None, 9)]
    for part in rows.shuffle(0).batches(2):
        assert two.who(part)["id"].tolist() == three.who(part)["width"].tolist() == part.result()["id"].tolist()
    assert two.write(rows) == [width * 45.0] * 4
    assert two.write(rows) == [width * 45.0] * 4
    assert rows.result()["name"] == list("abcdefghi")
    with pytest.raises(bm.BatchError, match=r"Rows.put takes a batch, got int"):
        two.put(7)
    with pytest.raises(bm.ArgumentError, match=r"cannot be pickled"):
        two.put([threading.Lock()])


def test_many_small_results_fit_into_one_call(two, three):
    parts = [made(two, 4, 2000) for _ in range(9)]
    both = bm.concat(parts)
    assert three.count(both) == [(36, 9 * 2000 * 6.0)] * 3
    assert three.count(both) == [(36, 9 * 2000 * 6.0)] * 3


@pytest.mark.backends("local")
def test_rows_go_from_one_backend_to_another(two, three):
    with bm.ResourcePool([2], backend="inprocess") as pool:
        here = bm.WorkerGroup(pool, Rows)
        rows = made(here)
        for _ in range(2):
            assert three.who(rows[::-1])["id"].tolist() == list(range(6, -1, -1))
        assert here.who(made(two))["id"].tolist() == list(range(7))


@pytest.mark.here
@without_waiting
def test_rows_outlive_the_worker_that_made_them(backend, three):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        rows = made(group)
        assert len(rows) == 7
        os.kill(group.execute_all_sync("process")[1], signal.SIGKILL)
        with pytest.raises(bm.WorkerDied):
            group.everywhere()
        assert three.who(rows)["id"].tolist() == list(range(7))
        group.restart()
        assert group.who(rows[::-1])["id"].tolist() == list(range(6, -1, -1))


@pytest.mark.here
@without_waiting
def test_rows_of_ranks_that_have_died_are_freed_with_the_last_future(backend):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        before = len(os.listdir("/proc/self/fd"))
        rows = [made(group) for _ in range(8)]
        assert sum(map(len, rows)) == 8 * 7
        for process in group.execute_all_sync("process"):
            os.kill(process, signal.SIGKILL)
        with pytest.raises(bm.WorkerDied):
            group.everywhere()
        first = rows[0]
        del rows
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        assert first.result()["id"].tolist() == list(range(7))


@without_waiting
def test_a_restart_gives_up_calls_that_wait_for_rows(backend, two, gate):
    with bm.ResourcePool([2], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Rows)
        rows = two.make_when.submit(np.arange(7), str(gate))
        seen = group.who.submit(rows)
        group.restart()
        with pytest.raises(bm.CallCancelled, match=r"Rows.who was not sent, as its group was closed or restarted"):
            seen.result()
        late = group.who.submit(rows)
        group.close()
        gate.touch()
        with pytest.raises(bm.CallCancelled, match=r"Rows.who was not sent"):
            late.result()
        assert len(rows) == 7


@pytest.mark.backends("local")  # inprocess would wait for the gate
def test_operations_on_rows_that_are_not_there_may_be_nested_deeply(two, three, gate):
    rows = first = two.make_when.submit(np.arange(4), str(gate))
    for _ in range(sys.getrecursionlimit()):
        rows = bm.concat([rows[[1, 0]].rename(id="x").rename(x="id"), first[2:]])
    called = threading.Event()
    rows.add_done_callback(lambda _: called.set())
    late = three.who.submit(rows)
    with pytest.raises(bm.CallTimeout, match=r"Rows.make_when got no reply from rank 0, 1, 2, 3 within 0 s"):
        rows.result(timeout=0)
    gate.touch()
    assert late.result()["id"].tolist() == rows.result()["id"].tolist() == [0, 1, 2, 3]
    assert called.wait(30)


def test_an_operation_cannot_be_cancelled_nor_changed_by_its_arguments(two):
    index = np.array([2, 0])
    rows = made(two)[index]
    index[:] = 1
    assert not rows.cancel()
    assert rows.result()["id"].tolist() == [2, 0]
    own = two.put(np.arange(4))
    with own:
        part = own[1:]
    with pytest.raises(bm.RowsLost, match=r"Rows.put has left were released"):
        part.result()


@pytest.mark.backends("local")
def test_rows_are_right_and_freed_though_workers_are_killed_again_and_again(backend):
    with bm.ResourcePool([2], backend=backend) as makers, bm.ResourcePool([3], backend=backend) as readers:
        groups = bm.WorkerGroup(makers, Rows), bm.WorkerGroup(readers, Rows)
        n_deaths = 0
        for step in range(40):
            group = groups[step % 2]
            rows = made(groups[0], 6)
            if step % 10 == 9:
                assert len(rows) == 6
                os.kill(group.execute_rank_zero_sync("process"), signal.SIGKILL)
            try:
                seen = groups[1].echo.submit(rows.shuffle(step))
                again = groups[0].who.submit(seen[::2])
                assert again.result(timeout=60)["id"].tolist() == seen.select("id").result()["id"][::2].tolist()
            except bm.WorkerDied:
                n_deaths += 1
                group.restart()
            assert rows[1:3].result()["wide"][:, -1].tolist() == [1.0, 2.0], "they outlive who made them"
        assert n_deaths == 4
        seen = again = rows = None
        gc.collect()
        for group in groups:
            assert {line.split("  ")[-1].strip() for line in group.describe().splitlines()[2:]} == {"-"}
