"""The waist: what a backend is (5 methods), and what the running workers of a group are (12 methods, 5 facts).

The core plans calls and never sees a socket. A backend carries payloads and never sees an axis or a protocol::

    WorkerGroup ── Launch ──► Backend.start ──► Workers ── put, call ──────► worker processes
                                                  └─────── wait, fetch ◄──── payloads or failures

Backends import this module. It imports no backend, and knows nothing that only Ray or CUDA knows.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from bandmaster.codec import Payload, decode
from bandmaster.errors import CallTimeout
from bandmaster.errors.failure import Failure
from bandmaster.plan.columns import RowFacts as RowFacts
from bandmaster.plan.columns import facts_of
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.placement import Node, Request
from bandmaster.worker import Report as Report
from bandmaster.worker import WorkerContext

CLOSED = "the group was closed"
NOT_STARTED = "the group could not be started"
NOT_CONSTRUCTED = (
    "this worker is being replaced, and is not constructed yet; make the call again when replace() is over"
)
QUEUED = "(this rank has not begun the call yet)\n"
START_ADVICE = (
    "the workers that were starting have been ended; give them longer with start_timeout, or find out what takes "
    "them so long"
)
KEPT_FROM_NBYTES = 64 * 1024  # smaller values travel inside the reply: a segment would cost more than they do

# What calls may name in place of one of the user's methods:
PRELOAD = "bandmaster.preload"  # before `CONSTRUCT`, where the pool asks for it: its arguments are names of modules
CONSTRUCT = "bandmaster.construct"  # the first other call on a worker: its argument is ``(cls, args, kwargs)``
OPEN_STREAM = "bandmaster.open"  # as `NEXT`, of a generator method: to its arguments come its and the stream's names
NEXT = "bandmaster.next"  # the next item of a stream, by the stream's name; no value where there is none any more
CLOSE_STREAM = "bandmaster.close"  # close the generator of a stream, by the stream's name
STREAM, METHOD = "bandmaster.stream", "bandmaster.method"  # the keywords that `OPEN_STREAM` adds
OPEN_ITEMS = "bandmaster.items"  # a request that runs an async generator, whose name and stream are added as above
MORE_ITEMS = "bandmaster.more"  # by stream, how many may be made; overtakes calls, which wait for the generator
MAXSIZE = "bandmaster.maxsize"  # the keyword that `OPEN_ITEMS` adds as well: how many items may be made
# Before the name of a method: a request that runs there waits for this one, so that it overtakes calls as well.
CALLS_BACK = "bandmaster.back:"
RUN = "bandmaster.run"  # a function that is called with the executor, and its further arguments


class Written(NamedTuple):
    """Output of a rank, which the controller shows.

    Attributes:
        kind: ``"stdout"``, ``"stderr"`` or ``"log"``.
        group: Name of the group.
        rank: The rank.
        lines: Complete lines, or a log record as JSON.
        bar: The present state of an incomplete line that is written again and again; "" for none.
    """

    kind: str
    group: str
    rank: int
    lines: Sequence[str]
    bar: str = ""

    @property
    def prefix(self) -> str:
        """The beginning of each line."""
        return f"[{self.group} {self.rank}] "


ShowOutput = Callable[[Written], object]


@dataclass(frozen=True)
class Slot:
    """One slot of a reservation, and the position of its worker in the pool.

    Attributes:
        reservation: What `Backend.reserve` returned.
        node: Index of the node in that reservation's request.
        index: Index of the slot on that node.
        node_rank: Number of the node in the pool.
        local_rank: Number of the worker on that node of the pool.
        local_world_size: Workers of the pool on that node.
        share: The part of the slot that one group may take, 0 < share <= 1.
    """

    reservation: Any
    node: int
    index: int
    node_rank: int
    local_rank: int
    local_world_size: int
    share: float


@dataclass(frozen=True)
class Launch:
    """A request to start a group's workers, with all that a backend needs, also to replace one of them later.

    Attributes:
        group: The group's name.
        class_name: Name of the worker class, for messages: the class itself comes with `CONSTRUCT`.
        mesh: The group's mesh.
        meshes: Its further meshes, by name.
        slots: The slot of each rank.
        worker_names: The name of each rank's worker, as users see it.
        options: The backend's own options, from the class as the user wrapped it.
        start_timeout_s: How long the processes may take to start, and then the constructors; None for as long as they
            take.
        variables: Further environment variables of the workers.
        env: Environment variables that the pool asks for, from the time at which the workers' processes start.
        preload: Names of the modules that are imported before the workers are constructed; None where the pool does not
            say, so that the backend may import what it sees fit.
        imports: Names of modules that methods of the class import when they run, as far as the code shows it.
        output: The directory that the output of workers goes to, each to a file of its own; None for the controller's
            streams.
        log_level: The lowest level of log records that the controller's loggers get; None for none.
    """

    group: str
    class_name: str
    mesh: Mesh
    meshes: Mapping[str, Mesh]
    slots: tuple[Slot, ...]
    worker_names: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] | None = None
    imports: tuple[str, ...] = ()
    output: str | None = None
    log_level: int | None = None

    def output_file(self, rank: int) -> str | None:
        """The file that the output of a rank goes to; None if it goes to the controller's streams."""
        return (
            None if self.output is None else os.path.join(self.output, f"{self.group.replace(os.sep, '_')}-{rank}.out")
        )

    def context(self, rank: int, device: str) -> WorkerContext:
        """The attributes that the worker of ``rank`` has before its constructor runs."""
        slot = self.slots[rank]
        return WorkerContext(
            rank=rank,
            world_size=len(self.slots),
            local_rank=slot.local_rank,
            local_world_size=slot.local_world_size,
            node_rank=slot.node_rank,
            device=device,
            mesh=self.mesh,
            meshes=dict(self.meshes),
        )

    @property
    def constructor(self) -> str:
        """The name of the constructor in messages."""
        return f"{self.class_name}.__init__"

    def sent(self) -> Launch:
        """The launch as other hosts need it, without reservations and options, which the controller understands."""
        return replace(self, slots=tuple(replace(slot, reservation=None) for slot in self.slots), options={})

    def late(self, ranks: Sequence[int], why: str) -> CallTimeout:
        """The error of ranks that did not start within ``start_timeout_s``."""
        assert self.start_timeout_s is not None, "only a deadline ends the wait early"
        return CallTimeout(self.constructor, tuple(ranks), self.start_timeout_s, None, f"{why}; {START_ADVICE}")


