"""What the groups of the soak are made of, and what is sent to them."""

import asyncio
import contextlib
import copy
import os
import signal
import subprocess
import time

import numpy as np
from ends import deadlock

import bandmaster as bm
from bandmaster import Dispatch, register

DEADLY = ["exit", "kill", "close lane"]
HANGING = ["spin", "sleep", "deadlock"]


class Subject(bm.Worker):
    def __init__(self, how_by_rank=None):
        self.held, self.heard_rows, self.kept_rows, self.n_open = [], [], [], 0
        misbehave((how_by_rank or {}).get(self.rank))

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value):
        return value

    @register(Dispatch.DP_PROTO)
    def rows(self, batch):
        return batch

    @register(Dispatch.DP_PROTO)
    async def rows_async(self, batch):
        return batch

    @register(Dispatch.REQUEST, concurrency=4)
    async def ask(self, batch):
        return batch

    @register(Dispatch.ONE_TO_ALL)
    def hold(self, array):
        """Keep an array for long: what comes and goes beside it in shared memory must not touch it."""
        self.held = [*self.held[-3:], (array, array.copy())]
        return all(same(now, then) for now, then in self.held)

    @register(Dispatch.DP_PROTO)
    def add_one(self, rows):
        """Change a column in place, which no other column or row may share."""
        rows["x"] += 1
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, rows):
        """Keep rows for long: whether those that are kept are what they were."""
        self.kept_rows = [*self.kept_rows[-3:], (rows, copy.deepcopy(rows))]
        return all(same(now, then) for now, then in self.kept_rows)

    @register(Dispatch.DP_PROTO)
    def items(self, rows):
        with self.opened():
            yield from rows

    @register(Dispatch.DP_PROTO)
    async def items_async(self, rows):
        with self.opened():
            for row in rows:
                await asyncio.sleep(0)
                yield row

    @contextlib.contextmanager
    def opened(self):
        self.n_open += 1
        try:
            yield
        finally:
            self.n_open -= 1

    @register(Dispatch.ONE_TO_ALL)
    def count_open(self):
        """How many generators have begun and not ended."""
        return self.n_open

    @register(Dispatch.ONE_TO_ALL)
    def overwrite(self, array):
        before = array.copy()
        array[...] = 0
        return before

    @register(Dispatch.ONE_TO_ALL)
    def through_torch(self, array):
        import torch

        native = array.astype(array.dtype.newbyteorder("="))  # torch takes no other
        return torch.from_numpy(native).clone().numpy().astype(array.dtype)

    @register(Dispatch.DP_PROTO)
    def note(self, rows):
        self.heard_rows += dict.fromkeys(rows)  # each once, as a rank may get several that are equal
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def heard(self):
        heard, self.heard_rows = self.heard_rows, []
        return heard

    @register(Dispatch.ONE_TO_ALL)
    def fork_with(self, array):
        """Fork while holding an array, as a DataLoader with workers does."""
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return array

    @register(Dispatch.ONE_TO_ALL)
    def misbehave_on(self, how_by_rank):
        return misbehave(how_by_rank.get(self.rank))

    @register(Dispatch.ONE_TO_ALL)
    def start_child(self, is_far):
        return subprocess.Popen(["sleep", "600"], start_new_session=is_far).pid > 0

    def parent(self):
        return os.getppid()

    def on_restart(self, state):
        pass

    def on_replace(self, rank, state):
        pass


def misbehave(how):
    if how is None:
        return
    if how == "raise":
        raise ValueError("asked to")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "close lane":
        os.closerange(3, 1024)
    while how == "spin":
        pass
    if how == "deadlock":
        deadlock()
    time.sleep(600)


def random_array(rng):
    nbytes = int(2 ** rng.uniform(0, 23 if rng.random() < 0.2 else 16))
    dtype = np.dtype(rng.choice(["u1", "i8", "f4", "c16", ">i4", "?"]))
    n_rows = rng.choice([0, 1, 2, 3, rng.randrange(4, 100)])
    width = max(1, nbytes // max(1, n_rows) // dtype.itemsize)
    array = np.frombuffer(rng.randbytes(n_rows * width), "u1").reshape(n_rows, width) & 1
    return np.array(array, dtype, order=rng.choice("CF"))


def random_batch(rng):
    array, kind = random_array(rng), rng.randrange(4)
    if kind == 0:
        return [rng.choice([None, "x" * rng.randrange(50), rng.random(), row.tobytes()]) for row in array]
    if kind == 1:
        return {"a": array, "b": {"c": [rng.random() for _ in array], "d": array[:, ::2]}}
    return array[:, 0] if kind == 2 else array


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return a == b
