"""The controller's links to the agents of other hosts, which all its groups share."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bandmaster.codec import Payload
from bandmaster.contract import CLOSED
from bandmaster.errors import BandmasterError, ClosedError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import Frame, Link
from bandmaster.hosts.messages import Kind, dumped
from bandmaster.hosts.row_links import RowLinks
from bandmaster.platform.limits import start_thread
from bandmaster.wire.channel import Closed
from bandmaster.wire.poller import HAS_ROOM, Event, Poller
from bandmaster.wire.receiver import ChannelTicket, Receiver

__all__ = ["Agent", "Fabric", "host_timeout_s"]

BEAT_S = 1.0  # how often somebody looks whether the hosts are there
IDLE_S = 3.0  # after which links are closed that rows were fetched by
SILENCE_S = 2.0  # after which a host that owes a reply is asked for a sign of life


def host_timeout_s() -> float:
    """Seconds without a sign of life after which a host is lost: ``BANDMASTER_HOST_TIMEOUT``, 10 by default."""
    return float(os.environ.get("BANDMASTER_HOST_TIMEOUT", "10"))


class Group(Protocol):
    """What a link needs to know of a group."""

    def take_replies(
        self, agent: Agent, replies: Sequence[Any], payloads: Sequence[Any], chunks: Sequence[Any]
    ) -> None:
        """Replies of ranks on a host; the lock is held."""

    def take_deaths(self, deaths: Mapping[int, Failure]) -> None:
        """Ranks have died; the lock is held."""

    def host_is_lost(self, agent: Agent, why: str) -> None:
        """The agent of a host is gone, and all ranks with it; the lock is held."""

    def has_pending(self, agent: Agent) -> bool:
        """Whether ranks of a host owe a reply."""


class Agent:
    """The agent of one host, as the controller sees it.

    Attributes:
        link: The link to it.
        key: What identifies it among the agents of this controller.
        host: Name of its host.
        address: Where it listens.
        pid: Its process, on its host.
        groups: The groups that have ranks on its host.
        lost: Why it is gone; None as long as it is not.
        kept: Numbers of rows that futures of this controller refer to.
        released: Numbers of rows that nobody refers to any more, and that it was not told of.
        awaits_release: Whether it is to end as soon as it is not needed.
    """

    def __init__(self, link: Link, key: Hashable, host: str, address: tuple[str, int], pid: int) -> None:
        self.link, self.key, self.host, self.address, self.pid = link, key, host, address, pid
        self.groups: dict[str, Group] = {}
        self.lost: str | None = None
        self.kept: set[int] = set()
        self.released: deque[int] = deque()
        self.awaits_release = False
        self.asked: dict[int, ChannelTicket] = {}
        self.pinged_at = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether a group has ranks on its host, or a future rows."""
        return bool(self.groups or self.kept)

    def await_end(self, timeout_s: float) -> None:
        """Wait until its process has ended, which somebody has killed."""
        poll = select.poll()
        if self.lost is None:
            poll.register(self.link.fileno(), select.POLLRDHUP)
            poll.poll(timeout_s * 1000)

    def __repr__(self) -> str:
        return f"<agent on {self.host} ({self.address[0]}:{self.address[1]}, pid {self.pid})>"


