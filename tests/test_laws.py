"""The laws that a user may build on, on every backend."""

import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bandmaster as bm
from bandmaster import Broadcast, Concat, Dispatch, Gather, Mesh, Split, TransferProtocol, register
from bandmaster.testing import standing

# --- 1 and 6: what goes out comes back, whole and in order -------------------------------------------------------


@st.composite
def protocols_on_meshes(draw, largest):
    """A mesh of random axes, some refined, and a protocol that splits and joins over the same axes of it."""
    shape = {}
    for axis in draw(st.permutations(["pp", "dp", "tp"]))[: draw(st.integers(1, 3))]:
        room = largest // int(np.prod(list(shape.values()), dtype=int))
        shape[axis] = draw(st.integers(1, max(1, min(4, room))))
    mesh = Mesh(**shape)
    if "tp" in shape and draw(st.booleans()):
        mesh = mesh.refine(gen_tp=draw(st.sampled_from([n for n in range(1, 5) if shape["tp"] % n == 0])))
    axes = draw(st.lists(st.sampled_from(list(shape)), min_size=1, unique=True))
    known = [d for d in Dispatch if d.paper_name in ("3D_PROTO", "3D_ALL_MICRO_DP", "DP_PROTO") and _fits(d, mesh)]
    free = TransferProtocol(Split(*axes, pad=draw(st.booleans())), Concat(*axes))
    return mesh, draw(st.sampled_from([free, *known]))


def _fits(dispatch, mesh):
    axes = {*dispatch.value.outgoing.axes, *dispatch.value.incoming.axes, *dict(dispatch.value.incoming.at)}
    return axes <= set(mesh.axis_names)


def batches(rows):
    array = st.sampled_from(["f4", "i8", "?", "c16"]).map(
        lambda dtype: np.arange(rows * 3).reshape(rows, 3).astype(dtype)
    )
    return st.one_of(
        array,
        st.just([f"row {i}" for i in range(rows)]),
        st.fixed_dictionaries({"x": array, "deeper": st.fixed_dictionaries({"y": st.just(list(range(rows)))})}),
    )


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return type(a) is type(b) and a == b


def test_an_identity_method_gives_back_what_it_was_given(make_pool, effort):
    pools = {}

    @settings(max_examples=effort.n_examples)
    @given(st.data())
    def check(data):
        mesh, protocol = data.draw(protocols_on_meshes(effort.n_ranks))
        batch = data.draw(st.integers(0, 23).flatmap(batches))

        class Echo(bm.Worker):
            @register(protocol)
            def echo(self, batch):
                return batch

        if mesh.size not in pools:
            pools[mesh.size] = make_pool([mesh.size])
        with bm.WorkerGroup(pools[mesh.size], Echo, mesh=mesh) as group:
            assert same(group.echo(batch), batch)

    check()


# --- 2: values are isolated --------------------------------------------------------------------------------------


class Keeper(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def overwrite(self, array, nested):
        array[:] = -1
        nested["list"].append("worker was here")
        nested["array"] += self.rank
        return nested["array"]

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, array):
        self.kept = array

    @register(Dispatch.ONE_TO_ALL)
    def show(self):
        return self.kept

    @register(Dispatch.DP_PROTO)
    def overwrite_rows(self, rows):
        rows[:] = -1


@pytest.mark.parametrize("n", [4, 40_000], ids=["small", "large"])
def test_what_a_worker_receives_is_its_own_and_writable(make_group, n):
    group = make_group(2, Keeper)
    array, nested = np.arange(n), {"list": [], "array": np.zeros(n)}
    results = group.overwrite(array, nested)
    assert [result[0] for result in results] == [0, 1], "each rank wrote to a copy of its own"
    assert (array == np.arange(n)).all()
    assert nested["list"] == []
    assert (nested["array"] == 0).all()
    group.overwrite_rows(array)
    assert (array == np.arange(n)).all()


@pytest.mark.parametrize("n", [4, 40_000], ids=["small", "large"])
def test_what_the_caller_receives_is_its_own_and_writable(make_group, n):
    group = make_group(2, Keeper)
    given_away = np.arange(n)
    group.keep(given_away)
    given_away[:] = -5
    first, second = group.show()
    first[:] = -7
    assert (second == np.arange(n)).all()
    assert all((kept == np.arange(n)).all() for kept in group.show())


def test_a_call_that_was_sent_keeps_the_values_it_was_sent_with(make_group):
    group = make_group(2, Keeper)
    array = np.zeros(40_000)
    future = group.overwrite.submit(np.zeros(3), {"list": [], "array": array})
    array[:] = 99
    assert [result[0] for result in future.result()] == [0, 1]


# --- 3 and 4: nothing is encoded twice, or for nobody ------------------------------------------------------------


class Counted:
    """Counts how often it is pickled, in the process that pickles it."""

    times = 0

    def __reduce__(self):
        Counted.times += 1
        return Counted, ()


