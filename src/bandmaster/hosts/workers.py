"""The workers of a group that are called by way of the agents of their hosts, on the controller's side."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import finalize

from bandmaster.codec import Payload
from bandmaster.contract import CLOSED, NOT_STARTED, Call, Kept, Launch, RowFacts, WorkerProcess, WorkerRecord
from bandmaster.errors import ClosedError, PlacementError, RowsLost
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.links import Agent, Fabric, revived
from bandmaster.hosts.messages import Kind, Packed, dumped, unpacked
from bandmaster.hosts.row_links import Fetch, in_memory
from bandmaster.rows.table import contains, united
from bandmaster.wire.messages import ReplyKind
from bandmaster.wire.receiver import ChannelTicket, Receiver

__all__ = ["AgentWorkers", "FarRows"]

STACKS_TIMEOUT_S = 1.0
TREE_FROM = int(os.environ.get("BANDMASTER_TREE_FROM", "32"))  # hosts of a group, from which on agents form a tree
_OF_EACH: Any = object()  # an outcome that ranks do not share
Said = tuple[str, int, str]  # host, pid and device of a rank


class FarRows:
    """Rows that lie on another host; see `bandmaster.contract.Kept`.

    Attributes:
        agent: The agent of that host.
        number: The number by which it knows them.
        facts: What is known of the rows.
        place: ``"network"``.
        origin: What messages call them.
    """

    place = "network"

    def __init__(self, agent: Agent, fabric: Fabric, number: int, facts: RowFacts) -> None:
        self.agent, self.number, self.facts = agent, number, facts
        self.origin: object = "rows"
        self._links, self._numbered = fabric.row_links, fabric.numbered
        self._copies: dict[Agent, list[tuple[int, Any]]] = {}  # on other hosts: their numbers, and which rows they have
        self._coming: list[Future[Payload]] = []  # what was not waited for to its end
        agent.kept.add(number)
        finalize(self, _release, agent, number, self._copies).atexit = False

    def copy_on(self, agent: Agent, rows: Any) -> tuple[int, Any] | None:
        """The number of a copy on a host that has some rows, and which it has; None if there is none."""
        copies = self._copies.get(agent, ())
        return next((copy for copy in copies if contains(copy[1], rows)), None)

    def fetch_to(self, agent: Agent, rows: Any) -> tuple[Fetch, Any]:
        """What a host needs to know to fetch some rows, and the numbers of those that it then has."""
        copies, n_rows = self._copies.setdefault(agent, []), self.facts.n_rows
        if sum(len(there) for _, there in copies) + len(rows) > n_rows:  # else a host could have many times all rows
            agent.released.extend(number for number, _ in copies)
            copies.clear()
            rows = range(n_rows)
        copy = -self._numbered(), rows
        copies.append(copy)
        wanted = None if len(rows) == n_rows else rows
        return Fetch(self.agent.address, self.number, str(self.origin), wanted, copy[0]), rows

    def forget_copies(self, agent: Agent) -> None:
        """A host could not fetch the rows."""
        self._copies.pop(agent, None)

    def payload(self, timeout_s: float | None = None) -> Payload:
        """The encoded rows, in memory of the reader's own. They go on coming if they have not come in time."""
        if self.agent.lost is not None:
            raise RowsLost(
                f"{self.origin} are gone (host {self.agent.host} is lost: {self.agent.lost}); make them again"
            )
        try:
            coming = self._coming.pop()
        except IndexError:
            fetch = Fetch(self.agent.address, self.number, str(self.origin), None, 0)
            coming = self._links.fetch(fetch, in_memory)
        try:
            if not wait([coming], timeout_s).done:
                raise TimeoutError
        except BaseException:
            self._coming.append(coming)
            raise
        try:
            return coming.result()
        except RowsLost as error:
            raise RowsLost(f"{error}; make them again") from None


