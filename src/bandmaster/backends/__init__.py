"""What a backend is: five methods, and a crew, the running workers of a group: ten more and five facts.

The group plans and never sees a socket; a backend carries bytes and never sees an axis::

    WorkerGroup ── Launch ──► Backend.start ──► Crew ── put, call ──► workers
                                                 └───── wait, fetch ◄── values or failures

`get_backend` finds one by name, and `register_backend` makes one known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from bandmaster.errors import UsageError
from bandmaster.failure import Failure
from bandmaster.mesh import Mesh
from bandmaster.placement import Node, Request
from bandmaster.wire.codec import Payload
from bandmaster.wire.gpu import Loan
from bandmaster.worker import WorkerContext

__all__ = ["CLOSED", "QUEUED", "Backend", "Call", "Crew", "Launch", "Reply", "Seat", "get_backend", "register_backend"]

CLOSED = "the group was closed"
QUEUED = "(not yet at this call, but at one that was sent before it)\n"


@dataclass(frozen=True)
class Seat:
    """A place in a reservation, and the worker's standing in its pool.

    Attributes:
        reservation: What `Backend.reserve` returned.
        node: Index of the node in that reservation's request.
        index: Index of the place on that node.
        node_rank: Number of the node in the pool.
        local_rank: Number of the worker on that node of the pool.
        local_world_size: Workers of the pool on that node.
        share: The part of the place that one group may take, 0 < share <= 1.
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
    """Everything a backend needs to start a group's workers.

    Attributes:
        group: The group's name.
        cls: The worker class.
        constructor: The encoded ``(cls, args, kwargs)``.
        mesh: The group's.
        seats: One per rank.
        worker_names: One per rank, as users see them.
        uses_gpu: Whether every seat has a GPU.
        cpus_per_worker: CPUs that the seat has.
        options: The backend's own options, from the class as the user wrapped it.
        start_timeout_s: How long the constructors may take; None for as long as they take.
        is_again: Whether these places had workers of the same names just now.
    """

    group: str
    cls: type
    constructor: Payload
    mesh: Mesh
    seats: tuple[Seat, ...]
    worker_names: tuple[str, ...]
    uses_gpu: bool
    cpus_per_worker: float
    options: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float | None = None
    is_again: bool = False

    def context(self, rank: int, device: str) -> WorkerContext:
        """What the worker of ``rank`` is told about itself."""
        seat = self.seats[rank]
        return WorkerContext(
            rank=rank,
            world_size=len(self.seats),
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            node_rank=seat.node_rank,
            device=device,
            mesh=self.mesh,
        )


class Reply(Enum):
    """What becomes of a method's value."""

    VALUE = "value"  # the controller reads it
    NOTHING = "nothing"  # nobody does: the worker does not even encode it
    NATIVE = "native"  # the user reads it from the ticket, by the backend's own means


class Call(NamedTuple):
    """What some ranks are asked to do, all of them the same.

    Attributes:
        ranks: The ranks.
        method: Name of the method.
        parts: Payloads as `Crew.put` returned them; each decodes to ``((position or keyword, value), ...)``.
        reply: What becomes of its value.
        loans: What `Crew.lend` has lent for it, to be kept until it was answered.
    """

    ranks: Sequence[int]
    method: str
    parts: tuple[Any, ...]
    reply: Reply
    loans: tuple[Any, ...] = ()


