"""What travels between processes: every type arrives equal and writable, and nothing of it is left behind."""

import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import psutil
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from side_by_side import run_side_by_side
from tensordict import TensorDict

import bandmaster as bm
from bandmaster import Broadcast, Dispatch, Gather, PerRank, Split, TransferProtocol, register
from bandmaster.platform.mapped_file import MappedFile

PROGRAMS = sorted((Path(__file__).parent / "local_programs").glob("*.py"))
LARGE = 100_000  # elements: more than a message holds


class Echo(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.ONE_TO_ALL)
    def scribble(self, array, place):
        """Write into the array; whether it was all the same before."""
        is_same = bool((array == array[array.size // 2]).all())
        array[place] = 77
        return is_same

    @register(Dispatch.ONE_TO_ALL)
    def write(self, array):
        """Overwrite what came; whether it could be, and what a reused segment showed first."""
        seen = array.copy()
        array[:] = self.rank - 100
        return seen

    @register(TransferProtocol(Split("dp"), Gather("dp")), arguments={"same": Broadcast(), "own": PerRank()})
    def all_sums(self, rows, same, own):
        return [int(array.sum()) for array in (rows, same, own)]

    @register(Dispatch.ONE_TO_ALL)
    def make(self, n):
        return np.full(n, self.rank, dtype=np.uint8)

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, array):
        self.kept = array

    @register(Dispatch.ONE_TO_ALL)
    def kept_sum(self):
        return float(self.kept.sum())

    @register(Dispatch.ONE_TO_ALL)
    def held_resources(self):
        return mapped() + psutil.Process().num_fds()


def mapped():
    """Number of memfd segments that this process has mapped."""
    return sum("memfd:bandmaster" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture(scope="module")
def group(backend):
    with bm.ResourcePool([2], backend=backend) as pool, bm.WorkerGroup(pool, Echo) as group:
        yield group


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.int64,
    torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (200, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(group, dtype, shape):
    tensor = torch.arange(int(np.prod(shape, dtype=int))).reshape(shape).to(dtype)
    for back in group.echo(tensor):
        assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(back.view(torch.uint8) if shape else back, tensor.view(torch.uint8) if shape else tensor)
        back.zero_()  # the caller's own


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60_000.0).reshape(200, 300).t(),
        torch.arange(60_000.0).reshape(200, 300)[::2, ::3],
        torch.ones(3, 1).expand(3, 40_000),
        torch.randn(30_000, requires_grad=True),
        torch.nn.Parameter(torch.randn(30_000)),
        torch.eye(100).to_sparse(),
        torch.randn(20_000, dtype=torch.complex64).conj(),
    ],
    ids=["transposed", "strided", "expanded", "requires_grad", "parameter", "sparse", "conjugate"],
)
def test_tensors_of_every_layout(group, tensor):
    for back in group.echo(tensor):
        assert type(back) is type(tensor)
        assert (back.requires_grad, back.layout, back.is_leaf) == (tensor.requires_grad, tensor.layout, True)
        assert torch.equal(back.to_dense() if back.is_sparse else back, tensor.to_dense() if back.is_sparse else tensor)


def test_jagged_tensors(group):
    jagged = torch.nested.nested_tensor([torch.arange(3.0), torch.arange(20_000.0)], layout=torch.jagged)
    for back in group.echo(jagged):
        assert [row.tolist() for row in back.unbind()] == [row.tolist() for row in jagged.unbind()]


def test_tensordicts(group):
    data = TensorDict({"a": torch.randn(LARGE, 2), "b": {"c": torch.arange(LARGE)}}, batch_size=[LARGE])
    for back in group.echo(data):
        assert back.batch_size == data.batch_size
        assert bool((back == data).all())


@pytest.mark.parametrize("nbytes", [1_000, 45_000, 60_000, 70_000, 1_000_000])
def test_parts_of_one_call_that_fit_into_a_message_alone_but_not_together(group, nbytes):
    array = np.ones(nbytes, np.uint8)
    n = group.world_size
    assert group.all_sums(np.ones(n * nbytes, np.uint8), array, [array * (rank + 1) for rank in range(n)]) == [
        [nbytes, nbytes, nbytes * (rank + 1)] for rank in range(n)
    ]


def test_bytes(group):
    value = {"one": os.urandom(LARGE), "two": [bytearray(os.urandom(LARGE)), b"small"]}
    assert group.echo(value) == [value, value]


def test_frames_and_tables(group):
    frame = pandas.DataFrame({"x": np.arange(LARGE), "y": [f"row {i}" for i in range(LARGE)]})
    table = pyarrow.table({"x": np.arange(LARGE), "y": np.random.default_rng(0).random(LARGE)})
    for back, back_table in group.echo((frame, table)):
        pandas.testing.assert_frame_equal(back, frame)
        assert back_table.equals(table)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=10_000),
    hnp.arrays(hnp.scalar_dtypes().filter(lambda d: d.kind in "biufc"), hnp.array_shapes(max_dims=3, max_side=20)),
)
NESTED = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner))


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() and b.flags.writeable
    return a == b