def _release(agent: Agent, number: int, copies: Mapping[Agent, Sequence[tuple[int, Any]]]) -> None:
    agent.released.append(number)
    agent.kept.discard(number)
    for other, held in copies.items():
        other.released.extend(copy for copy, _ in held)


class Part:
    """A payload or kept rows that were passed to `AgentWorkers.put`."""

    __slots__ = ("_copy", "kept", "payload")

    def __init__(self, value: Payload | Kept) -> None:
        self.payload = value if isinstance(value, Payload) else None
        self.kept = None if isinstance(value, Payload) else value
        self._copy: Payload | None = None

    def sent(self) -> Payload:
        """What is sent of it."""
        if self.payload is not None:
            return self.payload
        if self._copy is None:
            assert self.kept is not None, "it is the one or the other"
            self._copy = self.kept.payload()
        return self._copy


def _nothing_said(_: Sequence[int]) -> bytes:
    raise AssertionError("the group has not begun")


def _unanswered(tickets: Mapping[int, Any]) -> dict[int, Any]:
    """Of some calls, by rank, those without a reply; None stands for whatever the rank is doing."""
    return {rank: ticket for rank, ticket in tickets.items() if ticket is None or not ticket.is_done}


def _is_lost(ticket: ChannelTicket) -> bool:
    return isinstance(ticket.outcome, Failure) and ticket.outcome.kind is FailureKind.LOST