class Fabric(Receiver):
    """All links of a controller. Any thread may call it.

    Attributes:
        secret: What agents know.
        agents: The agents, by their keys.
        row_links: Links to them that rows are fetched by.

    Args:
        let_go: Ends the agents that are not needed; called from a thread, some time after one has become so that awaits
            its release.
    """

    def __init__(self, let_go: Callable[[], object] = lambda: None) -> None:
        super().__init__(Poller())
        self.secret = Secret.new()
        self.agents: dict[Hashable, Agent] = {}
        self.row_links = RowLinks(self.secret)
        self._by_fd: dict[int, Agent] = {}
        self._numbers = itertools.count(1)
        self._let_go = let_go
        self._heart: threading.Thread | None = None
        self._stop_beating = threading.Event()

    def numbered(self) -> int:
        """A number for a call or a question."""
        return next(self._numbers)

    @property
    def poller(self) -> Poller:
        """Where all that arrives is waited for."""
        return self._poller

    def add(self, agent: Agent) -> None:
        """Serve a new link."""
        with self.lock:
            self.agents[agent.key] = agent
            self._by_fd[agent.link.fileno()] = agent
            self._poller.watch(agent.link.fileno())
            if self._heart is None:
                self._stop_beating.clear()
                self._heart = start_thread("bandmaster-heartbeat", self._beat, self._stop_beating)

    def remove(self, agent: Agent) -> None:
        """Close a link."""
        with self.lock:
            self._lose(agent, CLOSED)

    def close(self) -> None:
        """Close all links."""
        for agent in list(self.agents.values()):
            self.remove(agent)
        self.row_links.close()
        with self.lock:
            self._poller.close()

    # --- sending ---

    def send(self, agent: Agent, content: tuple[Any, ...], chunks: Sequence[Any] = ()) -> None:
        """Send a frame, or its beginning; `flush` sends the rest. The lock is held."""
        if agent.lost is not None:
            return
        try:
            if agent.released:
                agent.link.send(dumped((Kind.RELEASE, _drained(agent.released))))
            agent.link.send(dumped(content), chunks)
        except Closed as error:
            self._lose(agent, str(error))

    def flush(self, agents: Sequence[Agent]) -> None:
        """Wait until all was sent to some agents; one that takes nothing for too long is lost."""
        waiting = self._unsent(agents)
        while waiting:
            poll = select.poll()
            for fd in [agent.link.fileno() for agent in waiting]:
                if fd >= 0:  # else it was lost just now
                    poll.register(fd, select.POLLOUT)
            if not poll.poll(host_timeout_s() * 1000):
                with self.lock:
                    for agent in waiting:
                        self._lose(agent, f"it has taken nothing for {host_timeout_s():g} s")
            waiting = self._unsent(waiting)

    def _unsent(self, agents: Sequence[Agent]) -> list[Agent]:
        if not any(agent.link.has_unsent for agent in agents):
            return []
        with self.lock:
            return [agent for agent in agents if agent.lost is None and not self._pump(agent)]

    def _pump(self, agent: Agent) -> bool:
        try:
            return agent.link.pump()
        except Closed as error:
            self._lose(agent, str(error))
            return True

    def ask(self, agent: Agent, what: str, *args: Any) -> ChannelTicket:
        """Ask an agent for something; `answers` waits for what it says."""
        ticket = ChannelTicket(self.numbered())
        with self.lock:
            if agent.lost is None:
                agent.asked[ticket.number] = ticket
                self.send(agent, (Kind.ASK, ticket.number, what, *args))
            if agent.lost is not None:
                self._finish(ticket, Failure(FailureKind.DIED, f"the agent on {agent.host} is gone: {agent.lost}"))
        self.flush([agent])
        return ticket

    def answers(self, tickets: Sequence[ChannelTicket], timeout_s: float | None = None) -> list[Any]:
        """What agents have answered.

        Raises:
            TimeoutError: They have not in time.
            Exception: That of the first that has failed; ClosedError if it is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for ticket in tickets:  # one by one: the failure of another one must not end the wait for this one
            while not ticket.is_done:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"an agent has not answered within {timeout_s:g} s")
                self.wait([ticket], left)
        outcomes = [ticket.outcome for ticket in tickets]
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise outcome.exception or ClosedError(outcome.summary)
        return [None if outcome is None else pickle.loads(outcome.head) for outcome in outcomes]  # type: ignore[union-attr]

    # --- receiving ---

    def check(self) -> None:
        """Take what has arrived."""
        with self.lock:
            self._receive_all()

    def _receive(self, ready: Sequence[Event]) -> None:
        if not ready:
            return
        try:
            for fd, events in ready:
                agent = self._by_fd.get(fd)
                if agent is not None and events != HAS_ROOM:
                    self._receive_from(agent)
        finally:
            self._poller.wake_if_blocked()

    def _receive_from(self, agent: Agent) -> None:
        try:
            while agent.lost is None and (frame := agent.link.receive()) is not None:
                self._take(agent, frame)
        except Closed as error:
            self._lose(agent, str(error))

    def _take(self, agent: Agent, frame: Frame) -> None:
        content = pickle.loads(frame.head)
        kind = content[0]
        if kind == Kind.REPLIES:
            group = agent.groups.get(content[1])
            if group is not None:
                group.take_replies(agent, content[2], content[3], frame.chunks)
        elif kind == Kind.DEATHS:
            group = agent.groups.get(content[1])
            if group is not None:
                group.take_deaths({rank: revived(failure) for rank, failure in content[2].items()})
        elif kind == Kind.OUTPUT:
            from bandmaster.output.screen import show

            show(content[1])
        elif kind == Kind.ANSWER:
            _, number, is_error, pickled = content
            ticket = agent.asked.pop(number, None)
            if ticket is not None:
                self._finish(ticket, _error(pickled) if is_error else Payload(pickled))

    def _lose(self, agent: Agent, why: str) -> None:
        """An agent is gone; the lock is held."""
        if agent.lost is not None:
            return
        agent.lost = why
        fd = agent.link.fileno()
        self._poller.ignore(fd)
        del self._by_fd[fd]
        if self.agents.get(agent.key) is agent:
            del self.agents[agent.key]
        agent.link.close()
        for ticket in agent.asked.values():
            self._finish(ticket, Failure(FailureKind.DIED, f"the agent on {agent.host} is gone: {why}"))
        agent.asked.clear()
        for group in list(agent.groups.values()):
            group.host_is_lost(agent, why)
        if not self.agents:
            self._stop_beating.set()
            self._heart, self._stop_beating = None, threading.Event()
            self.row_links.close_idle(0.0)  # which the heartbeat did
        self._poller.wake_if_blocked()

    # --- signs of life ---

    def _beat(self, is_over: threading.Event) -> None:
        """Ask hosts for signs of life while they owe replies, and tell them of rows that nobody needs."""
        while not is_over.wait(BEAT_S):
            with contextlib.suppress(BandmasterError), self.lock:
                self._receive_all()  # before anything is concluded: nobody may have waited for what has come
                for agent in list(self.agents.values()):
                    self._look_after(agent)
            self.row_links.close_idle(IDLE_S)
            if any(agent.awaits_release and not agent.is_needed for agent in list(self.agents.values())):
                self._let_go()

    def _look_after(self, agent: Agent) -> None:
        now, limit_s = time.monotonic(), host_timeout_s()
        silent_s = now - agent.link.heard_at
        is_owed = bool(agent.asked) or any(group.has_pending(agent) for group in agent.groups.values())
        is_asked = agent.pinged_at > agent.link.heard_at
        if is_owed and is_asked and silent_s >= limit_s - BEAT_S and now - agent.pinged_at >= limit_s / 2:
            self._lose(agent, f"it has given no sign of life for {silent_s:.0f} s")
        elif agent.released or (is_owed and not is_asked and silent_s >= SILENCE_S):
            agent.pinged_at = now
            self.send(agent, (Kind.PING,))


def link_of(sock: Any, keys: Any) -> Link:
    """The controller's end of a link."""
    return Link(sock, keys, _unwritten)


def _unwritten(_: bytes, sizes: Sequence[int]) -> list[memoryview]:
    """Memory for chunks, which is not cleared first."""
    return [np.empty(size, np.uint8).data for size in sizes]


def revived(pickled: bytes) -> Failure:
    """A failure that has travelled."""
    try:
        failure: Failure = pickle.loads(pickled)
    except BaseException as error:  # the user's exceptions may do anything when they are unpickled
        return Failure.of(error)
    return failure


def _error(pickled: bytes) -> Failure:
    try:
        return Failure(FailureKind.RAISED, "an agent could not do what it was asked for", "", pickle.loads(pickled))
    except BaseException as error:
        return Failure.of(error)


def _drained(numbers: deque[int]) -> list[int]:
    found = []
    with contextlib.suppress(IndexError):
        while True:
            found.append(numbers.popleft())
    return found
