"""Stores calls of workers as they begin, so that ``bandmaster replay`` can run each again in one process.

::

    with record(group, "calls") ── RUN: install ──► the executor of each rank ── before a method ──► calls/0001-….call
                                                                                                          │
    bandmaster replay calls ◄── worker, arguments and random states of one rank ──────────────────────────┘

A recorded call is a file of two pickles: ``sys.path``, and a dict with the bound method (and so its worker), the
arguments, the states of random number generators, and the names of method and host. Loading a file runs code that the
pickles name.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bandmaster.calls.future import Future
from bandmaster.calls.request import CallRequest
from bandmaster.calls.request import Collection as Collected
from bandmaster.codec import Pickler
from bandmaster.contract import RUN
from bandmaster.errors import ClosedError, UsageError, suggestion
from bandmaster.errors.failure import summary_of
from bandmaster.groups.group import GroupOf
from bandmaster.plan.arguments import ArgumentGroup, CallPlan, Share
from bandmaster.plan.transfer import Only
from bandmaster.worker import Worker
from bandmaster.worker_process.executor import Executor

SUFFIX = ".call"


@contextlib.contextmanager
def record(
    group: GroupOf[Any],
    folder: str | os.PathLike[str],
    ranks: Sequence[int] | None = None,
    methods: Sequence[str] | None = None,
) -> Iterator[None]:
    """Make ranks of a group store each call that is made in the block, before it runs.

    Each call is a file per rank: the arguments that the rank has received, its worker, and the states of random number
    generators. ``bandmaster replay`` runs it again. A call whose worker or arguments cannot be pickled fails with a
    `TypeError`. Streams of generators are not recorded, nor are ranks that are restarted or replaced in the block.

    Args:
        group: The group.
        folder: The folder of the files, on the host of each rank; it is made if it does not exist.
        ranks: The ranks that record; by default all.
        methods: Names of the methods whose calls are recorded; by default all.

    Raises:
        UsageError: The group has no such rank or method, or it was closed.

    Example:
        >>> import tempfile, bandmaster as bm
        >>> class Doubler(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def double(self, rows):
        ...         return [2 * row for row in rows]
        >>> with bm.ResourcePool([2], backend="inprocess") as pool, tempfile.TemporaryDirectory() as folder:
        ...     group = bm.WorkerGroup(pool, Doubler)
        ...     with record(group, folder, ranks=[1]):
        ...         result = group.double([1, 2])
        ...     sorted(os.listdir(folder))
        ['0001-Doubler.double-rank-1.call']
    """
    chosen = _checked_ranks(group, ranks)
    _check_methods(group, methods)
    token = uuid.uuid4().hex
    prefix = group._submitter.prefix
    names = None if methods is None else {prefix + name for name in methods}
    try:
        for installed in _run(group, chosen, partial(install, token, os.path.abspath(folder), prefix, names)):
            installed.result()
        yield
    finally:
        with contextlib.suppress(ClosedError):
            _run(group, chosen, partial(remove, token))  # behind the calls of the block, which may still run


def _checked_ranks(group: GroupOf[Any], ranks: Sequence[int] | None) -> tuple[int, ...]:
    if not isinstance(ranks, Iterable | None):
        raise UsageError(f"ranks must be a list of numbers, got {ranks!r}; record one rank by ranks=[{ranks!r}]")
    known = range(group.world_size)
    chosen = tuple(known if ranks is None else ranks)
    if unknown := [rank for rank in chosen if rank not in known]:
        raise UsageError(f"record names rank {unknown[0]!r}, but {group.name} has ranks 0 to {known[-1]}")
    return chosen


def _check_methods(group: GroupOf[Any], methods: Sequence[str] | None) -> None:
    if isinstance(methods, str) or not isinstance(methods, Collection | None):
        raise UsageError(f"methods must be a list of names, got {methods!r}")
    for name in methods or ():
        if not callable(getattr(group._cls, name, None)):
            raise UsageError(f"{group._cls.__name__} has no method {name!r}{suggestion(name, dir(group._cls))}")


def _run(group: GroupOf[Any], ranks: tuple[int, ...], function: Callable[[Executor], object]) -> list[Future[Any]]:
    """Send ranks a function that they call with their executor, after the calls that were sent before."""
    submitter = group._submitter
    submitter.work.wait_until_sent()
    shares = {Share(rank, (rank,)): Collected(Only(), (rank,)) for rank in ranks}
    plan = CallPlan((ArgumentGroup(((0, function),), ("function",), ranks),))
    return submitter.submit_shares(CallRequest("record", plan, ranks, owner=group, asks_for=RUN), shares)


class _Recorder:
    """The function that an executor calls before each method, while calls are recorded.

    Args:
        token: Identifies this recorder among others of the same worker.
        folder: The folder of the files.
        prefix: The prefix of the group's methods in the worker; "" unless several groups share the workers.
        methods: The methods whose calls are recorded; None for all.
    """

    def __init__(self, token: str, folder: str, prefix: str, methods: Collection[str] | None) -> None:
        self.token, self._folder, self._prefix, self._methods = token, folder, prefix, methods

    def __call__(self, worker: Worker, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if method.startswith(self._prefix) if self._methods is None else method in self._methods:
            _store(Path(self._folder), worker, getattr(worker, method), args, kwargs)


def install(token: str, folder: str, prefix: str, methods: Collection[str] | None, executor: Executor) -> None:
    """Make an executor record calls from now on."""
    executor.before.append(_Recorder(token, folder, prefix, methods))


def remove(token: str, executor: Executor) -> None:
    """Remove the recorders of a token from an executor."""
    executor.before = [hook for hook in executor.before if not (isinstance(hook, _Recorder) and hook.token == token)]


def _store(folder: Path, worker: Worker, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Store a call that is about to run.

    Raises:
        TypeError: The worker or an argument cannot be pickled.
        OSError: The file cannot be written.
    """
    label = method.__qualname__.rpartition("<locals>.")[2]
    call = {
        "label": label,
        "rank": worker.rank,
        "world_size": worker.world_size,
        "host": os.uname().nodename,
        "random": random_states(),
        "method": method,
        "args": tuple(args),
        "kwargs": dict(kwargs),
    }
    content = _pickled(call, label)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{uuid.uuid4().hex}.part"
    try:
        unfinished.write_bytes(content)
        _link(unfinished, folder, f"{label}-rank-{worker.rank}{SUFFIX}")  # so that readers see only complete files
    finally:
        unfinished.unlink(missing_ok=True)


def _link(unfinished: Path, folder: Path, name: str) -> None:
    """Give a file the next free number; several workers may do so at the same time."""
    number = 1 + max((int(file.name[:4]) for file in folder.glob(f"[0-9][0-9][0-9][0-9]-{name}")), default=0)
    while True:
        try:
            os.link(unfinished, folder / f"{number:04d}-{name}")
            return
        except FileExistsError:
            number += 1


def _pickled(call: Mapping[str, Any], label: str) -> bytes:
    buffer = io.BytesIO(pickle.dumps(list(sys.path)))
    buffer.seek(0, io.SEEK_END)
    try:
        Pickler(buffer).dump(call)
    except Exception as error:  # the user's objects may raise anything
        raise TypeError(
            f"{label} cannot be recorded, as its worker or an argument cannot be pickled: {summary_of(error)}; define "
            f"__getstate__ in {label.partition('.')[0]} to leave out what cannot be, or record another method"
        ) from error
    return buffer.getvalue()


def random_states() -> dict[str, Any]:
    """The states of the generators of `random`, numpy and, if it is loaded, torch."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators to the states that `random_states` has returned; GPU states only if there is a GPU."""
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