class WorkerRecord(NamedTuple):
    """The host, process and device of one running worker.

    Attributes:
        host: Name or address of its host.
        pid: Its process.
        device: ``"cpu"``, or its GPU as torch names it there.
        channel: How calls reach it: ``"lane"`` on the controller's own host, ``"link"`` on another one.
        handle: Returns the object that stands for it in `WorkerGroup.workers`.
    """

    host: str
    pid: int
    device: str
    channel: str
    handle: Callable[[], Any]


@dataclass(frozen=True)
class WorkerProcess:
    """The process of a worker, as `WorkerGroup.workers` lists it.

    Attributes:
        name: Name of the worker.
        rank: Its rank in the group.
        host: Name of its host.
        pid: Its process id there.
    """

    name: str
    rank: int
    host: str
    pid: int


class Signs(NamedTuple):
    """The signs of life of a rank at one moment.

    Attributes:
        state: The state of its process, a letter as in proc(5), ``"R"`` if any thread can run; "" if it has ended.
        cpu_s: Processor time that it and its child processes have used, in seconds.
        method: The method that it runs; "" for none.
        seconds: How long it has been running that.
    """

    state: str
    cpu_s: float
    method: str
    seconds: float


class Reply(IntEnum):
    """The fate of the value that a method returns."""

    DROP = 0  # the worker does not even encode it
    RETURN = 1  # the controller fetches it
    KEEP = 2  # it stays on the worker's host until somebody reads its rows; a small one, or one without rows, comes


# The times of a call that is timed, in ns by the monotonic clock of its host: the call was begun, its arguments were
# decoded, the method had run, the outcome was encoded.
TIMES = struct.Struct("<QQQQ")


class Rows(NamedTuple):
    """A value with rows, encoded in the worker that keeps it.

    Attributes:
        payload: The value.
        facts: What is known of it.
    """

    payload: Payload
    facts: RowFacts

    def private(self) -> Rows:
        """The value with buffers in new memory."""
        return Rows(self.payload.private(), self.facts)


class Kept(Protocol):
    """The rows that one rank has kept, on the controller's side.

    Attributes:
        place: Where they lie: ``"shared memory"`` of the host, ``"network"`` where other hosts have to fetch them, or
            ``"controller"``.
        origin: What messages call them, as text: "rows 0 to 4 of Actor.generate, which ... ,". It is set by who holds
            them. A call that takes rows which are gone fails with a failure of kind LOST that says so.
    """

    place: str
    origin: object

    @property
    def facts(self) -> RowFacts | None:
        """The facts about the rows; None for a value that has none."""

    def payload(self, timeout_s: float | None = None) -> Payload:
        """The encoded rows, in memory of the reader's own.

        Raises:
            RowsLost: They are gone.
            TimeoutError: They are on another host, and have not come in so many seconds.
        """


