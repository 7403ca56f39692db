"""The workers of a group that are called by way of the agents of their hosts, on the controller's side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import finalize

from bandmaster.codec import Payload
from bandmaster.contract import CLOSED, NOT_STARTED, Kept, Launch, Signs, Ticket, WorkerCall, WorkerRecord
from bandmaster.errors import ClosedError, PlacementError, ResourceError, RowsLost
from bandmaster.errors.failure import REPLACED, Failure, FailureKind
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.link import FrameKind, Message
from bandmaster.hosts.links import Agent, AgentLinks
from bandmaster.hosts.rows import Fetch, PendingFetch, RowKey
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.forks import n_forks, of_parent
from bandmaster.platform.settings import tree_from
from bandmaster.rows.table import united
from bandmaster.wire.client import Client, MessageTicket
from bandmaster.wire.messages import (
    INLINE_NBYTES,
    CallContent,
    KeptElsewhere,
    MessageKind,
    call_message,
    control_message,
    inline,
)

STACKS_TIMEOUT_S = 1.5  # more than a host itself may take
Ranks = tuple[int, ...] | None  # None for all that the group has on a host


class FarRows(KeptElsewhere):
    """Rows that lie on another host; see `bandmaster.contract.Kept`.

    Attributes:
        agent: The agent of that host.
        key: The key of the rows.
        place: ``"network"``.
    """

    place = "network"

    def __init__(self, agent: Agent, links: AgentLinks, key: RowKey, described: Payload) -> None:
        super().__init__(described)
        self.agent, self.key, self._n_forks = agent, key, n_forks()
        self._links = links.row_links
        self._copies: set[Agent] = set()  # of other hosts, which may have rows of these
        self._pending: list[PendingFetch] = []  # fetches that were not waited for to their ends
        agent.kept.add(key)
        finalize(self, _release, agent, key, self._copies).atexit = False

    def fetch_to(self, agent: Agent, rows: Any) -> Fetch:
        """The fetch by which a host gets some rows unless it has them: calls may come to it by several ways."""
        self._copies.add(agent)
        return self._fetch(rows)

    def payload(self, timeout_s: float | None = None) -> Payload:
        """The encoded rows, in memory of the reader's own. They go on coming if they have not come in time."""
        if self._n_forks != n_forks():  # whose threads fetch them
            raise of_parent(f"the connection to {self.origin}")
        if self.agent.lost is not None:
            raise RowsLost(
                f"{self.origin} are gone (host {self.agent.host} is lost: {self.agent.lost}); make them again"
            )
        try:
            pending = self._pending.pop()
        except IndexError:
            pending = self._links.fetch(self._fetch(range(self.facts.n_rows)))
        try:
            if not wait([pending], timeout_s).done:
                raise TimeoutError
        except BaseException:
            self._pending.append(pending)
            raise
        try:
            return pending.result()
        except RowsLost as error:
            raise RowsLost(f"{error}; make them again") from None

    def _fetch(self, rows: Any) -> Fetch:
        n_rows = self.facts.n_rows
        rows = rows if len(rows) < n_rows else range(n_rows)  # which is small in messages
        return Fetch(self.agent.address, self.key, str(self.origin), rows, n_rows)


def _release(agent: Agent, key: RowKey, copies: Iterable[Agent]) -> None:
    agent.kept.discard(key)
    for other in (agent, *copies):
        other.released.append(key)


class _Large(NamedTuple):
    """A large payload that was passed to `AgentWorkers.put`.

    Attributes:
        key: The number by which messages name it.
        payload: The payload.
    """

    key: int
    payload: Payload


