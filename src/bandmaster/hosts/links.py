"""The controller's links to the agents of other hosts, which all its groups share."""

from __future__ import annotations

import contextlib
import itertools
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from bandmaster.contract import CLOSED
from bandmaster.errors import BandmasterError, ClosedError, ResourceError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import NO_ANSWER, FrameKind, Link, Message
from bandmaster.hosts.rows import RowKey, RowLinks
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.limits import start_thread
from bandmaster.platform.settings import host_timeout_s
from bandmaster.wire.client import Client, MessageTicket
from bandmaster.wire.poller import Poller

BEAT_S = 1.0  # how often a thread looks whether the hosts are there
SILENCE_S = 2.0  # after which a host that owes a reply is asked for a sign of life


class RemoteGroup(Protocol):
    """A group that has ranks on other hosts, as links need to know it. The lock is held in each method."""

    def take_replies(self, message: Message) -> None:
        """Take replies of ranks on a host."""

    def take_deaths(self, deaths: Mapping[int, Failure]) -> None:
        """Take the deaths of ranks."""

    def host_is_lost(self, agent: Agent, why: str) -> None:
        """Take the end of the agent of a host, and of all ranks with it."""

    def is_owed(self, agent: Agent) -> bool:
        """Whether ranks of a host owe a reply."""