def test_nested_structures(group):
    @settings(max_examples=60)
    @given(NESTED)
    def check(value):
        assert all(same(value, back) for back in group.echo(value))

    check()


def test_writes_of_a_worker_reach_neither_caller_nor_peers_nor_the_next_call(group):
    array = np.arange(LARGE)
    for _ in range(4):  # the same segment is used again
        for seen in group.write(array):
            assert (seen == np.arange(LARGE)).all()
    assert (array == np.arange(LARGE)).all()


def test_what_a_worker_keeps_stays_as_it_is_while_others_come_and_go(group):
    group.keep(np.full(LARGE, 3.0))
    for value in range(5):
        group.echo(np.full(LARGE, float(value)))
    assert group.kept_sum() == [3.0 * LARGE] * 2
    group.keep(None)


def test_what_the_caller_keeps_stays_as_it_is_while_others_come_and_go(group):
    kept = [group.make(100_000) for _ in range(5)]
    for _ in range(5):
        group.make(100_000)
    assert all((array == rank).all() for arrays in kept for rank, array in enumerate(arrays))


def test_results_that_nobody_reads_are_given_back(group):
    def drop_futures():
        for _ in range(20):
            group.make.submit(100_000)
        group.make(10)
        gc.collect()
        group.make(10)
        return group.held_resources()

    before = drop_futures()
    for _ in range(3):
        after = drop_futures()
    assert [now <= then for now, then in zip(after, before, strict=True)] == [True, True]


def test_many_calls_of_mixed_sizes_leave_nothing(group):
    sizes = [0, 10, 5_000, 20_000, 100_000, 1_000_000]

    def round_of_calls():
        for size in sizes * 5:
            group.echo(np.zeros(size, dtype=np.uint8))
        gc.collect()

    for _ in range(3):
        round_of_calls()
    ours, theirs = [(psutil.Process().num_fds(), mapped())], group.held_resources()
    for _ in range(3):
        for _ in range(5):
            round_of_calls()
        ours.append((psutil.Process().num_fds(), mapped()))
    grow = [not (after[0] <= before[0] and after[1] <= before[1]) for before, after in itertools.pairwise(ours)]
    assert not all(grow), f"descriptors and mappings grow with calls (Ray opens some of its own now and then): {ours}"
    assert [now <= then for now, then in zip(group.held_resources(), theirs, strict=True)] == [True, True]


def test_batches_that_grow_little_by_little_lie_in_the_same_memory(group):
    """Fresh memory costs more than copying, and the batches of a training run are seldom of one size."""
    before = mapped()
    for n in range(20):
        group.echo(np.zeros(3_000_000 + 10_000 * n, dtype=np.uint8))
    assert mapped() - before <= 2 * (1 + 2), "in two segments of ours and of each rank's, where the sizes pass a step"


def test_programs():
    def check(program):
        run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
        assert run.returncode == 0, run.stdout + run.stderr

    run_side_by_side(check, PROGRAMS, n_at_once=4)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("nbytes", [100_000, 4_000_000])  # of few pages and of many
def test_memory_that_is_used_again_shows_nothing_of_what_was_written_to_it(group, nbytes, place):
    for turn in range(5):
        value = np.full(nbytes, turn, np.uint8)
        assert group.scribble(value, place) == [True, True]
        echoed = group.echo(value)
        assert all((value == turn).all() for value in echoed)
        for value in echoed:
            value[place] = 99


class Interrupted(BaseException):
    """What the handler of a signal raises, as Ctrl-C does."""


def test_no_interrupt_is_swallowed_while_shared_memory_is_unmapped(monkeypatch):
    swallowed, is_armed, n_seen = [], False, 0
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: swallowed.append(unraisable.exc_type))

    def handle(*_):
        nonlocal is_armed
        if is_armed:  # not outside of the loop below
            is_armed = False
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    fd = os.memfd_create("unmapped")
    os.ftruncate(fd, mmap.PAGESIZE)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        while n_seen + len(swallowed) < 300:
            try:
                is_armed = True
                while is_armed:
                    MappedFile(fd, mmap.PAGESIZE, is_private=True)
            except Interrupted:
                n_seen += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # of one that is on its way, the next handler would not know
        signal.signal(signal.SIGALRM, before)
        os.close(fd)
    assert not swallowed
