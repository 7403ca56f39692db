"""`ReachedWorkers`: the workers of a group, reached from another worker by lanes that a door hands out, or links.

::

    ReachedWorkers ── lanes ──► ranks on this host
         └── FarRanks, for each other host ── link ──► agent ── HostRanks, for each caller ── lanes ──► ranks there
"""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from socket import gethostname
from typing import Any, NamedTuple, NoReturn

from bandmaster.codec import Payload
from bandmaster.contract import CLOSED, NOT_CONSTRUCTED, Kept, Ticket, WorkerCall, WorkerRecord
from bandmaster.errors import ClosedError, ResourceError, UsageError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.handshake import Refused, Secret
from bandmaster.hosts.link import Address, FrameKind, Purpose, connect
from bandmaster.hosts.links import Agent, AgentLinks
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.settings import agents_door
from bandmaster.wire.client import MessageTicket
from bandmaster.wire.lane import set_buffer
from bandmaster.wire.lanes import LaneClient
from bandmaster.wire.status_page import N_SLOTS
from bandmaster.worker_process.call_path import Process, Step

ANSWER_S = 30.0  # for the controller to answer, whose Python code may run without a pause
SETTLE_S = 5.0  # for the controller to learn of a death
AGAIN_S = 0.2  # for it to say that a rank is back, while the tasks of this process wait
ANSWER_NBYTES = 64 * 1024
# The answers of a door: with a process, a `FarPlace`, a failure, and reasons; or that there is none yet.
READY, FAR, DIED, SHUT, MOVED, NOTHING = "ready", "far", "died", "shut", "moved", "nothing"
WAIT = "wait"  # the rank lives, and has much to do: another answer follows
REPLACED = "its process has ended, or was replaced"
ELSEWHERE = "its group was restarted on other hosts"


_counts: dict[int, Iterator[int]] = {}  # by process, as forks go on with the modules


def _numbers() -> Iterator[int]:
    """The numbers of all messages of this process, which no other process of this host uses at the same time."""
    pid = os.getpid()
    return _counts.setdefault(pid, itertools.count((pid << 32) + pid % N_SLOTS))  # not all in the same slot of a page


class Asked(NamedTuple):
    """The question of a worker at a door.

    Attributes:
        group: The key of a group, or "" for the controller itself, which relays calls.
        rank: The rank of the group.
        but: The process or place that is known, and gone: the next one is asked for.
    """

    group: str
    rank: int
    but: object = None


class FarPlace(NamedTuple):
    """The place of a rank on another host.

    Attributes:
        address: The address of the agent there.
        host: Name of the host.
        group: The name by which the agent knows the group.
        pid: The process of the rank.
        secret: The secret of the agent; None where it is known.
    """

    address: Address
    host: str
    group: str
    pid: int
    secret: Secret | None