class Crew(Protocol):
    """The running workers of one group."""

    @property
    def handles(self) -> Sequence[Any]:
        """One per rank, what the backend's own users know: actor handles, worker objects."""

    @property
    def has_native_tickets(self) -> bool:
        """Whether tickets are what the backend's own users know, such as ObjectRefs."""

    @property
    def deaths(self) -> Mapping[int, Failure]:
        """Ranks whose process is known to be gone, and how it ended. A call that waits for others fails with them."""

    @property
    def processes(self) -> Mapping[int, int]:
        """The processes of ranks on this host, but for this process itself."""

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""

    def describe(self) -> Sequence[Mapping[str, Any]]:
        """For each rank: ``host``, ``pid``, ``device``, and ``lane``: whether calls take the direct way."""

    def lend(self, ranks: Sequence[int], memory: Any) -> Loan | None:
        """Lend a copy of a flat tensor of bytes on a GPU to all these ranks; None if they cannot copy from there."""

    def put(self, payloads: Sequence[Payload]) -> Sequence[Any]:
        """Write each payload once, for however many ranks will read it. Its memory may change once `call` returns."""

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """Send calls, no two for one rank, without waiting; ``tickets`` gets one by rank as each is sent.

        Calls on one rank run in the order they were sent.
        """

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """The tickets that are done: at least one, or none when the time is over, a process has died, or some other
        call has failed."""

    def fetch(self, ticket: Any) -> Any | Failure:
        """The decoded value of a ticket that is done (None if it was not collected), or what went wrong."""

    def give_up(self, tickets: Mapping[int, Any]) -> None:
        """Interrupt calls where they run, by rank; where they do not run yet, they are passed over."""

    def stacks(self, tickets: Mapping[int, Any]) -> Mapping[int, str]:
        """Where ranks are: their Python stacks, innermost frame last; without those that cannot be had.

        That of a rank which has not come to its ticket's call yet begins with `QUEUED`.
        """

    def end(self, tickets: Mapping[int, Any], why: str) -> None:
        """End the processes of ranks that are at these calls, not those that have not come to them yet."""

    def look_for_deaths(self) -> None:
        """Notice deaths that nobody has waited for."""

    def stop(self, why: str = CLOSED) -> None:
        """End the workers; what is pending fails because of ``why``. Calling it again does nothing."""


class Backend(Protocol):
    """Where workers run."""

    def inventory(self) -> tuple[Node, ...]:
        """The nodes that there are and what is free on them."""

    def reserve(self, request: Request, timeout_s: float) -> Any:
        """Take the places of a pool.

        Raises:
            PlacementError: They do not fit, or did not become free in time.
        """

    def release(self, reservation: Any) -> None:
        """Give the places back."""

    def start(self, launch: Launch) -> Crew:
        """Start a worker on every seat and construct all of them concurrently; if one fails, all are ended again.

        Raises:
            ConstructorError: A constructor raised.
            WorkerDied: A process ended before it was constructed.
            CallTimeout: The constructors did not end in time.
            PlacementError: A process did not start in time.
        """

    def replace(self, crew: Any, launch: Launch, rank: int) -> None:
        """End the worker of one rank, if it still runs, and start and construct a new one in its place.

        The other workers' environment names the rendezvous of the group as it is then.

        Raises:
            UsageError: This backend cannot.
            ConstructorError, WorkerDied, CallTimeout, PlacementError: As for `start`; the rank stays dead.
        """


_BUILT_IN = ("local", "inprocess", "ray")
_factories: dict[str, Callable[[], Backend]] = {}
_backends: dict[str, Backend] = {}
_making = threading.RLock()  # one backend at a time; a factory may ask for another one


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Make a backend known: ``ResourcePool([4], backend=name)`` takes places on it from here on.

    Args:
        name: One that no backend has.
        factory: Makes the backend: called once, without arguments, when the first pool asks for it.

    Raises:
        UsageError: The name is taken or is no text, or the factory cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a backend's name is a text, not {name!r}")
    if not callable(factory):
        raise UsageError(f"backend {name!r} takes a function without arguments that makes it, not {factory!r}")
    if name in _BUILT_IN or name in _factories:
        raise UsageError(f"there is a backend called {name!r} already; register this one under another name")
    _factories[name] = factory


def get_backend(name: str) -> Backend:
    """The backend called ``name``, the same object every time and in every thread.

    Raises:
        UsageError: There is none of that name, or what it needs is not installed.
    """
    if not isinstance(name, str):
        raise UsageError(f"backend= takes the name of one, such as 'local', not {name!r}")
    if name not in _backends:
        with _making:
            if name not in _backends:
                _backends[name] = _made(name)
    return _backends[name]


def _made(name: str) -> Backend:
    if name == "inprocess":
        from bandmaster.backends.inprocess import InProcessBackend

        return InProcessBackend()
    if name == "local":
        from bandmaster.backends.local import LocalBackend

        return LocalBackend()
    if name == "ray":
        try:
            from bandmaster.backends.ray import RayBackend
        except ImportError as error:
            raise UsageError(f"backend 'ray' needs Ray ({error}): pip install 'bandmaster[ray]'") from error
        return RayBackend()
    if name in _factories:
        return _factories[name]()
    *known, last = map(repr, (*_BUILT_IN, *_factories))
    raise UsageError(f"no backend is called {name!r}; there are {', '.join(known)} and {last}")
