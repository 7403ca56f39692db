"""Calls of workers on other hosts than the controller's, which the agent of their host passes on.

::

    worker ── lane ── PassedCalls, in the agent ── link: RELAY ──► FarCalls ── RequestTasks ──► the controller's relay
                                                ◄── RELAYED ─────────┘
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from bandmaster.answering.request_tasks import Outcome, ReceivedRequest, RequestTasks
from bandmaster.callers.reached import FAR, READY, SHUT, Asked, closed
from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import OPEN_ITEMS, Reply
from bandmaster.errors import ResourceError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.link import FrameKind, Message
from bandmaster.hosts.links import Agent, AgentLinks
from bandmaster.wire.messages import INLINE_NBYTES, ReplyKind, inline
from bandmaster.wire.segment_reader import RowReaders
from bandmaster.worker_process.executor import Arguments, Executor

FIND = "bandmaster.find"  # in place of a method: where a rank is
_CLOSED = "group was closed; its workers cannot be called any more"
_SHUT = closed(_CLOSED)
Give = Callable[[Any], object]  # takes an item of a stream


class PassedCalls(Executor):
    """Has the controller make the calls of workers on this host.

    Args:
        server: The agent of this host.
    """

    def __init__(self, server: AgentServer) -> None:
        super().__init__()
        self._server = server
        self._numbers = itertools.count(secrets.randbits(64))  # no other agent has such
        self._open: dict[int, tuple[asyncio.Future[Outcome], Give | None]] = {}
        server.take_relayed = partial(self.event_loop().run, self._answered)

    def begun(self, method: str, parts: Arguments, rows: RowReaders) -> tuple[Sequence[Any], dict[Any, Any], Any]:
        """Have the controller make a call; returns the coroutine that waits for its outcome."""
        assert not isinstance(parts, memoryview), "requests have parts"
        if method == OPEN_ITEMS:  # in place of an `ItemStream`
            return (), {}, SimpleNamespace(method=method, run=lambda _, give: self._outcome(method, parts, give))
        return (), {}, self._outcome(method, parts)

    def encoded(self, value: Any, reply: int) -> Payload | Failure | None:
        """The outcome of a call as it has come."""
        outcome: Payload | Failure | None = value
        return outcome

    async def find(self, asked: Asked) -> tuple[str, Any]:
        """The workers on this host that have a rank, or else what the controller says; see `ControllersRelay.find`."""
        found = await self._outcome(FIND, [encode(((0, asked),))])
        if not isinstance(found, Payload):
            return SHUT, _CLOSED
        answer, said = decode(found)
        if answer == FAR:
            ranks = self._server.groups.get(said.group)
            if ranks is not None and asked.rank in ranks.ranks:
                return READY, ranks.workers
            said = said._replace(secret=self._server.secret)
        return answer, said

    async def _outcome(self, method: str, parts: Sequence[Payload], give: Give | None = None) -> Outcome:
        """Have the controller make a call, and wait for its outcome.

        Args:
            method: The method.
            parts: The arguments.
            give: Called with each item, if it is a stream.
        """
        number = next(self._numbers)
        waiting: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._open[number] = waiting, give
        large: dict[int, Payload] = {}
        try:
            self._server.tell(FrameKind.RELAY, number, method, [_part(one, large) for one in parts], large=large)
            return await waiting
        except asyncio.CancelledError:
            self._server.tell(FrameKind.RELAY, number, "", ())
            raise
        finally:
            del self._open[number]

    def _answered(self, message: Message) -> None:
        number, kind, part = message.content
        waiting, give = self._open.get(number, (None, None))
        if waiting is not None and not waiting.done():
            payload = None if part is None else message.unpack(part)
            if kind == ReplyKind.ITEM and give is not None:
                give(payload)
            else:
                waiting.set_result(decode(payload) if kind == ReplyKind.FAILURE and payload is not None else payload)


class FarCalls:
    """Makes the calls that agents pass on to this process, which is the controller; see `AgentLinks.relays`.

    Args:
        relay: Makes them.
    """

    def __init__(self, relay: Executor) -> None:
        self._tasks, self._loop = RequestTasks(relay, self._ended, self._made), relay.event_loop().loop
        self._open: dict[int, tuple[AgentLinks, Agent]] = {}  # by number
        self._watched: dict[AgentLinks, int] = {}  # with a descriptor that is readable when something has arrived
        self._is_closed = False

    def take(self, links: AgentLinks, agent: Agent, message: Message | None) -> None:
        """Take a call of a worker on the host of an agent; None if the agent is lost. The lock is held."""
        number, method, _ = message.content if message is not None else (0, "", ())
        if method:
            self._open[number] = links, agent
        with suppress(RuntimeError):  # it was closed
            self._loop.call_soon_threadsafe(self._begin, links, agent, message)
        if self._is_closed:
            self._answer(number, _SHUT, is_locked=True)

    def close(self) -> None:
        """Make no more calls."""
        self._is_closed = True
        for number in list(self._open):
            self._answer(number, _SHUT)
        for links in list(self._watched):
            self._ignore(links)

    def _begin(self, links: AgentLinks, agent: Agent, message: Message | None) -> None:
        if message is None:
            self._tasks.cancel(self._tasks.numbers_of(agent))
            if not links.agents:  # they may have been closed
                self._ignore(links)
            return
        number, method, parts = message.content
        if links not in self._watched and not self._is_closed:  # no other thread may read what agents send
            try:
                self._watched[links] = os.dup(links.poller.fileno())
            except OSError as error:
                no_room = ResourceError(
                    f"the controller has no descriptor to make a call for a worker with ({error}); raise its limit on "
                    "open files (ulimit -n)"
                )
                self._answer(number, Failure.of(no_room, FailureKind.RELAYED))
                return
            self._loop.add_reader(self._watched[links], links.check)
        if method:
            payloads = list(map(message.unpack, parts))
            self._tasks.start([ReceivedRequest(number, method, Reply.RETURN, payloads, caller=agent)])
        else:
            self._tasks.cancel((number,))

    def _ignore(self, links: AgentLinks) -> None:
        fd = self._watched.pop(links, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            os.close(fd)

    def _made(self, request: ReceivedRequest, item: Payload) -> None:
        found = self._open.get(request.number)
        if found is not None:
            _relay(found[0].tell, found[1], request.number, ReplyKind.ITEM, item.private())

    def _ended(self, request: ReceivedRequest, outcome: Outcome, times: object) -> None:
        self._answer(request.number, outcome)
        self._tasks.count(1)

    def _answer(self, number: int, outcome: Any, is_locked: bool = False) -> None:
        """Send an outcome, unless the call was answered, as this was closed; the lock of the links may be held."""
        links, agent = self._open.pop(number, (None, None))
        if links is not None and agent is not None:
            tell = links.send if is_locked else links.tell
            if isinstance(outcome, Failure):
                _relay(tell, agent, number, ReplyKind.FAILURE, encode(outcome))
            else:
                _relay(tell, agent, number, ReplyKind.VALUE, outcome)


def _relay(tell: Callable[..., object], agent: Agent, number: int, kind: int, payload: Payload | None) -> None:
    large: dict[int, Payload] = {}
    part = None if payload is None else _part(payload, large)
    tell(agent, FrameKind.RELAYED, number, kind, part, large=large)


def _part(payload: Payload, large: dict[int, Payload]) -> Any:
    """The part of a message that names a payload; a large one is added to those of the message."""
    if payload.nbytes <= INLINE_NBYTES:
        return inline(payload)
    large[len(large)] = payload
    return len(large) - 1