class Receiver(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def keep(self, value):
        self.kept = value  # so that the memory it lies in is not used again

    @register(Dispatch.ONE_TO_ALL)
    def broadcast(self, value, other=None):
        return isinstance(value, Counted)

    @register(TransferProtocol(Split("dp"), Gather("dp")))
    def keep_rows(self, rows):
        self.kept = rows

    @register(Dispatch.DP_PROTO, arguments={"table": Broadcast()})
    def split(self, rows, table):
        return [isinstance(row, Counted) for row in rows]

    @register(Dispatch.ALL_TO_ALL)
    def per_rank(self, value):
        return isinstance(value, Counted)

    @register(TransferProtocol(Broadcast(), Gather("dp", tp=0)))
    def only_tp_zero(self):
        return self.rank if self.coordinates["tp"] == 0 else (part for part in "no pickle for me")


def times_encoded(call):
    Counted.times = 0
    result = call()
    return Counted.times, result


def test_a_payload_is_encoded_once_however_many_ranks_read_it(make_group):
    group = make_group(Mesh(dp=2, tp=2), Receiver)
    assert times_encoded(lambda: group.broadcast(Counted())) == (1, [True] * 4)
    rows = [Counted() for _ in range(5)]
    assert times_encoded(lambda: group.split(rows, table=Counted())) == (6, [True] * 5)
    shared = Counted()
    assert times_encoded(lambda: group.per_rank([shared] * 4)) == (1, [True] * 4)
    assert times_encoded(lambda: group.execute_all_sync("broadcast", Counted())) == (1, [True] * 4)


@pytest.mark.own_processes
def test_a_large_payload_is_written_once_however_many_ranks_of_this_host_read_it(make_pool):
    def n_written(n_ranks, method, *args):
        with bm.WorkerGroup(make_pool([n_ranks]), Receiver) as group:
            before = len(standing().segments)
            getattr(group, method)(*args)
            return len(standing().segments) - before

    large = np.ones(100_000)
    once = n_written(1, "keep", large)
    assert once > 0
    assert n_written(4, "keep", large) == once
    assert n_written(4, "keep_rows", large) == 4 * once, "each rank its own quarter"


def test_a_rank_that_is_not_collected_does_not_encode_its_value(make_group):
    group = make_group(Mesh(dp=2, tp=2), Receiver)
    assert group.only_tp_zero() == [0, 2], "the others returned what cannot be pickled"


# --- 5: order ----------------------------------------------------------------------------------------------------


class Log(bm.Worker):
    def __init__(self):
        self.entries = []

    @register(Dispatch.ONE_TO_ALL)
    def note(self, entry):
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    async def note_async(self, entry):
        self.entries.append(entry)

    @register(Dispatch.ALL_TO_ALL, execute_mode=bm.Execute.RANK_ZERO)
    def note_on_zero(self, entry):
        self.entries.append(entry)

    @register(Dispatch.ONE_TO_ALL)
    def read(self):
        return self.entries


def test_calls_on_a_worker_run_in_the_order_of_submission(make_group):
    group = make_group(2, Log)
    futures = []
    for entry in range(30):
        how = [group.note.submit, group.note_async.submit, group.note_on_zero.submit, None][entry % 4]
        if how is None:
            group.execute_all_async("note", entry)
        else:
            futures.append(how(np.full(50_000, entry)[0] if entry % 2 else entry))
    on_zero, on_one = group.read()
    assert on_zero == list(range(30))
    assert on_one == [entry for entry in range(30) if entry % 4 != 2]
    assert all(future.done() for future in futures)


# --- 7 and 8: mistakes and failures are told where they are made -------------------------------------------------


def test_arguments_are_bound_against_the_real_signature(make_group):
    group = make_group(2, Log)
    with pytest.raises(bm.ArgumentError, match=r"Log.note\(entry\).*missing.*'entry'"):
        group.note()
    assert group.read() == [[], []]


class FailsOnOne(bm.Worker):
    def __init__(self):
        if self.rank == 1:
            raise KeyError("no such weights")


def test_a_constructor_that_fails_names_rank_host_and_cause(make_group):
    with pytest.raises(bm.ConstructorError, match="no such weights") as caught:
        make_group(2, FailsOnOne)
    assert caught.value.rank == 1
    assert socket.gethostname() in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


# --- 11: the same program, the same results ----------------------------------------------------------------------


class Program(bm.Worker):
    def __init__(self, seed):
        self.state = np.random.default_rng(seed + self.rank)

    @register(Dispatch.THREE_D_PROTO)
    def step(self, batch, scale=1.0):
        return {"x": batch["x"] * scale, "who": [self.rank] * len(batch["x"])}

    @register(TransferProtocol(Split("dp"), bm.Reduce("mean", "dp", "tp")))
    def loss(self, x):
        return {"loss": float(x.sum()), "rows": len(x)}

    @register("3D_PP_ONLY")
    def names(self):
        return f"stage {self.coordinates['pp']}"

    @register(Dispatch.ALL_TO_ALL)
    def each(self, a, b):
        return a + b + self.rank


def test_the_same_program_gives_the_same_results(make_group):
    group = make_group(Mesh(pp=1, dp=2, tp=2), Program, seed=3)
    out = group.step({"x": np.arange(5.0)}, scale=2.0)
    assert out["x"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert out["who"] == [0, 0, 0, 2, 2]
    assert group.loss(np.arange(5.0)) == {"loss": 5.0, "rows": 2.5}
    assert group.names() == ["stage 0"]
    assert group.each([1, 2, 3, 4], b=[10, 20, 30, 40]) == [11, 23, 35, 47]