class _Outgoing:
    """What a call sends to one host.

    Attributes:
        entries: The calls.
        packed: The payloads that they name.
        wanted: The rows of other hosts that they need, by identity.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.entries: list[Any] = []
        self.packed = Packed()
        self.wanted: dict[int, tuple[FarRows, Any]] = {}

    def want(self, kept: FarRows, rows: Any) -> None:
        """Some ranks of the host need these rows."""
        before = self.wanted.get(id(kept))
        self.wanted[id(kept)] = kept, rows if before is None else united(before[1], rows)

    def fetches(self) -> tuple[list[tuple[Any, ...]], dict[int, tuple[Any, Any]]]:
        """What the host has to fetch; by identity of the rows, their place and which of them are there."""
        fetches, places = [], {}
        for key, (kept, rows) in self.wanted.items():
            copy = kept.copy_on(self._agent, rows)
            if copy is None:
                fetch, there = kept.fetch_to(self._agent, rows)
                fetches.append(tuple(fetch))
                copy = fetch.copy, there
            is_all = len(copy[1]) == kept.facts.n_rows
            places[key] = ("shelf", copy[0]), None if is_all else copy[1]
        return fetches, places

    def frame(self, group: str) -> tuple[tuple[Any, ...], list[Any]]:
        """The frame, and its chunks."""
        fetches, places = self.fetches()
        said = []
        for number, ranks, call, parts in self.entries:
            rows = tuple([(label, *place) for label, part in call.rows if (place := self._place(part, places))])
            said.append((number, ranks, call.method, parts, call.how, rows))
        return (Kind.CALL, group, said, self.packed.table, fetches, False), self.packed.chunks

    def _place(self, part: Part, places: Mapping[int, tuple[Any, Any]]) -> tuple[Any, Any] | None:
        """Where the host finds rows, and which of them are there; None if its ranks need none of these."""
        if isinstance(part.kept, FarRows):
            here = ("shelf", part.kept.number), None
            return here if part.kept.agent is self._agent else places.get(id(part.kept))
        return ("table", self.packed.add(part.sent())), None


class AgentWorkers(Receiver):
    """The workers of one group, on several hosts or on another one.

    Attributes:
        deaths: The ranks whose processes are known to have ended, and how.
        ranks_are_own: True.

    Args:
        name: Name of the group, which no other group of this controller has.
        fabric: The links.
        agents: The agent of each rank.
    """

    ranks_are_own = True

    def __init__(self, name: str, fabric: Fabric, agents: Sequence[Agent]) -> None:
        super().__init__(fabric.poller)
        self.name, self._fabric = name, fabric
        self._agents = list(agents)
        self._records: list[Said] = []
        self._names: Sequence[str] = ()
        self._told: Callable[[Sequence[int]], bytes] = _nothing_said
        self._again: Callable[[int], Agent] | None = None
        self._rendezvous: Mapping[str, str] = {}
        self._pending: dict[int, dict[int, ChannelTicket]] = {}  # by number of the call, and rank
        self._fetching: dict[int, list[tuple[FarRows, Agent]]] = {}  # by number of the call
        self._holding: dict[int, Sequence[Part]] = {}  # kept rows that calls take, which agents must not release before
        self._relay_of: Mapping[Agent, Agent] | None = None  # by which agent the frames of each go, if not by itself
        self._why_stopped: str | None = None
        self._routes: dict[tuple[int, ...], list[tuple[Agent, tuple[int, ...] | None]]] = {}
        with self.lock:
            for agent in self.hosts:
                agent.groups[name] = self

    @property
    def hosts(self) -> list[Agent]:
        """The agents of the group, each once."""
        return list(dict.fromkeys(self._agents))

    def ranks_on(self, agent: Agent) -> tuple[int, ...]:
        """The ranks on a host."""
        return tuple([rank for rank, other in enumerate(self._agents) if other is agent])

    # --- sending ---

    def put(self, payloads: Sequence[Payload | Kept]) -> Sequence[Part]:
        """As `contract.Workers.put`: calls send them."""
        parts = [Part(payload) for payload in payloads]
        for part in parts:
            if part.kept is not None and not isinstance(part.kept, FarRows):
                part.sent()
        return parts

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """As `contract.Workers.call`: one frame to each host."""
        frames: dict[Agent, _Outgoing] = {}
        with self.lock:
            if self._why_stopped is not None:
                raise ClosedError(self._why_stopped)
            for call in calls:
                if not (len(calls) == 1 and self._send_to_all(call, tickets)):
                    self._add(call, tickets, frames)
            for agent, outgoing in frames.items():
                self._send(agent, *outgoing.frame(self.name))
        self._fabric.flush(list(frames) if self._relay_of is None else self.hosts)

    def _send(self, agent: Agent, content: tuple[Any, ...], chunks: Sequence[Any] = ()) -> None:
        """Send a frame to an agent, by way of the one that all its frames go by; the lock is held."""
        relay = agent if self._relay_of is None else self._relay_of[agent]
        if relay is agent:
            self._fabric.send(agent, content, chunks)
        else:
            self._fabric.send(relay, (Kind.FORWARD, self.name, agent.address, dumped(content)), chunks)

    def _send_to_all(self, call: Call, tickets: dict[int, Any]) -> bool:
        """Send a call that is the same for all ranks of a large group to a few agents, which pass it on.

        Returns:
            Whether it could be sent so; the lock is held.
        """
        if self._relay_of is None or self.deaths or call.rows or len(call.ranks) < len(self._agents):
            return False
        number, packed = self._fabric.numbered(), Packed()
        self._pending[number] = made = {rank: ChannelTicket(number) for rank in call.ranks}
        tickets.update(made)
        parts = tuple([packed.add(part.sent()) for part in call.parts])
        entries = [(number, None, call.method, parts, call.how, ())]
        for relay in dict.fromkeys(self._relay_of.values()):
            self._fabric.send(relay, (Kind.CALL, self.name, entries, packed.table, [], True), packed.chunks)
        return True

    def _add(self, call: Call, tickets: dict[int, Any], frames: dict[Agent, _Outgoing]) -> None:
        """Add a call to the frames of its hosts; the lock is held."""
        number = self._fabric.numbered()
        ranks = tuple(call.ranks)
        made = {rank: ChannelTicket(number) for rank in ranks}
        tickets.update(made)
        if self.deaths:
            for rank in [rank for rank in ranks if rank in self.deaths]:
                self._finish(made.pop(rank), self.deaths[rank])
            ranks = tuple(made)
            if not ranks:
                return
        self._pending[number] = made
        for agent, mine in self._route(ranks):
            outgoing = frames.get(agent)
            if outgoing is None:
                outgoing = frames[agent] = _Outgoing(agent)
            parts = tuple([outgoing.packed.add(part.sent()) for part in call.parts])
            outgoing.entries.append((number, mine, call, parts))
            if call.rows:
                self._holding[number] = [part for _, part in call.rows]
                self._want(outgoing, agent, call, mine, number)

    def _want(self, outgoing: _Outgoing, agent: Agent, call: Call, ranks: tuple[int, ...] | None, number: int) -> None:
        """Note the rows that the ranks of a host need and that lie on another one."""
        far = [
            (label, part.kept)
            for label, part in call.rows
            if isinstance(part.kept, FarRows) and part.kept.agent is not agent
        ]
        if far:
            on_host = self.ranks_on(agent) if ranks is None else ranks
            needed = call.needed(on_host) if call.needed is not None else None
            for label, kept in far:
                if needed is None or label in needed:
                    outgoing.want(kept, range(kept.facts.n_rows) if needed is None else needed[label])
                    self._fetching.setdefault(number, []).append((kept, agent))

    def _route(self, ranks: tuple[int, ...]) -> list[tuple[Agent, tuple[int, ...] | None]]:
        """For each host, the ranks of a call on it; None for all that the group has there."""
        known = self._routes.get(ranks)
        if known is None:
            by_agent: dict[Agent, list[int]] = {}
            for rank in ranks:
                by_agent.setdefault(self._agents[rank], []).append(rank)
            known = [
                (agent, None if tuple(mine) == self.ranks_on(agent) else tuple(mine))
                for agent, mine in by_agent.items()
            ]
            if len(self._routes) < 1000:
                self._routes[ranks] = known
        return known

    # --- receiving ---

    def _receive(self, ready: Sequence[Any]) -> None:
        self._fabric._receive(ready)

    def check(self, is_thorough: bool = True) -> bool:
        """As `contract.Workers.check`: the agents tell of deaths by themselves."""
        self._fabric.check()
        return self._why_stopped is None

    def take_replies(self, agent: Agent, replies: Sequence[Any], table: Sequence[Any], chunks: Sequence[Any]) -> None:
        """As `fabric.Group.take_replies`."""
        now, payloads = time.monotonic_ns(), unpacked(table, chunks)
        for number, ranks, kind, content, times in replies:
            pending = self._pending.get(number)
            if pending is None:
                continue
            outcome = None if kind == ReplyKind.NOTHING else Payload(content) if kind == ReplyKind.VALUE else _OF_EACH
            for rank in ranks:
                ticket = pending.pop(rank, None)
                if ticket is None:
                    continue
                if times is not None:
                    ticket.times = times, now
                if outcome is _OF_EACH:
                    self._finish(ticket, self._outcome(self._agents[rank], kind, content, payloads))
                else:  # as most are
                    ticket.outcome, ticket.is_done = outcome, True
                    if ticket.on_done is not None:
                        ticket.on_done()
                if number in self._fetching and _is_lost(ticket):
                    for kept, other in self._fetching[number]:
                        kept.forget_copies(other)
            self._forget_if_over(number)

    def _forget_if_over(self, number: int) -> None:
        if not self._pending[number]:
            del self._pending[number]
            self._fetching.pop(number, None)
            self._holding.pop(number, None)

    def _outcome(self, agent: Agent, kind: int, content: Any, payloads: Sequence[Payload]) -> Any:
        if kind == ReplyKind.PART:
            return payloads[content]
        if kind == ReplyKind.ROWS:
            return FarRows(agent, self._fabric, content[0], RowFacts(*content[1]))
        return revived(content)

    def take_deaths(self, deaths: Mapping[int, Failure]) -> None:
        """As `fabric.Group.take_deaths`."""
        for rank, failure in deaths.items():
            if rank not in self.deaths:
                self.deaths[rank] = failure
                for number, pending in list(self._pending.items()):
                    ticket = pending.pop(rank, None)
                    if ticket is not None:
                        self._finish(ticket, failure)
                    self._forget_if_over(number)
        self._poller.wake_if_blocked()

    def host_is_lost(self, agent: Agent, why: str) -> None:
        """As `fabric.Group.host_is_lost`."""
        found = {}
        for rank in self.ranks_on(agent):
            _, pid, device = self._records[rank] if self._records else ("", 0, "")
            summary = f"host {agent.host} ({agent.address[0]}) is lost: {why}"
            found[rank] = Failure.of_death(summary, "", agent.host, pid, device)
        self.take_deaths(found)
        if self._relay_of is not None:
            self._fail_what_went_by(agent)
            self._relay_of = None  # the rest of this group's life: who dies next must not take others along

    def _fail_what_went_by(self, relay: Agent) -> None:
        """The replies to calls that a lost agent has passed on to others will not come."""
        assert self._relay_of is not None, "the caller has looked"
        others = {agent for agent, by in self._relay_of.items() if by is relay}
        why = f"its reply was lost with host {relay.host}, which passes calls on to its host"
        for number, pending in list(self._pending.items()):
            for rank in [rank for rank in pending if self._agents[rank] in others]:
                self._finish(pending.pop(rank), Failure(FailureKind.CANCELLED, why))
            self._forget_if_over(number)

    def has_pending(self, agent: Agent) -> bool:
        """As `fabric.Group.has_pending`."""
        return any(self._agents[rank] is agent for pending in self._pending.values() for rank in pending)

    # --- interrupting ---

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """As `contract.Workers.interrupt`."""
        by_agent = self._numbers(_unanswered(tickets))
        if kill_because is None:
            self._tell(Kind.INTERRUPT, by_agent)
        else:
            asked = [self._fabric.ask(agent, "kill", self.name, said, kill_because) for agent, said in by_agent.items()]
            self._settled(asked)

    def resume(self, tickets: Mapping[int, Any]) -> None:
        """As `contract.Workers.resume`."""
        self._tell(Kind.RESUME, self._numbers(tickets))

    def _tell(self, kind: Kind, by_agent: Mapping[Agent, Mapping[int, int | None]]) -> None:
        """Tell each agent something of calls of its ranks."""
        with self.lock:
            for agent, numbers in by_agent.items():
                self._send(agent, (kind, self.name, numbers))
        self._fabric.flush(self.hosts)

    def _settled(self, asked: Sequence[ChannelTicket]) -> None:
        for ticket in asked:
            with suppress(ClosedError):  # the host is lost, and with it the ranks
                self._fabric.answers([ticket])

    def stacks(self, tickets: Mapping[int, Any]) -> dict[int, str]:
        """As `contract.Workers.stacks`: of all hosts at the same time."""
        by_agent = self._numbers(_unanswered(tickets))
        asked = [self._fabric.ask(agent, "stacks", self.name, numbers) for agent, numbers in by_agent.items()]
        found: dict[int, str] = {}
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        for ticket in asked:
            try:
                (said,) = self._fabric.answers([ticket], max(0.0, deadline - time.monotonic()))
                found.update(said)
            except (TimeoutError, ClosedError):
                continue  # a host that does not answer has no stacks to show
        return found

    def _numbers(self, tickets: Mapping[int, Any]) -> dict[Agent, dict[int, int | None]]:
        by_agent: dict[Agent, dict[int, int | None]] = {}
        for rank, ticket in tickets.items():
            numbers = by_agent.setdefault(self._agents[rank], {})
            numbers[rank] = None if ticket is None else ticket.number
        return by_agent

    # --- workers that come and go ---

    def begin(
        self, launch: Launch, said: Callable[[Sequence[int]], bytes], again: Callable[[int], Agent] | None = None
    ) -> None:
        """Have each agent start its part of the group; if one fails, all of it is ended.

        Args:
            launch: The group.
            said: What an agent is told to start some ranks.
            again: Returns an agent in place of one that is gone, for a rank that is to be replaced.

        Raises:
            PlacementError: An agent is gone.
            Exception: What an agent raises.
        """
        self._names, self._told, self._again = launch.worker_names, said, again
        try:
            asked = [self._fabric.ask(agent, "start", self.name, said(self.ranks_on(agent))) for agent in self.hosts]
            found: dict[int, Said] = {}
            for agent, (records, rendezvous) in zip(self.hosts, self._fabric.answers(asked), strict=True):
                found.update(zip(self.ranks_on(agent), records, strict=True))
                self._rendezvous = rendezvous or self._rendezvous
            self._records = [found[rank] for rank in range(len(self._agents))]
            self._announce(but=self._agents[0])
            if len(self.hosts) >= TREE_FROM:
                self._form_tree()
        except BaseException as error:
            self.stop(NOT_STARTED)
            if isinstance(error, ClosedError):
                raise PlacementError(f"group {launch.group!r} cannot be started: {error}; start it again") from error
            raise

    def _announce(self, but: Agent) -> None:
        """Tell the agents that are not lost where the rendezvous is, but for one, which knows."""
        others = [agent for agent in self.hosts if agent is not but and agent.lost is None]
        if self._rendezvous and others:
            self._fabric.answers([self._fabric.ask(agent, "announce", self.name, self._rendezvous) for agent in others])

    def _form_tree(self) -> None:
        """Have some agents pass calls on to others."""
        hosts, n_relays = self.hosts, math.ceil(math.sqrt(len(self.hosts)))
        blocks = [hosts[at::n_relays] for at in range(n_relays)]
        asked = []
        for relay, *below in blocks:
            n_ranks = sum(len(self.ranks_on(agent)) for agent in below)
            asked.append(self._fabric.ask(relay, "relay", self.name, [agent.address for agent in below], n_ranks))
        self._fabric.answers(asked)
        with self.lock:
            self._relay_of = {agent: block[0] for block in blocks for agent in block}

    def replace(self, rank: int) -> None:
        """As `contract.Workers.replace`; if the agent of the rank is gone, another one starts it."""
        agent = self._agents[rank]
        if agent.lost is not None and self._again is not None:
            agent = self._again(rank)
            ((record,), rendezvous) = self._answer(agent, "start", self._told([rank]))
        else:
            record, rendezvous = self._answer(agent, "replace", rank)
        with self.lock:
            agent.groups[self.name] = self
            self._agents[rank], self._records[rank] = agent, record
            self._routes.clear()
            self.deaths.pop(rank, None)
        if rank == 0:
            self._rendezvous = rendezvous
            self._announce(but=agent)
        elif self._rendezvous != rendezvous:
            self._answer(agent, "announce", self._rendezvous)

    def _answer(self, agent: Agent, what: str, *args: Any) -> Any:
        return self._fabric.answers([self._fabric.ask(agent, what, self.name, *args)])[0]

    @property
    def records(self) -> list[WorkerRecord]:
        """As `contract.Workers.records`; handles are `WorkerProcess` objects."""
        return [
            WorkerRecord(host, pid, device, "link", partial(WorkerProcess, name, rank, host, pid))
            for rank, (name, (host, pid, device)) in enumerate(zip(self._names, self._records, strict=True))
        ]

    def stop(self, why: str = CLOSED) -> None:
        """As `contract.Workers.stop`."""
        with self.lock:
            if self._why_stopped is not None:
                return
            self._why_stopped = why
            hosts = self.hosts
            self.take_deaths(
                {rank: Failure(FailureKind.DIED, why) for rank in range(len(self._agents)) if rank not in self.deaths}
            )
        self._settled([self._fabric.ask(agent, "stop", self.name, why) for agent in hosts])
        with self.lock:
            for agent in hosts:
                agent.groups.pop(self.name, None)
