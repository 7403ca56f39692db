"""`ReachedWorkers`: the workers of a group, reached from another worker by lanes that the door hands out."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from bandmaster.contract import CLOSED, Ticket, WorkerCall, WorkerRecord
from bandmaster.errors import ClosedError, ResourceError, UsageError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.settings import agents_door
from bandmaster.wire.client import MessageTicket
from bandmaster.wire.lane import set_buffer
from bandmaster.wire.lanes import LaneClient
from bandmaster.wire.status_page import N_SLOTS
from bandmaster.worker_process.call_path import Step

ANSWER_S = 30.0  # for the controller to answer, whose Python code may run without a pause
SETTLE_S, AGAIN_S = 2.0, 0.01  # for the controller to learn of a death, and between two questions
ANSWER_NBYTES = 64 * 1024
# The answers of a door: with a process, a failure, and reasons.
READY, DIED, SHUT, MOVED = "ready", "died", "shut", "moved"


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
    """

    group: str
    rank: int


class ReachedWorkers(LaneClient):
    """The workers of a group that was given to this process; see `bandmaster.contract.Workers`.

    Attributes:
        ranks_are_own: True.
        records: Empty: the controller has them.

    Args:
        door: The address of the door of this host, or that of the controller, which need not be on this host.
        group: The key of the group there, or "" for the controller itself.
        n_ranks: The number of its ranks.
        name: Its name, for messages.
    """

    ranks_are_own = True
    records: Sequence[WorkerRecord] = ()

    def __init__(self, door: str, group: str, n_ranks: int, name: str) -> None:
        super().__init__(lambda _: Failure(FailureKind.DIED, CLOSED), _numbers())
        self._door, self._group, self._name = door, group, name
        self._is_asking = False
        self._is_own: bool | None = None  # whether this process is one of the ranks, once that is known
        for rank in range(n_ranks):
            self._open[rank], self._requests[rank] = {}, {}
            self._clear(rank)

    # --- calls ---

    def request(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        """Send requests to a rank; see `contract.Workers.request`."""
        self._reach((rank,))
        super().request(rank, requests, take)

    def call(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls, each to one rank; see `contract.Workers.call`."""
        self._reach([rank for call in calls for rank in call.ranks])
        super().call(calls, tickets)

    def interrupt(self, tickets: Mapping[int, MessageTicket], kill_because: str | None = None) -> None:
        """Interrupt calls; see `contract.Workers.interrupt`. Only the controller ends processes."""
        if kill_because is None:
            super().interrupt(tickets)

    def replace(self, rank: int) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"only the controller can replace a rank of group {self._name!r}")

    def stop(self, why: str = CLOSED) -> None:
        """Hang up on the workers, which go on."""
        self.close(why)

    @property
    def is_over(self) -> bool:
        """Whether the group is known to be closed."""
        return not self.check()

    def pids(self, path: Sequence[Step]) -> Mapping[int, int]:
        """The processes of the ranks, among which there may be one that waits for a call with this path."""
        if len(path) > 1 or (path and self._is_own is None):
            self.reach_all()
            self._is_own = os.getpid() in self.processes.values()
        return dict(self.processes) if len(path) > 1 or self._is_own else {}

    # --- lanes ---

    def reach_all(self) -> None:
        """Have lanes to all ranks."""
        self._reach(list(self._open))

    def _reach(self, ranks: Sequence[int]) -> None:
        """Have lanes to ranks."""
        with self.lock:
            self._poller.receive_all()  # a rank may have died, or come back, while no thread waited for any
            for rank in ranks:
                if not (rank in self._lanes or rank in self.deaths or self.is_stopped):
                    self._enter(rank, *self._ask(rank))

    def _enter(self, rank: int, sock: socket.socket | None, answer: str, said: Any) -> None:
        """Take an answer of the door: a lane, a death, or the end of the group; the lock is held."""
        if answer == READY:
            assert sock is not None, "it was answered"
            self._add(rank, sock, said)
        elif answer == DIED:
            assert sock is not None, "it was answered"
            self._poller.watch(sock.fileno(), partial(self._is_back, rank, sock))  # there may be a new process later
            super()._note_death(rank, said)
        else:
            if sock is not None:
                sock.close()
            failure = Failure(FailureKind.RELAYED, said, exception=ClosedError(said))
            for one in self._open:
                super()._note_death(one, Failure(FailureKind.DIED, said) if answer == MOVED else failure)
            self._close(said)

    def _is_back(self, rank: int, sock: socket.socket, _: int) -> None:
        """Take the news of a rank that has died."""
        self._poller.ignore(sock.fileno())
        self._enter(rank, *_answer(sock, 0.0, self._name))

    def _ask(self, rank: int) -> tuple[socket.socket | None, str, Any]:
        """Ask the door for a rank. Returns the socket, which becomes the lane, and the answer."""
        with SigintSafeLock():
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            set_buffer(sock)
            sock.settimeout(ANSWER_S)
            self._connect(sock)
            sock.send(pickle.dumps(Asked(self._group, rank)))
        except ConnectionError:
            sock.close()
            why = "it was closed, or its controller has ended"
            return None, SHUT, f"group {self._name!r} cannot be reached from {socket.gethostname()}: {why}"
        except OSError as error:
            sock.close()
            raise ResourceError(f"cannot reach rank {rank} of group {self._name!r}: {error}") from error
        return _answer(sock, ANSWER_S, self._name)

    def _connect(self, sock: socket.socket) -> None:
        """Connect to the door, or to that of the agent of this host if the door is on another one."""
        try:
            sock.connect(f"\0{self._door}")
        except ConnectionRefusedError:
            others = agents_door()
            if others is None:
                raise
            sock.connect(f"\0{others}")

    def _note_death(self, rank: int, failure: Failure | None = None) -> None:
        """Ask the controller how a rank has died, whose lane has ended; the lock is held."""
        if rank in self.deaths or self._is_asking or self.is_stopped:
            return
        self._is_asking = True  # what follows may come back here
        try:
            pid, deadline = self.processes[rank], time.monotonic() + SETTLE_S
            sock, answer, said = self._ask(rank)
            while answer == READY and said == pid and time.monotonic() < deadline:  # the controller does not know yet
                assert sock is not None, "it was answered"
                sock.close()
                time.sleep(AGAIN_S)
                sock, answer, said = self._ask(rank)
            if answer == READY:
                super()._note_death(rank, Failure(FailureKind.DIED, "its process was replaced"))
            self._enter(rank, sock, answer, said)
        finally:
            self._is_asking = False


def is_here(door: str) -> bool:
    """Whether a door is on this host."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        return door == agents_door() or sock.connect_ex(f"\0{door}") != errno.ECONNREFUSED


def _answer(sock: socket.socket, timeout_s: float, name: str) -> tuple[socket.socket, str, Any]:
    """Read the answer of a door; returns the socket with it."""
    sock.settimeout(timeout_s)
    try:
        message = sock.recv(ANSWER_NBYTES)
    except TimeoutError:
        sock.close()
        raise ResourceError(
            f"the controller has not handed out a lane to group {name!r} within {ANSWER_S:g} s; its Python code may "
            "hold the interpreter's lock"
        ) from None
    except OSError:
        message = b""
    sock.setblocking(True)
    answer, said = pickle.loads(message) if message else (SHUT, f"the controller of group {name!r} has ended")
    return sock, answer, said
