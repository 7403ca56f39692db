"""Workers that fail on purpose, on every backend, so that tests can show how a program handles the failure.

::

    with_faults(Trainer, Kill(rank=1, call=3))      a subclass of Trainer, of the same name
      group.step(x)    calls 1 and 2 run normally
      group.step(x)    in call 3 rank 1 is killed before the method runs: WorkerDied in the controller

A worker counts the calls of its registered methods from 1, including calls that it makes itself. A call of a generator
counts when its first item is made, and `BadResult` spoils every item. A worker that was restarted or replaced counts
from 1 again.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import socket
import time
import types
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from bandmaster.errors import UsageError
from bandmaster.testing.faults import Fault
from bandmaster.worker import Worker, registrations

WorkerClass = TypeVar("WorkerClass", bound=type[Worker])


def with_faults(worker_class: WorkerClass, *faults: Fault) -> WorkerClass:
    """Return a subclass of a worker class whose registered methods fail on purpose.

    The subclass keeps the class's name and its methods' registrations, signatures and docstrings, so that it can
    replace the class anywhere. Unregistered methods do not change.

    Args:
        worker_class: A subclass of `Worker`, not wrapped by ``@ray.remote``; wrap the result instead.
        *faults: The faults to inject. Several faults in one call occur in this order.

    Raises:
        UsageError: ``worker_class`` is not a worker class, an argument is not a `Fault`, or a fault does not fit the
            class: a rank or call is not a valid number, or a method is not registered. A worker raises it, as the
            cause of a `RemoteError`, if the group does not have the fault's rank, or if the fault would end the
            process that created the subclass, as on backend ``"inprocess"``.

    Example:
        >>> import bandmaster as bm
        >>> from bandmaster.testing import Raise, with_faults
        >>> class Doubler(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def double(self, rows): return [2 * row for row in rows]
        >>> Faulty = with_faults(Doubler, Raise(rank=1, call=2, error=ValueError("boom")))
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     group = bm.WorkerGroup(pool, Faulty)
        ...     print(group.double([1, 2, 3]))
        ...     error = group.double.submit([1, 2, 3]).exception()
        [2, 4, 6]
        >>> error.rank, error.__cause__
        (1, ValueError('boom'))
    """
    if not (inspect.isclass(worker_class) and issubclass(worker_class, Worker)):
        raise UsageError(f"with_faults takes a subclass of bandmaster.Worker, got {worker_class!r}")
    registered = registrations(worker_class)
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(f"with_faults takes faults after the class, such as Kill(rank=1, call=2), got {fault!r}")
        fault.check(worker_class.__name__, registered)
    plan = _Plan(faults)
    members = {
        **{name: getattr(worker_class, name) for name in ("__module__", "__qualname__", "__doc__")},
        **{name: _faulty(worker_class, name, plan) for name in registered},
    }
    return types.new_class(  # type: ignore[return-value]  # a subclass of worker_class
        worker_class.__name__, (worker_class,), exec_body=lambda namespace: namespace.update(members)
    )


class _Plan:
    """The faults of one faulty class, and the process that created the class."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._maker = _this_process()
        self._key = f"_calls_for_faults_{secrets.token_hex(4)}"  # with_faults may wrap a class twice

    def due(self, worker: Worker, method: str) -> list[Fault]:
        """Count a call that is about to run, and return the faults that occur in it."""
        calls: Counter[str] = vars(worker).setdefault(self._key, Counter())
        calls[method] += 1
        counts = {None: calls.total(), method: calls[method]}
        due = [fault for fault in self._faults if fault.falls_on(worker.rank, counts)]
        for fault in self._faults:
            if fault.rank is not None and fault.rank >= worker.world_size:
                raise UsageError(f"{fault!r} cannot happen: the group has ranks 0 to {worker.world_size - 1}")
        for fault in due:
            if fault.needs_process and self._maker == _this_process():
                raise UsageError(
                    f"{fault!r} would end or block the process that created the class; use a backend whose workers "
                    "have processes of their own, such as 'local'"
                )
        return due


def _faulty(worker_class: type[Worker], name: str, plan: _Plan) -> Callable[..., Any]:
    """Wrap a registered method of a class so that the planned faults occur in it."""
    found = inspect.getattr_static(worker_class, name)
    function = getattr(worker_class, name)
    if isinstance(found, staticmethod | classmethod):
        return _faulty_without_self(function, name, plan)
    if inspect.iscoroutinefunction(function):
        return _faulty_async(function, name, plan)
    if inspect.isasyncgenfunction(function):
        return _faulty_async_generator(function, name, plan)
    if inspect.isgeneratorfunction(function):
        return _faulty_generator(function, name, plan)

    @wraps(function)
    def faulty(worker: Worker, /, *args: Any, **kwargs: Any) -> Any:
        due = plan.due(worker, name)
        _strike(due)
        return _spoiled(due, function(worker, *args, **kwargs))

    return faulty


def _faulty_async(function: Callable[..., Any], name: str, plan: _Plan) -> Callable[..., Any]:
    @wraps(function)
    async def faulty(worker: Worker, /, *args: Any, **kwargs: Any) -> Any:
        due = plan.due(worker, name)
        await _strike_async(due)
        return _spoiled(due, await function(worker, *args, **kwargs))

    return faulty


def _faulty_async_generator(function: Callable[..., Any], name: str, plan: _Plan) -> Callable[..., Any]:
    @wraps(function)
    async def faulty(worker: Worker, /, *args: Any, **kwargs: Any) -> Any:
        due = plan.due(worker, name)
        await _strike_async(due)
        async with contextlib.aclosing(function(worker, *args, **kwargs)) as items:
            async for item in items:
                yield _spoiled(due, item)

    return faulty


def _faulty_generator(function: Callable[..., Any], name: str, plan: _Plan) -> Callable[..., Any]:
    @wraps(function)
    def faulty(worker: Worker, /, *args: Any, **kwargs: Any) -> Any:
        due = plan.due(worker, name)
        _strike(due)
        with contextlib.closing(function(worker, *args, **kwargs)) as items:
            for item in items:
                yield _spoiled(due, item)

    return faulty


def _faulty_without_self(function: Callable[..., Any], name: str, plan: _Plan) -> Callable[..., Any]:
    """Wrap a static or class method as an instance method, because only the worker knows its rank.

    Callers see the same signature.
    """

    @wraps(function)
    def faulty(worker: Worker, /, *args: Any, **kwargs: Any) -> Any:
        due = plan.due(worker, name)
        _strike(due)
        return _spoiled(due, function(*args, **kwargs))

    itself = inspect.Parameter("worker", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(function)
    parameters = [itself, *signature.parameters.values()]
    faulty.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return faulty


def _strike(due: Sequence[Fault]) -> None:
    for fault in due:
        fault.strike()
        time.sleep(fault.wait_s)


async def _strike_async(due: Sequence[Fault]) -> None:
    import asyncio  # a class with async methods has imported it already

    for fault in due:
        fault.strike()
        await asyncio.sleep(fault.wait_s)


def _spoiled(due: Sequence[Fault], value: Any) -> Any:
    for fault in due:
        value = fault.spoil(value)
    return value


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()