class _Outgoing:
    """The calls for one host.

    Attributes:
        calls: The ranks and the message of each call.
        large: The large payloads that they name, by number.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Ranks, bytes]] = []
        self.large: dict[int, Payload] = {}
        self._wanted: dict[FarRows, Any] = {}

    def add(self, ranks: Ranks, message: bytes, parts: Sequence[Any]) -> None:
        """Add a call."""
        self.calls.append((ranks, message))
        for part in parts:
            if type(part) is _Large:
                self.large[part.key] = part.payload

    def want(self, rows: FarRows, numbers: Any) -> None:
        """Some ranks of the host need these rows of another one."""
        before = self._wanted.get(rows)
        self._wanted[rows] = numbers if before is None else united(before, numbers)

    def fetches(self, agent: Agent) -> list[Fetch]:
        """The rows that the host has to fetch, unless it has them."""
        return [rows.fetch_to(agent, wanted) for rows, wanted in self._wanted.items()]


class _FromAgent:
    """The end of a link that has received replies of a group; see `bandmaster.wire.messages.Receiver`."""

    def __init__(self, agents: Sequence[Agent], links: AgentLinks, message: Message) -> None:
        self._agents, self._links = agents, links
        self.unpack = message.unpack

    def kept(self, key: RowKey, described: Payload) -> FarRows:
        """The rows that a rank has left on its host, which may have replied through another one."""
        return FarRows(self._agents[key[1]], self._links, key, described)


class AgentWorkers(Client):
    """The workers of one group, on several hosts or on another one.

    Attributes:
        name: Name of the group, which no other group of this controller has.
        links: The links.
        agents: The agent of each rank.
        records: Host, process and device of each rank; handles are `WorkerProcess` objects.

    Args:
        name: As the attribute.
        links: As the attribute.
        agents: As the attribute.
    """

    def __init__(self, name: str, links: AgentLinks, agents: Sequence[Agent]) -> None:
        super().__init__(links.poller, links.numbers)
        self.name, self.links = name, links
        self.agents = list(agents)
        self._open = {rank: {} for rank in range(len(agents))}
        self._requests = {rank: {} for rank in range(len(agents))}
        self.records: list[WorkerRecord] = []
        self._told: Callable[[Sequence[int]], Any]
        self._again: Callable[[int], Agent] | None = None
        self._rendezvous: Mapping[str, str] = {}
        self._relay_of: Mapping[Agent, Agent] = {}  # by which agent the messages of each go, if in a tree
        self._relays: Sequence[Agent] = ()  # those that pass calls on to all others, as long as none was lost
        self._why_stopped: str | None = None

    def hold_agents(self) -> None:
        """Have the agents stay until `stop`, which the caller calls whatever happens."""
        with self.lock:
            for agent in self.hosts:
                agent.groups[self.name] = self

    @property
    def hosts(self) -> list[Agent]:
        """The agents of the group, each once."""
        return list(dict.fromkeys(self.agents))

    def ranks_on(self, agent: Agent) -> tuple[int, ...]:
        """The ranks on a host."""
        return tuple([rank for rank, other in enumerate(self.agents) if other is agent])

    # --- sending ---

    def put(self, payloads: Sequence[Payload | Kept]) -> Sequence[Any]:
        """Make parts of payloads: small ones as they are, others with a number; see `contract.Workers.put`."""
        return list(map(self._part, payloads))

    def _part(self, payload: Payload | Kept) -> Any:
        if isinstance(payload, FarRows):
            return payload
        if not isinstance(payload, Payload):
            payload = payload.payload()
        return inline(payload) if payload.nbytes <= INLINE_NBYTES else _Large(next(self._numbers), payload)

    def call(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls, one message to each host; see `contract.Workers.call`."""
        outgoing: dict[Agent, _Outgoing] = {}
        with self.lock:
            if self._why_stopped is not None:
                raise ClosedError(self._why_stopped)
            relays = self._relays_of(calls)
            for call in calls:
                self._add(call, tickets, outgoing, relays)
            for agent, mine in outgoing.items():
                self._send_calls(agent, mine, bool(relays), tickets.items())
        self.links.flush(self.hosts if self._relay_of else list(outgoing))

    def request(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        """Send requests to a rank; see `contract.Workers.request`."""
        agent, outgoing = self.agents[rank], _Outgoing()
        with self.lock:
            tickets = self._new_requests(rank, len(requests), take)
            if tickets:
                content = []
                for call, ticket in zip(requests, tickets, strict=True):
                    ticket.holds = [part for _, part in call.rows if type(part) is FarRows]
                    self._want(outgoing, agent, call, (rank,))
                    content.append((ticket.number, _content_of(call), call.is_timed))
                message = control_message(MessageKind.REQUESTS, content)[4:]
                outgoing.add((rank,), message, [part for call in requests for part in _parts_of(call)])
                self._send_calls(agent, outgoing, False, [(rank, ticket) for ticket in tickets])
        self.links.flush(self.hosts if self._relay_of else [agent])

    def _send_calls(
        self, agent: Agent, outgoing: _Outgoing, is_passed_on: bool, tickets: Iterable[tuple[int, MessageTicket]]
    ) -> None:
        """Send calls or requests to a host. If their message is too large, all tickets, given with ranks, end."""
        content = self.name, outgoing.calls, outgoing.fetches(agent), is_passed_on
        try:
            self._send(agent, FrameKind.CALLS, *content, large=outgoing.large)
        except ResourceError as error:
            for rank, ticket in tickets:
                self.fail_one(rank, ticket, Failure.of(error))
            raise

    def _relays_of(self, calls: Sequence[WorkerCall]) -> Sequence[Agent]:
        """The agents of a large group that pass a call on, if it is the same for all ranks."""
        is_same = len(calls) == 1 and not calls[0].rows and len(calls[0].ranks) == len(self.agents)
        return self._relays if is_same and not self.deaths else ()

    def _send(self, agent: Agent, kind: FrameKind, *content: Any, large: Mapping[int, Payload] | None = None) -> None:
        """Send a message to an agent, through its relay if it has one; the lock is held."""
        relay = self._relay_of.get(agent, agent)
        if relay is agent:
            self.links.send(agent, kind, *content, large=large)
        else:
            self.links.send(relay, FrameKind.FORWARD, agent.address, kind, content, large=large)

    def _add(
        self, call: WorkerCall, tickets: dict[int, Any], outgoing: dict[Agent, _Outgoing], relays: Sequence[Agent]
    ) -> None:
        """Add a call to the messages for its hosts; the lock is held."""
        number = next(self._numbers)
        ranks = tuple(self._living(call.ranks, number, tickets) if self.deaths else call.ranks)
        if not ranks:
            return
        holds = [part for _, part in call.rows if type(part) is FarRows]
        for rank in ranks:
            self._open[rank][number] = tickets[rank] = ticket = MessageTicket(number)
            if holds:
                ticket.holds = holds
        message = call_message(number, _content_of(call), call.is_timed, call.is_fenced)[4:]
        for agent, mine in [(relay, None) for relay in relays] or self._route(ranks):
            for_host = outgoing.setdefault(agent, _Outgoing())
            for_host.add(mine, message, _parts_of(call))
            if any(held.agent is not agent for held in holds):
                self._want(for_host, agent, call, self.ranks_on(agent) if mine is None else mine)

    def _want(self, outgoing: _Outgoing, agent: Agent, call: WorkerCall, ranks: Sequence[int]) -> None:
        """Note the rows that the ranks of a host need and that lie on another one."""
        needed = None if call.needed is None else call.needed(ranks)
        for label, rows in call.rows:
            if type(rows) is FarRows and rows.agent is not agent and (needed is None or label in needed):
                outgoing.want(rows, range(rows.facts.n_rows) if needed is None else needed[label])

    def _route(self, ranks: tuple[int, ...]) -> list[tuple[Agent, Ranks]]:
        """For each host, the ranks of a call on it."""
        if len(ranks) == len(self.agents):
            return [(agent, None) for agent in self.hosts]
        by_agent: dict[Agent, list[int]] = {}
        for rank in ranks:
            by_agent.setdefault(self.agents[rank], []).append(rank)
        return [(agent, tuple(mine)) for agent, mine in by_agent.items()]

    # --- receiving ---

    def check(self, is_thorough: bool = True) -> bool:
        """Take everything that has arrived: the agents tell of deaths by themselves. False once `stop` was called."""
        self.links.check()
        return self._why_stopped is None

    def take_replies(self, message: Message) -> None:
        """Take replies of ranks on a host; see `links.RemoteGroup`."""
        receiver = _FromAgent(self.agents, self.links, message)
        for ranks, body in message.content[1]:
            self._take_reply(ranks, body, receiver)

    def take_deaths(self, deaths: Mapping[int, Failure]) -> None:
        """Take the deaths of ranks; see `links.RemoteGroup`."""
        for rank, failure in deaths.items():
            known = self.records[rank].pid if self.records else 0
            if rank not in self.deaths or failure.pid not in (0, known):  # a new process has died as well
                self.deaths[rank] = failure
                self._fail_open(rank, failure)
        self.reports.on_change()

    def host_is_lost(self, agent: Agent, why: str) -> None:
        """Take the end of a host; see `links.RemoteGroup`."""
        found = {}
        for rank in self.ranks_on(agent):
            known = self.records[rank] if self.records else WorkerRecord("", 0, "", "", bool)
            summary = f"host {agent.host} ({agent.address[0]}) is lost: {why}"
            found[rank] = Failure.of_death(summary, "", agent.host, known.pid, known.device)
        self.take_deaths(found)
        below = {other for other, relay in self._relay_of.items() if relay is agent}
        words = f"its reply was lost with host {agent.host}, which passes calls on to its host"
        for rank in [rank for rank, other in enumerate(self.agents) if other in below]:
            # Rows of these replies may be there; a reply that is still to come says so, and is released as it comes.
            self.agents[rank].released += [(number, rank) for number in (*self._open[rank], *self._requests[rank])]
            self._fail_open(rank, Failure(FailureKind.DIED, words))
        # Others are sent the next messages directly, so that the next host that is lost does not take them along, but
        # not those that may still be passed on what was sent before.
        self._relays = ()
        self._relay_of = {
            other: relay for other, relay in self._relay_of.items() if relay.lost is None and self.is_owed(other)
        }

    def is_owed(self, agent: Agent) -> bool:
        """Whether ranks of a host owe a reply; see `links.RemoteGroup`."""
        return any(self._open[rank] or self._requests[rank] for rank in self.ranks_on(agent))

    # --- interrupting ---

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Interrupt calls, or end their ranks; see `contract.Workers.interrupt`."""
        by_agent = self._numbers_of(_unanswered(tickets))
        if kill_because is None:
            self._tell(FrameKind.INTERRUPT, by_agent)
        else:
            self._settle([self._ask(agent, AgentServer.kill, said, kill_because) for agent, said in by_agent.items()])

    def resume(self, tickets: Mapping[int, Any]) -> None:
        """Let ranks begin their next calls; see `contract.Workers.resume`."""
        with self.lock:
            for agent, numbers in self._numbers_of(tickets).items():  # directly: a relay may be lost with it
                self.links.send(agent, FrameKind.RESUME, self.name, numbers)
        self.links.flush(self.hosts)

    def _tell(self, kind: FrameKind, by_agent: Mapping[Agent, Mapping[int, int | None]]) -> None:
        """Tell each agent something of calls of its ranks."""
        with self.lock:
            for agent, numbers in by_agent.items():
                self._send(agent, kind, self.name, numbers)
        self.links.flush(self.hosts)

    def _ask(self, agent: Agent, question: Callable[..., object], *args: Any) -> MessageTicket:
        return self.links.ask(agent, question, self.name, *args)

    def _answer(self, agent: Agent, question: Callable[..., object], *args: Any) -> Any:
        return self.links.answers([self._ask(agent, question, *args)])[0]

    def _settle(self, asked: Sequence[MessageTicket]) -> None:
        for ticket in asked:
            with suppress(ClosedError):  # the host is lost, and with it the ranks
                self.links.answers([ticket])

    def stacks(self, tickets: Mapping[int, Any]) -> dict[int, str]:
        """The stacks of ranks, of all hosts at the same time; see `contract.Workers.stacks`."""
        return self._from_hosts(AgentServer.stacks, self._numbers_of(_unanswered(tickets)))

    def signs(self, ranks: Sequence[int]) -> dict[int, Signs]:
        """The signs of life of ranks; see `contract.Workers.signs`."""
        return self._from_hosts(AgentServer.signs, self._numbers_of(dict.fromkeys(ranks)))

    def _from_hosts(
        self, question: Callable[..., object], by_agent: Mapping[Agent, Mapping[int, int | None]]
    ) -> dict[int, Any]:
        """Ask agents about ranks; returns their answers as one dict, without the ranks of hosts that do not answer."""
        asked = [self._ask(agent, question, numbers) for agent, numbers in by_agent.items()]
        found: dict[int, Any] = {}
        deadline = Deadline(STACKS_TIMEOUT_S)
        for ticket in asked:
            with suppress(TimeoutError, ClosedError, ResourceError):
                found.update(self.links.answers([ticket], deadline.left())[0])
        return found

    def _numbers_of(self, tickets: Mapping[int, Any]) -> dict[Agent, dict[int, int | None]]:
        by_agent: dict[Agent, dict[int, int | None]] = {}
        for rank, ticket in tickets.items():
            numbers = by_agent.setdefault(self.agents[rank], {})
            numbers[rank] = None if ticket is None else ticket.number
        return by_agent

    # --- workers that come and go ---

    def begin(
        self, launch: Launch, said: Callable[[Sequence[int]], Any], again: Callable[[int], Agent] | None = None
    ) -> None:
        """Have each agent start its part of the group; if one fails, all of it is ended.

        Args:
            launch: The group.
            said: Returns the request to an agent to start some ranks.
            again: Returns an agent in place of one that is gone, for a rank that is to be replaced.

        Raises:
            PlacementError: An agent is gone.
            Exception: That of an agent.
        """
        self._told, self._again = said, again
        try:
            asked = [self._ask(agent, AgentServer.start, said(self.ranks_on(agent))) for agent in self.hosts]
            found: dict[int, WorkerRecord] = {}
            for agent, (records, rendezvous) in zip(self.hosts, self.links.answers(asked), strict=True):
                found.update(zip(self.ranks_on(agent), records, strict=True))
                self._rendezvous = rendezvous or self._rendezvous
            self.records = [found[rank]._replace(channel="link") for rank in range(len(self.agents))]
            self._announce(but=self.agents[0])
            if len(self.hosts) >= tree_from():
                self._form_tree()
        except BaseException as error:
            self.stop(NOT_STARTED)
            if isinstance(error, ClosedError):
                raise PlacementError(f"group {launch.group!r} cannot be started: {error}; start it again") from error
            raise

    def _announce(self, but: Agent) -> None:
        """Tell the agents that are not lost where the rendezvous is, but for one, which knows."""
        others = [agent for agent in self.hosts if agent is not but and agent.lost is None]
        if self._rendezvous:
            self.links.answers([self._ask(agent, AgentServer.announce, self._rendezvous) for agent in others])

    def _form_tree(self) -> None:
        """Have some agents pass calls on to others."""
        hosts, n_relays = self.hosts, math.ceil(math.sqrt(len(self.hosts)))
        blocks = [hosts[at::n_relays] for at in range(n_relays)]
        asked = []
        for relay, *below in blocks:
            n_ranks = sum(len(self.ranks_on(agent)) for agent in below)
            asked.append(self._ask(relay, AgentServer.relay, [agent.address for agent in below], n_ranks))
        self.links.answers(asked)
        with self.lock:
            self._relays = [block[0] for block in blocks]
            self._relay_of = {agent: block[0] for block in blocks for agent in block}

    def replace(self, rank: int) -> None:
        """Replace a rank; if its agent is gone, another one starts it. See `contract.Workers.replace`."""
        agent = self.agents[rank]
        with self.lock:
            self.take_deaths({rank: Failure(FailureKind.DIED, REPLACED)})
        if agent.lost is not None and self._again is not None:
            agent = self._again(rank)
            with self.lock:  # before it starts the rank: it stays until `stop`, which ends that
                if self._why_stopped is not None:
                    raise ClosedError(self._why_stopped)
                self.agents[rank] = agent
                agent.groups[self.name] = self
        record, rendezvous = self._answer(agent, AgentServer.replace, rank, next(self._numbers), self._told([rank]))
        if rank == 0:
            self._rendezvous = rendezvous
            with suppress(ClosedError):  # a host is lost, as the next call of its ranks says
                self._announce(but=agent)
        elif self._rendezvous != rendezvous:
            self._answer(agent, AgentServer.announce, self._rendezvous)
        with self.lock:
            self.records[rank] = record._replace(channel="link")
            self.reports.pop(rank, None)
            if self._why_stopped is not None:
                raise ClosedError(self._why_stopped)
            if agent.lost is None and self.deaths[rank].pid != record.pid:  # else the new process has died already
                del self.deaths[rank]  # last: after Ctrl-C before that, it is dead

    def stop(self, why: str = CLOSED) -> None:
        """End the workers; see `contract.Workers.stop`."""
        self.links.check()  # what has arrived was answered before
        with self.lock:
            if self._why_stopped is None:
                self._why_stopped = why
                self.take_deaths({rank: Failure(FailureKind.DIED, why) for rank in range(len(self.agents))})
            hosts = [agent for agent in self.hosts if self.name in agent.groups]  # all, unless Ctrl-C has come between
        asked = [self._ask(agent, AgentServer.stop, why) for agent in hosts]
        self._settle(asked)
        with self.lock:
            for agent, ticket in zip(hosts, asked, strict=True):
                if agent.lost is None:
                    agent.released.extend(key for key in ticket.outcome or () if key not in agent.kept)
                agent.groups.pop(self.name, None)


def _parts_of(call: WorkerCall) -> list[Any]:
    return [*call.parts, *[part for _, part in call.rows]]


def _content_of(call: WorkerCall) -> CallContent:
    """The content of a message with a call."""
    names = [part if type(part) is tuple else part.key for part in _parts_of(call)]
    rows = [(label, name) for (label, _), name in zip(call.rows, names[len(call.parts) :], strict=True)]
    return call.method, int(call.reply), names[: len(call.parts)], rows, None


def _unanswered(tickets: Mapping[int, Any]) -> dict[int, Any]:
    """Of some calls, by rank, those without a reply; None stands for whatever the rank is doing."""
    return {rank: ticket for rank, ticket in tickets.items() if ticket is None or not ticket.is_done}
