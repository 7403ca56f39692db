"""Workers that misbehave on purpose, on every backend: what your program makes of it, you see in a test.

::

    with_faults(Trainer, Kill(rank=1, call=3))      a subclass of Trainer, of the same name
      group.step(x)    calls 1 and 2 run as ever
      group.step(x)    in call 3 rank 1 is killed before the method runs: WorkerDied in the controller

A worker counts the calls of its registered methods from 1, those that it makes itself included. One that was
restarted or replaced counts from 1 again.
"""

from __future__ import annotations

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

__all__ = ["with_faults"]

WorkerClass = TypeVar("WorkerClass", bound=type[Worker])


def with_faults(worker_class: WorkerClass, *faults: Fault) -> WorkerClass:
    """A subclass whose registered methods misbehave on purpose.

    It has the same name, and its methods have their registrations, signatures and docstrings, so that it goes
    wherever the class goes. Methods that are not registered stay as they are.

    Args:
        worker_class: A subclass of `Worker`, not wrapped by ``@ray.remote``: wrap what comes back.
        *faults: What goes wrong, where and when. Several that fall on one call strike in this order.

    Raises:
        UsageError: No worker class, no fault, or one that makes no sense for this class: a rank or call that is
            no number, a method that is not registered... In a worker, and there the cause of a `RemoteError`: a
            rank that the group does not have, or a fault that takes the process along in the process that made
            the class, as on backend ``"inprocess"``.

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
        raise UsageError(f"with_faults takes a subclass of bandmaster.Worker, not {worker_class!r}")
    registered = registrations(worker_class)
    for fault in faults:
        if not isinstance(fault, Fault):
            raise UsageError(f"with_faults takes faults behind the class, such as Kill(rank=1, call=2), not {fault!r}")
        fault.check(worker_class.__name__, registered)
    plan = _Plan(faults)
    members = {
        **{name: getattr(worker_class, name) for name in ("__module__", "__qualname__", "__doc__")},
        **{name: _faulty(worker_class, name, plan) for name in registered},
    }
    return types.new_class(  # type: ignore[return-value]  # a subclass of what came in
        worker_class.__name__, (worker_class,), exec_body=lambda namespace: namespace.update(members)
    )


class _Plan:
    """The faults of one class, and the process that made it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._maker = _this_process()
        self._key = f"_calls_for_faults_{secrets.token_hex(4)}"  # a class may be given faults twice

    def due(self, worker: Worker, method: str) -> list[Fault]:
        """Count a call that is about to run; the faults that fall on it."""
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
                    f"{fault!r} would take this process along, which made the class; use a backend whose workers "
                    "have processes of their own, such as 'local'"
                )
        return due


def _faulty(worker_class: type[Worker], name: str, plan: _Plan) -> Callable[..., Any]:
    """A registered method of a class, with the faults."""
    found = inspect.getattr_static(worker_class, name)
    function = getattr(worker_class, name)
    if isinstance(found, staticmethod | classmethod):
        return _faulty_without_self(function, name, plan)
    if inspect.iscoroutinefunction(function):
        return _faulty_async(function, name, plan)

    @wraps(function)
    def faulty(worker: Worker, /, *args: Any, **kwargs: Any) -> Any:
        due = plan.due(worker, name)
        _strike(due)
        return _spoiled(due, function(worker, *args, **kwargs))

    return faulty


def _faulty_async(function: Callable[..., Any], name: str, plan: _Plan) -> Callable[..., Any]:
    @wraps(function)
    async def faulty(worker: Worker, /, *args: Any, **kwargs: Any) -> Any:
        import asyncio  # whoever has async methods has it already

        due = plan.due(worker, name)
        for fault in due:
            fault.strike()
            await asyncio.sleep(fault.wait_s)
        return _spoiled(due, await function(worker, *args, **kwargs))

    return faulty


def _faulty_without_self(function: Callable[..., Any], name: str, plan: _Plan) -> Callable[..., Any]:
    """A static or class method becomes one of the worker, which alone knows its rank; callers see no difference."""

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


def _spoiled(due: Sequence[Fault], value: Any) -> Any:
    for fault in due:
        value = fault.spoil(value)
    return value


def _this_process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()