class KeptCopy:
    """Rows as a copy in this process that nobody else has; see `Kept`.

    Attributes:
        place: ``"controller"``.

    Args:
        payload: The copy.
        facts: What is known of the rows; by default it is found out when it is asked for.
    """

    place = "controller"
    origin: object = "rows"

    def __init__(self, payload: Payload, facts: RowFacts | None = None) -> None:
        self._payload, self._facts = payload, facts

    @property
    def facts(self) -> RowFacts | None:
        """The facts about the rows; None for a value that has none."""
        if self._facts is None:
            self._facts = facts_of(decode(self.payload()), self._payload.nbytes)
        return self._facts

    def payload(self, timeout_s: float | None = None) -> Payload:
        """The encoded rows, in memory of the reader's own."""
        return self._payload.private()


class WorkerCall(NamedTuple):
    """One call of one method on some ranks.

    Attributes:
        ranks: The ranks.
        method: Name of the method, or one of the reserved names of this module, such as `CONSTRUCT` and `RUN`.
        parts: Payloads as `Workers.put` returned them; each decodes to ``((position or keyword, value), ...)``.
        reply: What happens to the method's value.
        rows: Kept rows as `Workers.put` returned them, by the labels that arguments refer to them by.
        is_timed: Whether the tickets are to tell the times.
        needed: For some of the ranks, by label, the numbers of the kept rows that they need; None if that is not known.
        present: The numbers of the kept rows that are present, by label, where these are not all.
        is_fenced: Whether other ranks run it as well, so that a rank which fails it waits for `Workers.resume` before
            it begins another call.
    """

    ranks: Sequence[int]
    method: str
    parts: tuple[Any, ...]
    reply: Reply
    rows: tuple[tuple[int, Any], ...] = ()
    is_timed: bool = False
    needed: Callable[[Sequence[int]], Mapping[Any, Any]] | None = None
    present: Mapping[int, Any] = MappingProxyType({})
    is_fenced: bool = False


class Reports(dict[int, Mapping[str, Report]]):
    """The reports of the workers by rank, and for each by the prefix of its role in a colocated group, "" in others.

    Attributes:
        on_change: Called by the thread that receives a report, or notes the death of a rank; it must not block.
    """

    on_change: Callable[[], object] = bool

    def take(self, rank: int, reports: Mapping[str, Report]) -> None:
        """Take all reports of a rank in place of those before."""
        self[rank] = reports
        self.on_change()


class Ticket:
    """One rank's part of a call, and in time its reply. Backends add to it what they need.

    Attributes:
        outcome: The reply, as `Workers.fetch` returns it, where backends keep it here.
        is_done: Whether it has its reply; False where only `Workers.wait` tells.
        is_dropped: Whether the rank never gets it.
        on_done: If it is set, the thread that receives the reply calls it; it must not block.
        on_item: The same, called with each item, a payload or a failure, of a request that runs an async generator.
        number: Its number among the messages of the same workers, in the order in which they are sent; 0 where calls
            are sent in the order of `Workers.call`.
        times: The times of the worker, packed as `TIMES`, and when the reply was received; None but for calls that are
            timed, once they are done.
    """

    __slots__ = ("is_done", "is_dropped", "on_done", "on_item", "outcome", "times")

    number = 0

    def __init__(self, outcome: Any = None, is_done: bool = False) -> None:
        self.outcome, self.is_done, self.is_dropped = outcome, is_done, False
        self.on_done: Callable[[], object] | None = None
        self.on_item: Callable[[Any], object] | None = None
        self.times: tuple[bytes, int] | None = None


