"""What runs where a worker lives: construct it once, then run its calls. The same code on every backend."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import CoroutineType
from typing import Any

from bandmaster.failure import Failure, FailureKind, reraise_if_from_signal, summary_of
from bandmaster.limits import start_thread
from bandmaster.wire.codec import Payload, decode, encode
from bandmaster.wire.desk import Interrupted
from bandmaster.wire.rendezvous import Rendezvous
from bandmaster.wire.steady import SteadyLock
from bandmaster.worker import ClassLoading, Worker, WorkerContext, make_worker

__all__ = ["WorkerHost"]


class WorkerHost:
    """One worker, its calls, and the event loop of its async methods.

    Attributes:
        hold: Makes a context in which calls are not interrupted: in a process of their own as its desk says, else
            by Ctrl-C.
        device: Where tensors go that come from a GPU.
    """

    def __init__(self, hold: Callable[[], AbstractContextManager[None]] = SteadyLock) -> None:
        self.hold = hold
        self.worker: Worker | None = None
        self.rendezvous: Rendezvous | None = None  # on rank 0 of workers with a process of their own
        self._loop: _EventLoopThread | None = None
        self.device = "cpu"

    def construct(self, context: WorkerContext, constructor: Payload) -> Failure | None:
        """Make the worker from the encoded ``(cls, args, kwargs)``, which must lie in memory of its own."""
        try:
            with ClassLoading():
                self.device = context.device
                cls, args, kwargs = decode(constructor, context.device)
            self.worker = make_worker(cls, context, args, kwargs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            reraise_if_from_signal(error)  # as that of a handler of SIGTERM: the process is to end
            return self.failure(error)
        if self.rendezvous is not None:
            self._hand_over()
        return None

    def call(self, method: str, parts: Sequence[Payload] | memoryview, is_collected: bool) -> Payload | Failure | None:
        """Run a method; the encoded value, or None if it is not collected.

        Args:
            method: Its name.
            parts: The arguments, in memory of their own; the pickle stream alone where that is all there is.
            is_collected: Whether anybody wants the value.
        """
        try:
            if type(parts) is not memoryview:
                items = self._merge(parts)
            else:
                items = pickle.loads(parts) if self.device == "cpu" else self._decode(Payload(parts))
            args, kwargs = [], {}
            for key, argument in items:
                if type(key) is int:
                    args.append(argument)
                else:
                    kwargs[key] = argument
            del items
            value = getattr(self.worker, method)(*args, **kwargs)
            if type(value) is CoroutineType or self.rendezvous is not None:
                value = self._settled(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as above
            reraise_if_from_signal(error)
            return self.failure(error)
        if not is_collected:
            return None
        try:
            return encode(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as above
            reraise_if_from_signal(error)
            what = f"the returned {type(value).__name__} cannot be pickled: {summary_of(error)}"
            return self.failure(TypeError(what).with_traceback(error.__traceback__), FailureKind.RESULT)

    def _merge(self, parts: Sequence[Payload]) -> Sequence[tuple[Any, Any]]:
        """The arguments of all parts, positional ones in order, as they are within each part."""
        if len(parts) == 1:
            items: Sequence[tuple[Any, Any]] = self._decode(parts[0])
            return items
        items = [item for part in parts for item in self._decode(part)]
        return sorted(items, key=lambda item: item[0] if type(item[0]) is int else -1)

    def _decode(self, payload: Payload) -> Any:
        if self.device == "cpu":
            return decode(payload)
        with self.hold():  # so that what it borrows of another process's GPU is given back
            return decode(payload, self.device)

    def failure(self, error: BaseException, kind: FailureKind = FailureKind.RAISED) -> Failure:
        """Describe what was raised in this worker."""
        failure = Failure.of(error, kind, self.device)
        if _follows_interruption(error):
            return replace(failure, kind=FailureKind.CANCELLED, summary="interrupted by the controller")
        return failure

    def run(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method on plain values; an async one is awaited."""
        return self._settled(getattr(self.worker, method)(*args, **kwargs))

    def _settled(self, value: Any) -> Any:
        if type(value) is CoroutineType:
            value = self._await(value)
        if self.rendezvous is not None:
            self._hand_over()
        return value

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = None
        try:
            with self.hold():
                self._loop = self._loop or _EventLoopThread()
            with self.hold():  # so that it is handed over, or is not
                future = self._loop.start(coroutine)
            error = future.exception()
        except BaseException:  # the call was given up
            if future is None:
                coroutine.close()
            else:
                future.cancel()
            raise
        if error is not None:
            raise error
        return future.result()

    def close(self) -> None:
        """End the event loop, if there is one, and let the worker go."""
        if self._loop is not None:
            self._loop.close()
        if self.rendezvous is not None:
            self.rendezvous.close()
        self.worker = self._loop = self.rendezvous = None

    def _hand_over(self) -> None:
        assert self.rendezvous is not None, "who calls this has looked"
        if self.rendezvous.hand_over():
            self.rendezvous = None


def _follows_interruption(error: BaseException | None) -> bool:
    """Whether it is one, or was raised while the method tidied up after one."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


class _EventLoopThread:
    """A loop in a thread of its own: tasks that a method leaves behind go on between calls.

    And it works where this thread's loop is running already, as in a notebook.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        try:
            self._thread = start_thread("bandmaster-async-methods", self._serve)
        except BaseException:
            self._loop.close()
            raise

    def _serve(self) -> None:
        while not self._is_closed:
            with suppress(SystemExit, KeyboardInterrupt):  # from a coroutine, whose caller gets it: the loop goes on
                self._loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
