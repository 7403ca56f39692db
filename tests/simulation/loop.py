"""An event loop of asyncio in the world: its clock, and the poll that it waits in, are the world's."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

from simulation import sync
from simulation import world as worlds
from simulation.net import IN, OUT, EventCounter, Poll


class Selector(selectors._BaseSelectorImpl):  # type: ignore[name-defined]
    """As `selectors.EpollSelector`."""

    def __init__(self) -> None:
        super().__init__()
        self._poll = Poll()

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        key = super().register(fileobj, events, data)
        self._poll.register(key.fd, _flags(events))
        return key

    def unregister(self, fileobj: Any) -> Any:
        key = super().unregister(fileobj)
        if key.fd in self._poll.entries:  # else it was closed
            self._poll.unregister(key.fd)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any:
        self.unregister(fileobj)
        return self.register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        found = self._poll.poll(None if timeout is None else max(0.0, timeout))
        keys = [(self._key_from_fd(fd), events) for fd, events in found]
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        return [(key, (read if events & ~OUT else 0) | (write if events & ~IN else 0)) for key, events in keys if key]

    def close(self) -> None:
        self._poll.close()
        super().close()


def _flags(events: int) -> int:
    return (IN if events & selectors.EVENT_READ else 0) | (OUT if events & selectors.EVENT_WRITE else 0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop that runs in a thread of the world."""

    def __init__(self) -> None:
        self._threads: sync.ThreadPoolExecutor | None = None
        super().__init__(Selector())
        self._counter.world.processes[self._counter.process].loops.add(self)

    def __del__(self) -> None:
        """Close nothing: that of a process that was killed is closed."""

    def time(self) -> float:
        return sync.now()

    def run_in_executor(self, executor: None, function: Any, *args: Any) -> Any:  # type: ignore[override]
        self._threads = self._threads or sync.ThreadPoolExecutor(1, "a thread of an event loop")
        return asyncio.wrap_future(self._threads.submit(function, *args), loop=self)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        super().close()

    def _make_self_pipe(self) -> None:
        self._counter = EventCounter()
        self._internal_fds += 1
        self._add_reader(self._counter.fd, self._read_from_self)

    def _close_self_pipe(self) -> None:
        self._remove_reader(self._counter.fd)
        self._counter.close()
        self._internal_fds -= 1

    def _read_from_self(self) -> None:
        self._counter.n = 0
        self._counter.world.version += 1

    def _write_to_self(self) -> None:
        if not self._counter.closed:
            self._counter.n = 1
            self._counter.world.version += 1
            worlds.tick()


class Asyncio:
    """Stands for the module `asyncio`, where the library makes event loops of its own."""

    new_event_loop = Loop

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)