class ReachedWorkers(LaneClient):
    """The workers of a group that was given to this process; see `bandmaster.contract.Workers`.

    Attributes:
        records: Empty: the controller has them.
        name: The name of the group.

    Args:
        door: The address of the door of this host, or that of the controller, which need not be on this host.
        group: The key of the group there, or "" for the controller itself.
        n_ranks: The number of its ranks.
        name: Its name, for messages.
    """

    records: Sequence[WorkerRecord] = ()

    def __init__(self, door: str, group: str, n_ranks: int, name: str) -> None:
        super().__init__(lambda _: Failure(FailureKind.DIED, CLOSED), _numbers())
        self._door, self._group, self.name = door, group, name
        self._process: dict[int, int | FarPlace] = {}  # of ranks, as the door has said it
        self._links: AgentLinks | None = None  # to the agents of other hosts
        self._far: dict[int, FarRanks] = {}
        self._is_asking = False
        self._later: dict[int, Failure | None] = {}  # deaths that came meanwhile
        self._dead: dict[int, socket.socket] = {}  # at the door, which tells of the next process of a rank
        self._is_own: bool | None = None  # whether this process is one of the ranks, once that is known
        for rank in range(n_ranks):
            self._open[rank], self._requests[rank] = {}, {}
            self._clear(rank)

    # --- calls ---

    def put(self, payloads: Sequence[Payload | Kept]) -> list[Any]:
        """Leave payloads as they are: how they travel depends on the rank."""
        return list(payloads)

    def request(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        """Send requests to a rank; see `contract.Workers.request`."""
        self._reach((rank,))
        client: Any = self._far.get(rank) or super()
        client.request(rank, [_placed(call, client.put) for call in requests], take)

    def call(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls, each to one rank; see `contract.Workers.call`."""
        self._reach([rank for call in calls for rank in call.ranks])
        for call in calls:
            client: Any = self._far.get(call.ranks[0]) or super()
            client.call([_placed(call, client.put)], tickets)

    def interrupt(self, tickets: Mapping[int, MessageTicket], kill_because: str | None = None) -> None:
        """Interrupt calls; see `contract.Workers.interrupt`. Only the controller ends processes."""
        if kill_because is None:
            super().interrupt({rank: ticket for rank, ticket in tickets.items() if rank not in self._far})
            for rank, ticket in tickets.items():
                if (far := self._far.get(rank)) is not None:
                    far.interrupt({rank: ticket})

    def wake(self) -> None:
        """Have threads that wait for requests look at them."""
        self._poller.wake()

    def stacks(self, tickets: Mapping[int, MessageTicket]) -> dict[int, str]:
        """The stacks of ranks on this host; see `contract.Workers.stacks`."""
        return super().stacks({rank: ticket for rank, ticket in tickets.items() if rank not in self._far})

    def replace(self, rank: int) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"only the controller can replace a rank of group {self.name!r}")

    def stop(self, why: str = CLOSED) -> None:
        """Hang up on the workers, which go on."""
        self.close(why)

    def processes_for(self, path: Sequence[Step]) -> Mapping[int, Process]:
        """The processes of the ranks, among which there may be one that waits for a call with this path."""
        if len(path) > 1 or (path and self._is_own is None):
            self.reach_all()
            self._is_own = os.getpid() in self._process.values()
        here = gethostname() if len(path) > 1 or self._is_own else ""
        known = self._process.items() if here else ()
        return {rank: (here, said) if isinstance(said, int) else (said.host, said.pid) for rank, said in known}

    # --- lanes and links ---

    def reach_all(self) -> None:
        """Have lanes or links to all ranks that are not known as dead."""
        self._reach([rank for rank in self._open if rank not in self._dead])

    def _reach(self, ranks: Sequence[int]) -> None:
        """Have lanes or links to ranks."""
        with self.lock:
            self._poller.receive_all()  # a rank may have died, or come back, while no thread waited for any
            for rank in ranks:
                is_known = rank in self._lanes or rank in self._far or rank in self.deaths
                waiting = self._dead.get(rank)
                if self.is_stopped or (is_known and waiting is None):
                    continue
                # Also about a dead one, as the door may tell of its return later; but briefly, while others wait.
                sock, answer, said = self._ask(rank, timeout_s=ANSWER_S if waiting is None else AGAIN_S)
                if waiting is not None and answer == NOTHING:
                    sock.close()
                    continue
                if waiting is not None:
                    del self._dead[rank]
                    self._poller.ignore(waiting.fileno())
                    waiting.close()
                self._enter(rank, sock, answer, said)

    def _enter(self, rank: int, sock: socket.socket, answer: str, said: Any) -> None:
        """Take an answer of the door: a lane, a place, a death, or the end of the group; the lock is held."""
        if answer == READY:
            self._process[rank] = said
            self.add(rank, sock, said)
        elif answer == FAR and rank not in self._lanes:
            sock.close()
            self._process[rank] = said
            self._add_far(rank, said)
        elif answer in (DIED, NOTHING):
            self._poller.watch(sock.fileno(), partial(self._is_back, rank, sock))  # there may be a new process later
            self._fail(rank, said)
            if answer == DIED:
                self._dead[rank], self.deaths[rank] = sock, said
        else:
            sock.close()
            why = ELSEWHERE if answer == FAR else said
            for one in self._open:
                self._fail(one, closed(why) if answer == SHUT else Failure(FailureKind.DIED, why))
            self._close(why)

    def _add_far(self, rank: int, place: FarPlace) -> None:
        """Have a link to a rank on another host, or take it for dead as long as the door knows no other place."""
        self._links = self._links or AgentLinks(poller=self._poller)
        try:
            self._far[rank] = far = FarRanks.at(place, self._links, self, len(self._open))
        except (OSError, Refused) as error:
            self._fail(rank, Failure(FailureKind.DIED, f"host {place.host} cannot be reached: {error}"))
            self._enter(rank, *self._ask(rank, but=place, timeout_s=0.0))
            return
        for known in (self.deaths, self.reports, far.deaths):
            known.pop(rank, None)

    def far_has_died(self, ranks: FarRanks, rank: int, failure: Failure | None) -> None:
        """Take the death of a rank on another host, and how it died, if that is known; the lock is held."""
        if self._far.get(rank) is ranks:
            self.note_death(rank, failure)

    def _is_back(self, rank: int, sock: socket.socket, _: int) -> None:
        """Take the news of a rank that has died."""
        self._poller.ignore(sock.fileno())
        self._dead.pop(rank, None)
        self._enter(rank, *_answer(sock, 0.0, self.name))

    def _ask(self, rank: int, but: object = None, timeout_s: float = ANSWER_S) -> tuple[socket.socket, str, Any]:
        """Ask the door for a rank, or its next process. Returns the socket, which becomes the lane, and the answer."""
        with SigintSafeLock():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            set_buffer(sock)
            sock.settimeout(ANSWER_S)
            self._connect(sock)
            sock.send(pickle.dumps(Asked(self._group, rank, but)))
        except ConnectionError:
            why = "it was closed, or its controller has ended"
            return sock, SHUT, f"group {self.name!r} cannot be reached from {gethostname()}: {why}"
        except OSError as error:
            sock.close()
            raise ResourceError(f"cannot reach rank {rank} of group {self.name!r}: {error}") from error
        return _answer(sock, timeout_s, self.name)

    def _connect(self, sock: socket.socket) -> None:
        """Connect to the door, or to that of the agent of this host if the door is on another one."""
        try:
            sock.connect(f"\0{self._door}")
        except ConnectionRefusedError:
            others = agents_door()
            if others is None:
                raise
            sock.connect(f"\0{others}")

    def note_death(self, rank: int, failure: Failure | None = None) -> None:
        """Ask the controller how a rank has died, whose lane has ended, or that an agent tells of; the lock is held."""
        if rank in self.deaths or self.is_stopped:
            return
        if self._is_asking:
            self._later[rank] = failure
            return
        self._is_asking = True  # what follows may come back here
        try:
            wait_s = SETTLE_S if failure is None else 0.0
            sock, answer, said = self._ask(rank, self._process[rank], wait_s)
            if answer in (READY, FAR, NOTHING):
                self._fail(rank, failure or Failure(FailureKind.DIED, REPLACED))
            self._enter(rank, sock, answer, said)
        finally:
            self._is_asking = False
        while self._later:
            self.note_death(*self._later.popitem())

    def _fail(self, rank: int, failure: Failure) -> None:
        """Note a death, and fail what was sent to the rank."""
        super().note_death(rank, failure)
        far = self._far.pop(rank, None)
        if far is not None:
            far.fail(rank, failure)

    def _close(self, why: str) -> None:
        for rank in list(self._far):
            self._fail(rank, Failure(FailureKind.DIED, why))
        super()._close(why)
        self._dead.clear()
        if (links := self._links) is not None:
            for agent in list(links.agents.values()):
                links.lose(agent, why)


class FarRanks(AgentWorkers):
    """The ranks of a group on one other host. It is made while the lock of the links is held.

    Args:
        place: The place of one of them.
        links: The links of the workers of the whole group.
        agent: The agent there.
        owner: These workers.
        n_ranks: The number of ranks of the group.
    """

    def __init__(self, place: FarPlace, links: AgentLinks, agent: Agent, owner: ReachedWorkers, n_ranks: int) -> None:
        super().__init__(place.group, links, [agent] * n_ranks)
        self.reports, self._owner = owner.reports, owner
        agent.groups[place.group] = self
        links.send(agent, FrameKind.CALLS, place.group, [], [], False)  # so that it tells of reports and deaths

    @classmethod
    def at(cls, place: FarPlace, links: AgentLinks, owner: ReachedWorkers, n_ranks: int) -> FarRanks:
        """The ranks at a place, to which there is a link from here on.

        Raises:
            Refused, OSError: The agent there cannot be reached.
        """
        for _ in range(2):  # as a link may turn out to have ended
            agent = links.agents.get(place.address)
            if agent is None:
                assert place.secret is not None, "the door has told it"
                link = connect(place.address, place.secret, Purpose.CALLERS)
                agent = Agent(link, place.address, place.host, place.address, 0)
                links.add(agent)
            known = agent.groups.get(place.group)
            ranks = known if isinstance(known, cls) else cls(place, links, agent, owner, n_ranks)
            if agent.lost is None:
                return ranks
        raise ConnectionError("its agent hangs up")

    def _finish(self, ticket: MessageTicket, outcome: Any) -> None:
        if type(outcome) is Failure and (outcome.summary == CLOSED or isinstance(outcome.exception, ClosedError)):
            outcome = closed(f"group {self._owner.name!r} was closed; its workers cannot be called any more")
        elif type(outcome) is Failure and NOT_CONSTRUCTED in outcome.summary:  # sent before the death was known here
            outcome, ticket.is_dropped = Failure(FailureKind.DIED, REPLACED), True
        super()._finish(ticket, outcome)

    def take_deaths(self, deaths: Mapping[int, Failure]) -> None:
        """Take the deaths of ranks that their agent tells of."""
        for rank in deaths:
            self._owner.far_has_died(self, rank, None)

    def host_is_lost(self, agent: Agent, why: str) -> None:
        """Take the end of the host."""
        failure = Failure.of_death(f"host {agent.host} ({agent.address[0]}) is lost: {why}", "", agent.host, 0, "")
        for rank in range(len(self.agents)):
            self._owner.far_has_died(self, rank, failure)

    def fail(self, rank: int, failure: Failure) -> None:
        """Fail the requests to a rank that has died; the lock is held."""
        super().take_deaths({rank: failure})


def closed(why: str) -> Failure:
    """The failure of calls of a group that was closed."""
    return Failure(FailureKind.RELAYED, why, exception=ClosedError(why))


def _placed(call: WorkerCall, put: Callable[[Sequence[Any]], Sequence[Any]]) -> WorkerCall:
    """A call whose parts travel to a rank."""
    return call._replace(parts=tuple(put(call.parts)))


def is_here(door: str) -> bool:
    """Whether a door is on this host."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        return sock.connect_ex(f"\0{door}") != errno.ECONNREFUSED


def _answer(sock: socket.socket, timeout_s: float, name: str) -> tuple[socket.socket, str, Any]:
    """Read the answer of a door; returns the socket with it."""
    sock.settimeout(timeout_s)
    ended = SHUT, f"the controller of group {name!r} has ended"
    answer: tuple[str, Any] = WAIT, None
    try:
        while answer[0] == WAIT:
            message = sock.recv(ANSWER_NBYTES)
            answer = pickle.loads(message) if message else ended
    except (TimeoutError, BlockingIOError):
        if timeout_s < ANSWER_S:
            sock.setblocking(True)
            return sock, NOTHING, None
        sock.close()
        raise ResourceError(
            f"the controller has not handed out a lane to group {name!r} within {ANSWER_S:g} s; its Python code may "
            "hold the interpreter's lock"
        ) from None
    except OSError:
        answer = ended
    sock.setblocking(True)
    return sock, *answer