class Workers(Protocol):
    """The running workers of one group. Any thread may call every method.

    Attributes:
        deaths: The ranks whose processes are known to have ended, and how. It only grows, but for `replace`.
        reports: What the workers have reported of themselves, as far as it has come with their replies.
        ranks_are_own: Whether a worker is called by the rank that its context says; not so where a group was attached
            to some workers of another.
    """

    ranks_are_own: bool

    @property
    def reports(self) -> Reports:
        """The reports of the workers, as far as they have come with their replies."""

    @property
    def deaths(self) -> Mapping[int, Failure]:
        """The ranks whose processes are known to have ended, and how."""

    @property
    def records(self) -> Sequence[WorkerRecord]:
        """The record of each rank's worker."""

    @property
    def arrivals(self) -> int | None:
        """A descriptor that is readable when a reply or a death may have arrived; None if nothing tells of them."""

    def put(self, payloads: Sequence[Payload | Kept]) -> Sequence[Any]:
        """Make payloads and kept rows ready to be named by calls. Each is written once, however many ranks read it.

        A payload's memory may change once `call` has returned.

        Raises:
            ResourceError: There is no memory or no descriptor for them.
        """

    def call(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls, no two for one rank, as a unit and without waiting.

        Every rank gets the calls of all threads in one order, and runs its calls in that order.

        Args:
            calls: What to send.
            tickets: Gets the ticket of each rank as its call is sent.

        Raises:
            ClosedError: The workers were stopped.
            ResourceError: There is no memory or no descriptor for what the calls say; nothing was sent.
        """

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Wait until all tickets are done, a process has died, some call has failed, or the time is over.

        Returns:
            The tickets that are done, perhaps none.
        """

    def request(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        """Send requests to a rank, behind the calls that were sent before, or only such as overtake calls.

        They run beside each other, and end in any order. A later call of the rank begins when all have ended. A request
        of a ticket is cancelled by `interrupt`. Waits for nothing.

        Args:
            rank: The rank.
            requests: The requests: calls of async methods, for this rank alone; they are not fenced.
            take: Called with the ticket of each before a reply can come, in order to set `Ticket.on_done`.

        Raises:
            ResourceError: There is no memory or no descriptor for them.
            ClosedError: The workers were stopped.
        """

    def fetch(self, ticket: Any) -> Payload | Kept | Failure | None:
        """The reply of a ticket that is done: the encoded value, the failure, or None where there is no value.

        That is a value that was dropped, and the end of a stream.
        """

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Interrupt calls, by rank, where they run; a rank that has not come to its call skips it.

        Args:
            tickets: The calls; to be killed, None stands for whatever the rank is doing.
            kill_because: End the processes of ranks that are at these calls instead; their deaths give this reason.
        """

    def resume(self, tickets: Mapping[int, Any]) -> None:
        """Let ranks begin their next calls: all ranks have ended the calls of these tickets, which failed here.

        A rank waits for this only after a failed call that `is_fenced`, and only if ranks run beside each other.
        """

    def replace(self, rank: int) -> None:
        """End the process of one rank, if it still runs, and start a new one, which awaits `CONSTRUCT`.

        The environment of the other workers names the new rendezvous of the group, if it has changed.

        Raises:
            UsageError: This backend cannot.
            PlacementError, WorkerDied, CallTimeout: As for `Backend.start`; the rank stays dead.
        """

    def stacks(self, tickets: Mapping[int, Any]) -> Mapping[int, str]:
        """The Python stacks of ranks, innermost frame last, without ranks whose stacks cannot be had.

        The stack of a rank that has not come to its ticket's call begins with `QUEUED`. A ticket may be None, for a
        rank whatever it is doing.
        """

    def signs(self, ranks: Sequence[int]) -> Mapping[int, Signs]:
        """The signs of life of ranks, without those that have no process of their own or whose host does not answer."""

    def check(self, is_thorough: bool = True) -> bool:
        """Take what has arrived, and notice deaths that no call has met; False once `stop` was called.

        Args:
            is_thorough: Whether to ask about processes whose deaths do not arrive by themselves.
        """

    def stop(self, why: str = CLOSED) -> None:
        """End the workers. Pending calls fail because of ``why``. Calling it again does nothing."""


class Backend(Protocol):
    """A place for workers to run in."""

    def inventory(self) -> tuple[Node, ...]:
        """The nodes that there are and what is free on them."""

    def reserve(self, request: Request, timeout_s: float) -> Any:
        """Reserve the slots of a pool. Returns the reservation, which is not None.

        Raises:
            PlacementError: The slots do not fit, or did not become free in time.
        """

    def nodes(self, reservation: Any) -> Sequence[Node | None]:
        """The node of each entry of the request that was reserved; None if that node is lost."""

    def release(self, reservation: Any) -> None:
        """Release the slots of a reservation."""

    def start(self, launch: Launch) -> Workers:
        """Start a process on every slot; if one cannot be started, all are ended again.

        The workers await `CONSTRUCT` as their first call. Their contexts and environments are set by then, and the
        rendezvous of the group is open.

        Raises:
            PlacementError: A process did not start in time.
            WorkerDied: A process ended as it started.
            CallTimeout: The processes did not start within the launch's ``start_timeout_s``.
        """
