"""Every rank is an object in this process, called in rank order: the specification, and where `pdb` works.

Values travel through the same codec as on every other backend, so they are isolated in the same way.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bandmaster.backends import CLOSED, Call, Launch, Reply
from bandmaster.backends.machine import MachineBackend
from bandmaster.errors import ConstructorError
from bandmaster.failure import Failure
from bandmaster.wire.codec import Payload, decode
from bandmaster.wire.host import WorkerHost

__all__ = ["InProcessBackend"]


class InProcessBackend(MachineBackend):
    """All ranks in this process."""

    def start(self, launch: Launch) -> InProcessCrew:
        """Construct the workers in rank order."""
        crew = InProcessCrew([WorkerHost() for _ in launch.seats])
        for rank in range(len(launch.seats)):
            self.replace(crew, launch, rank)
        return crew

    def replace(self, crew: InProcessCrew, launch: Launch, rank: int) -> None:
        """Make one of the objects, again or for the first time."""
        seat, host = launch.seats[rank], WorkerHost()
        device = f"cuda:{seat.reservation.gpus[seat.node][seat.index]}" if launch.uses_gpu else "cpu"
        failure = host.construct(launch.context(rank, device), launch.constructor.private())
        crew.hosts[rank] = host
        if failure is not None:
            crew.stop()
            where = {rank: launch.mesh.coordinates(rank)}
            failures = {rank: _delivered(failure)}
            raise ConstructorError(f"{launch.cls.__name__}.__init__", failures, where, launch.group)


class InProcessCrew:
    """A call runs as it is sent, so a ticket is done from the start: it holds the outcome."""

    has_native_tickets = False
    deaths: Mapping[int, Failure] = MappingProxyType({})
    processes: Mapping[int, int] = MappingProxyType({})
    is_stopped = False

    def __init__(self, hosts: list[WorkerHost]) -> None:
        self.hosts = hosts

    @property
    def handles(self) -> list[Any]:
        """The worker objects themselves."""
        return [host.worker for host in self.hosts]

    def describe(self) -> list[dict[str, Any]]:
        """All in this process."""
        here = {"host": socket.gethostname(), "pid": os.getpid(), "lane": "in process"}
        return [{**here, "device": host.worker.device if host.worker else "-"} for host in self.hosts]

    def put(self, payload: Payload) -> Payload:
        """Nothing to write: every rank copies what it reads."""
        return payload

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """Run the calls, one rank after the other."""
        by_rank = {rank: call for call in calls for rank in call.ranks}
        for rank in sorted(by_rank):
            tickets[rank] = self._run(rank, by_rank[rank])

    def _run(self, rank: int, call: Call) -> Ticket:
        parts = [part.private() for part in call.parts]
        outcome = self.hosts[rank].call(call.method, parts, call.reply is not Reply.NOTHING)
        return Ticket(outcome.private() if isinstance(outcome, Payload) else outcome)

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """All of them."""
        return list(tickets)

    def fetch(self, ticket: Ticket) -> Any | Failure:
        """The outcome, its exception having been through a pickle as everywhere."""
        if not isinstance(ticket.outcome, Payload):
            return ticket.outcome and _delivered(ticket.outcome)
        try:
            return decode(ticket.outcome)
        except Exception as error:
            return Failure.unreadable(error)

    def give_up(self, tickets: Mapping[int, Any]) -> None:
        """Nothing runs any more."""

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Nobody is anywhere."""
        return {}

    def end(self, tickets: Mapping[int, Any], why: str) -> None:
        """Nobody can be ended alone."""

    def look_for_deaths(self) -> None:
        """Nobody can have died."""

    def stop(self, why: str = CLOSED) -> None:
        """Let the workers go."""
        self.is_stopped = True
        for host in self.hosts:
            host.close()


class Ticket:
    """The outcome of one call on one rank."""

    def __init__(self, outcome: Payload | Failure | None) -> None:
        self.outcome = outcome


def _delivered(failure: Failure) -> Failure:
    """The failure as the controller of another process would get it."""
    revived: Failure = pickle.loads(pickle.dumps(failure))
    return revived