class Agent:
    """The agent of one host, on the controller's side.

    Attributes:
        link: The link to it.
        key: The key of the agent among those of this controller.
        host: Name of its host.
        address: The address at which it listens.
        pid: Its process, on its host.
        groups: The groups that have ranks on its host.
        lost: Why it is gone; None as long as it is not.
        kept: Keys of rows that futures of this controller refer to.
        released: Keys of rows that nothing refers to any more, and that it was not told of.
        pinged_at: When it was asked for a sign of life.
    """

    def __init__(self, link: Link, key: Hashable, host: str, address: tuple[str, int], pid: int) -> None:
        self.link, self.key, self.host, self.address, self.pid = link, key, host, address, pid
        self.groups: dict[str, RemoteGroup] = {}
        self.lost: str | None = None
        self.kept: set[RowKey] = set()
        self.released: deque[RowKey] = deque()
        self.pinged_at = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether a group has ranks on its host, or a future rows."""
        return bool(self.groups or self.kept)

    def await_end(self, timeout_s: float) -> None:
        """Wait until its process, which was killed, has ended."""
        poll = select.poll()
        if self.lost is None:
            poll.register(self.link.fileno(), select.POLLRDHUP)
            poll.poll(timeout_s * 1000)

    def __repr__(self) -> str:
        return f"<agent on {self.host} ({self.address[0]}:{self.address[1]}, pid {self.pid})>"


class AgentLinks(Client):
    """All links of a controller, and the questions that agents have not answered. Any thread may call it.

    Attributes:
        secret: The secret that agents know.
        agents: The agents, by their keys.
        row_links: Connections to them that rows are fetched by.
        poller: Waits for what arrives over all links.
        numbers: The numbers of calls and questions.
        relays: Called with each call that a worker has the controller make by way of an agent, and with None when an
            agent is lost; the lock is held.

    Args:
        release: Ends the agents that are not needed. A thread calls it again and again as long as there is one.
        poller: Waits for more than the links; by default it is theirs.
    """

    relays: ClassVar[list[Callable[[AgentLinks, Agent, Message | None], object]]] = []

    def __init__(self, release: Callable[[], object] = lambda: None, poller: Poller | None = None) -> None:
        self.poller, self.numbers = poller or Poller(), itertools.count(1)
        super().__init__(self.poller, self.numbers)
        self.secret = Secret.new()
        self.agents: dict[Hashable, Agent] = {}
        self.row_links = RowLinks(self.secret)
        self._release = release
        self._stop_beating: threading.Event | None = None  # of the thread that looks whether hosts are there

    def add(self, agent: Agent) -> None:
        """Serve a new link; the lock is held. Raises ResourceError if there can be no thread that looks after it."""
        self.agents[agent.key] = agent
        self._open[id(agent)] = {}
        agent.link.serve(self.poller, partial(self._take, agent), partial(self.lose, agent))
        if self._stop_beating is None:
            self._stop_beating = threading.Event()
            try:
                start_thread("bandmaster-heartbeat", self._beat, self._stop_beating)
            except ResourceError:
                self.lose(agent)
                raise

    def close(self) -> None:
        """Close all links."""
        with self.lock:
            for agent in list(self.agents.values()):
                self.lose(agent)
            self.row_links.close()
            self.poller.close()

    # --- sending ---

    def send(self, agent: Agent, kind: FrameKind, *content: Any, large: Mapping[int, Any] | None = None) -> None:
        """Send a message, or its beginning; `flush` sends the rest. The lock is held."""
        if agent.released:
            agent.link.post(FrameKind.RELEASE, [agent.released.popleft() for _ in range(len(agent.released))])
        agent.link.post(kind, *content, large=large or {})

    def tell(self, agent: Agent, kind: FrameKind, *content: Any, large: Mapping[int, Any] | None = None) -> None:
        """Send a message, unless the link has ended; the poller has the rest sent."""
        with self.lock:
            self.send(agent, kind, *content, large=large)

    def flush(self, agents: Sequence[Agent]) -> None:
        """Wait until all was sent to some agents; one that takes nothing for too long is lost."""
        began = time.monotonic()

        def late(waiting: Sequence[Agent]) -> list[Agent]:
            since = time.monotonic() - host_timeout_s()
            return [agent for agent in waiting if max(began, agent.link.heard_at) < since]

        while any(agent.lost is None and agent.link.has_unsent for agent in agents):
            with self.lock:  # Ctrl-C comes when it is left
                waiting = [agent for agent in agents if agent.lost is None and agent.link.has_unsent]
                if waiting:
                    self.poller.receive(BEAT_S)
                if late(waiting):  # this process may have been suspended, and have sent nothing itself
                    self.poller.receive_all()
                for agent in late(waiting):
                    self.lose(agent, f"it has taken nothing for {host_timeout_s():g} s")

    def ask(self, agent: Agent, question: Callable[..., object], *args: Any) -> MessageTicket:
        """Have an agent call a method of its `AgentServer`; `answers` waits for what that returns."""
        ticket = MessageTicket(next(self.numbers))
        with self.lock:
            if agent.lost is None:
                self.send(agent, FrameKind.ASK, ticket.number, question, *args)
            if agent.lost is None:
                self._open[id(agent)][ticket.number] = ticket
            else:
                self._finish(ticket, _gone(agent))
        self.flush([agent])
        return ticket

    def answers(self, tickets: Sequence[MessageTicket], timeout_s: float | None = None) -> list[Any]:
        """The answers of agents.

        Raises:
            TimeoutError: They have not answered in time.
            Exception: That of the first that has failed; ClosedError if it is gone.
        """
        deadline = Deadline(timeout_s)
        for ticket in tickets:  # one by one: the failure of another one must not end the wait for this one
            while not ticket.is_done:
                if deadline.left() == 0.0:
                    raise TimeoutError(f"an agent has not answered within {timeout_s:g} s")
                self.wait([ticket], deadline.left())
        outcomes = [ticket.outcome for ticket in tickets]
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                is_gone = outcome.kind is FailureKind.DIED
                raise outcome.exception or (ClosedError if is_gone else RuntimeError)(outcome.summary)
        return outcomes

    # --- receiving; the lock is held ---

    def check(self) -> None:
        """Take everything that has arrived."""
        with self.lock:
            self.poller.receive_all()

    def _take(self, agent: Agent, message: Message) -> None:
        kind, content, _ = message
        group = agent.groups.get(content[0]) if kind in (FrameKind.REPLIES, FrameKind.DEATHS) else None
        if kind == FrameKind.REPLIES and group is not None:
            group.take_replies(message)
        elif kind == FrameKind.DEATHS and group is not None:
            group.take_deaths(content[1])
        elif kind == FrameKind.OUTPUT:
            from bandmaster.output.screen import show

            show(content[0])
        elif kind == FrameKind.ANSWER:
            ticket = self._open[id(agent)].pop(content[0], None)
            if ticket is not None:
                self._finish(ticket, content[1])
        elif kind == FrameKind.RELAY:
            self.relays[0](self, agent, message)
        elif kind == FrameKind.CUT:
            for other in [one for one in self.agents.values() if one.address == content[0]]:
                self.lose(other, f"host {agent.host} cannot pass calls on to it any more: {content[1]}")

    def lose(self, agent: Agent, why: str = CLOSED) -> None:
        """Take the end of an agent, or close the link to it."""
        if agent.lost is not None:
            return
        agent.lost = why
        self.poller.ignore(agent.link.fileno())
        if self.agents.get(agent.key) is agent:
            del self.agents[agent.key]
        agent.link.close()
        self._fail_open(id(agent), _gone(agent))
        del self._open[id(agent)]
        for group in list(agent.groups.values()):
            group.host_is_lost(agent, why)
        for take in self.relays:
            take(self, agent, None)
        if not self.agents and self._stop_beating is not None:
            self._stop_beating.set()
            self._stop_beating = None
            self.row_links.close()

    # --- signs of life ---

    def _beat(self, is_over: threading.Event) -> None:
        """Ask hosts for signs of life while they owe replies, and tell them of rows that are not needed any more."""
        while not is_over.wait(BEAT_S):
            with contextlib.suppress(BandmasterError), self.lock:
                self.poller.receive_all()  # before anything is concluded: no thread may have waited for what has come
                for agent in list(self.agents.values()):
                    self._look_after(agent)
            if not all(agent.is_needed for agent in list(self.agents.values())):
                self._release()

    def _look_after(self, agent: Agent) -> None:
        now, limit_s = time.monotonic(), host_timeout_s()
        silent_s = now - agent.link.heard_at
        is_owed = bool(self._open[id(agent)]) or any(group.is_owed(agent) for group in agent.groups.values())
        is_asked = agent.pinged_at > agent.link.heard_at
        if agent.link.is_cut:
            self.lose(agent, NO_ANSWER)
        elif is_owed and is_asked and silent_s >= limit_s - BEAT_S and now - agent.pinged_at >= limit_s / 2:
            self.lose(agent, f"it has given no sign of life for {silent_s:.0f} s")
        elif agent.released or (is_owed and not is_asked and silent_s >= SILENCE_S):
            agent.pinged_at = now
            self.send(agent, FrameKind.PING)


def _gone(agent: Agent) -> Failure:
    return Failure(FailureKind.DIED, f"the agent on {agent.host} is gone: {agent.lost}")
