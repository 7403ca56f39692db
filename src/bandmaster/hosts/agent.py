"""The agent: it takes the calls of one controller for the workers of one host, and sends back what they reply."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bandmaster.codec import Payload
from bandmaster.contract import KeptCopy, ShowOutput, Written
from bandmaster.errors import ClosedError, ResourceError, RowsLost
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.handshake import HANDSHAKE_TIMEOUT_S, Refused, Secret, greet, welcome
from bandmaster.hosts.hosted import Entry, Held, Hosted, RanksHere
from bandmaster.hosts.link import Link
from bandmaster.hosts.messages import FOR_MESSAGES, FOR_RELAY, FOR_ROWS, Kind, Packed, chunks_of, dumped
from bandmaster.hosts.row_links import Fetch, RowLinks, in_memory
from bandmaster.hosts.rows import RowServer, Shelf
from bandmaster.platform.limits import start_thread
from bandmaster.wire.channel import Closed
from bandmaster.wire.control_page import AGENT, announce

__all__ = ["AgentServer", "Host"]

MAX_STRANGERS = 64  # connections that have not proved that they know the secret; the oldest makes room for another
ACCEPT_AGAIN_S = 0.2  # after a connection could not be accepted
POLL_S = 0.05  # how often to ask for replies of which nothing tells
OUTPUT_POLL_S = 0.01  # how often to look whether a link takes more of what workers write
_log = logging.getLogger(__name__)


class Host:
    """What an agent is asked for besides calls; `bandmaster.backends.ray.agents` has the real one."""

    def start(self, said: bytes, shows: ShowOutput) -> tuple[RanksHere, Sequence[int]]:
        """Start the part of a group.

        Args:
            said: What the controller says of it.
            shows: Has the controller show the output of the workers.

        Returns:
            The workers, and their ranks.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End all that was started here, and wait for it."""


class Conversation:
    """One link of an agent, and the frame that is being received over it.

    Attributes:
        link: The link.
        content: The content of that frame, once it was looked at for where its chunks are to lie.
        payloads: The payloads that its chunks are.
    """

    def __init__(self, sock: socket.socket, keys: Any, place: Callable[[Conversation, Sequence[int]], Any]) -> None:
        self.content: tuple[Any, ...] | None = None
        self.payloads: list[Payload] = []
        self._where = place
        self.link = Link(sock, keys, self._place)

    def _place(self, head: bytes, sizes: Sequence[int]) -> Sequence[memoryview]:
        self.content = pickle.loads(head)
        self.payloads = self._where(self, sizes)
        return [view for payload in self.payloads for view in (payload.head, *payload.buffers)]

    def receive(self) -> tuple[tuple[Any, ...], list[Payload]] | None:
        """The content and the large payloads of the next frame; None if it is not all there."""
        frame = self.link.receive()
        if frame is None:
            return None
        content, payloads = self.content or pickle.loads(frame.head), self.payloads
        self.content, self.payloads = None, []
        return content, payloads


class AgentServer:
    """Serves one controller until its link ends.

    Attributes:
        address: The IP address and port that it listens on.

    Args:
        secret: What the controller and other agents have to know.
        address: The IP address of this host, on which alone it listens.
        host: Starts workers.
        controller: What `bandmaster ps` calls the controller.
    """

    def __init__(self, secret: Secret, address: str, host: Host, controller: str) -> None:
        self._secret, self._host = secret, host
        self._announced = announce(AGENT, controller)
        self._listening = socket.create_server((address, 0), backlog=128)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._shelf = Shelf()
        self._rows, self._links = RowServer(self._shelf), RowLinks(secret)
        self._groups: dict[str, Hosted] = {}
        self._by_fd: dict[int, Hosted] = {}
        self._controller: Conversation
        self._conversations: dict[int, Conversation] = {}  # by descriptor: with the controller, and other agents
        self._below: dict[tuple[str, int], Conversation] = {}  # by address: agents that this one passes calls on to
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._to_do: deque[Callable[[], object]] = deque()  # for the thread that serves, from others
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._meeting = threading.Lock()
        self._came: deque[tuple[socket.socket, Any]] = deque()
        self._has_come = threading.Event()
        start_thread("bandmaster-agent-listener", self._listen)

    # --- who connects ---

    def _listen(self) -> None:
        has_failed = False
        while True:
            try:
                start_thread("bandmaster-agent-welcome", self._welcome, *self._listening.accept())
                has_failed = False
            except (OSError, ResourceError) as error:  # later there may be a descriptor, or a thread, again
                if not has_failed:
                    _log.warning("this agent cannot accept connections now: %s", error)
                has_failed = True
                time.sleep(ACCEPT_AGAIN_S)

    def _turn_away(self, sock: socket.socket) -> None:
        """Have the thread that awaits a connection's proof give up."""
        del self._strangers[sock]
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _welcome(self, sock: socket.socket, peer: Any) -> None:
        with self._meeting:
            if len(self._strangers) == MAX_STRANGERS:
                self._turn_away(next(iter(self._strangers)))
            self._strangers[sock] = None
        try:
            trusted, keys, purpose = welcome(sock, self._secret)
        except (Refused, OSError) as error:
            _log.warning("closed a connection from %s:%d: %s", *peer[:2], error)
            sock.close()
            return
        finally:
            with self._meeting:
                self._strangers.pop(sock, None)
        if purpose == FOR_ROWS:
            self._rows.serve(trusted, keys)
        elif purpose == FOR_MESSAGES and not self._has_come.is_set():
            self._came.append((trusted, keys))
            self._has_come.set()
        elif purpose == FOR_RELAY:
            self.later(lambda: self._converse(Conversation(trusted, keys, self._place)))
        else:
            trusted.close()

    # --- serving ---

    def run(self, patience_s: float) -> None:
        """Serve the controller until it is gone.

        Args:
            patience_s: Seconds in which it has to connect.
        """
        if not self._has_come.wait(patience_s):
            _log.warning("no controller has connected within %g s", patience_s)
            return
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._controller = Conversation(*self._came.popleft(), self._place)
        self._converse(self._controller)
        try:
            while True:
                self._serve()
        except Closed:
            self._host.close()

    def _converse(self, other: Conversation) -> None:
        """Serve a link from here on."""
        self._conversations[other.link.fileno()] = other
        self._poll.register(other.link.fileno(), select.EPOLLIN)

    def _serve(self) -> None:
        for fd, events in self._poll.poll(self._patience_s()):
            if fd in self._conversations:
                self._listen_to(self._conversations[fd], events)
            elif fd == self._wake:
                os.eventfd_read(self._wake)
                self._do()
            elif fd in self._by_fd:
                self._by_fd[fd].look()
        for hosted in self._groups.values():
            if hosted.arrivals is None and hosted.has_open_calls:
                hosted.look()
        self._tell()

    def _listen_to(self, other: Conversation, events: int) -> None:
        try:
            if events & select.EPOLLOUT and other.link.pump():
                self._poll.modify(other.link.fileno(), select.EPOLLIN)
            while (said := other.receive()) is not None:
                self._take(other, *said)
        except Closed:
            self._end(other)

    def _end(self, other: Conversation) -> None:
        """A link has ended. Without the controller there is nothing left to do."""
        if other is self._controller:
            raise Closed("the controller is gone")
        self._poll.unregister(other.link.fileno())
        del self._conversations[other.link.fileno()]
        self._below = {address: below for address, below in self._below.items() if below is not other}
        for hosted in self._groups.values():
            hosted.below = [below for below in hosted.below if below is not other]
        other.link.close()

    def _do(self) -> None:
        while self._to_do:
            do = self._to_do.popleft()
            try:
                do()
            except Closed:
                raise
            except Exception:  # of one group: the others are served further on
                _log.exception("the agent of this host could not do what it was asked for")

    def _patience_s(self) -> float | None:
        dues = [due for hosted in self._groups.values() if (due := hosted.due_s()) is not None]
        if any(hosted.arrivals is None and hosted.has_open_calls for hosted in self._groups.values()):
            dues.append(POLL_S)
        return min(dues) if dues else None

    def _tell(self) -> None:
        """Send what the groups have to tell."""
        for name, hosted in list(self._groups.items()):
            if not hosted.has_news:
                continue
            deaths = hosted.deaths()
            packed = Packed()
            replies = hosted.replies(packed, bool(deaths))
            if replies:
                self._send(hosted.home or self._controller, (Kind.REPLIES, name, replies, packed.table), packed.chunks)
            if deaths:
                self._send(self._controller, (Kind.DEATHS, name, deaths))

    def _send(self, other: Conversation, content: tuple[Any, ...], chunks: Sequence[Any] = ()) -> None:
        self._send_frame(other, dumped(content), chunks)

    def _send_frame(self, other: Conversation, head: bytes, chunks: Sequence[Any]) -> None:
        if other.link.fileno() < 0:
            return  # it has ended: the controller finds out by itself, and what it is owed is lost
        try:
            is_sent = other.link.send(head, chunks)
        except Closed:
            self._end(other)
        else:
            if not is_sent:
                self._poll.modify(other.link.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def later(self, do: Callable[[], object]) -> None:
        """Have something done by the thread that serves. From any thread."""
        self._to_do.append(do)
        os.eventfd_write(self._wake, 1)

    def show(self, written: Written) -> None:
        """Have the controller show output of a worker; this waits while the link is full. Called from other threads."""
        self.later(lambda: self._send(self._controller, (Kind.OUTPUT, written)))
        while self._controller.link.has_unsent:
            time.sleep(OUTPUT_POLL_S)

    # --- what the controller says ---

    def _place(self, other: Conversation, sizes: Sequence[int]) -> list[Payload]:
        """Where the chunks of a frame are received: the large payloads of a call in segments, which its ranks map."""
        content = other.content
        assert content is not None, "it was just looked at"
        if content[0] == Kind.FORWARD:
            return [in_memory(sizes)]
        hosted = self._groups.get(content[1]) if content[0] == Kind.CALL else None
        payloads: list[Payload] = []
        at = 0
        for n in (said for said in content[3] if type(said) is int):
            mine = sizes[at : at + n]
            at += n
            try:
                payloads.append(in_memory(mine) if hosted is None else hosted.workers.reserve(mine))
            except (ResourceError, ClosedError):  # the call fails for the same reason, once it is put
                payloads.append(in_memory(mine))
        return payloads

    def _take(self, other: Conversation, content: tuple[Any, ...], large: list[Payload]) -> None:
        kind = content[0]
        if kind == Kind.CALL:
            self._call(other, content, large)
        elif kind == Kind.REPLIES:
            self._pass_back(content, large)
        elif kind == Kind.FORWARD:
            self._forward(content, large)
        elif kind in (Kind.INTERRUPT, Kind.RESUME):
            hosted = self._groups.get(content[1])
            if hosted is not None:
                (hosted.interrupt if kind == Kind.INTERRUPT else hosted.resume)(content[2])
        elif kind == Kind.RELEASE:
            self._shelf.release(content[1])
        elif kind == Kind.PING:
            self._send(other, (Kind.PONG,))
        elif kind == Kind.ASK:
            start_thread("bandmaster-agent-ask", self._answer, *content[1:])

    def _forward(self, content: tuple[Any, ...], large: Sequence[Payload]) -> None:
        """Pass a frame on to one of the agents below."""
        _, _, address, head = content
        below = self._below.get(address)
        if below is not None:  # else the controller has been told that it is gone, or will be
            self._send_frame(below, head, chunks_of(*large))

    def _pass_back(self, content: tuple[Any, ...], large: Sequence[Payload]) -> None:
        """Have the replies of an agent below come together with those of this host."""
        _, name, replies, table = content
        hosted = self._groups.get(name)
        if hosted is not None:
            it = iter(large)
            hosted.pass_back(replies, [next(it) if type(said) is int else Payload(*said) for said in table])

    def _call(self, other: Conversation, content: tuple[Any, ...], large: Sequence[Payload]) -> None:
        _, name, entries, table, fetches, is_for_all = content
        it = iter(large)
        payloads = [next(it) if type(said) is int else Payload(*said) for said in table]
        hosted = self._groups.get(name)
        if hosted is None:
            return  # it was stopped
        hosted.home = other
        calls = [Entry(*entry) for entry in entries]
        if is_for_all and hosted.below:
            for below in hosted.below:
                self._send(below, content, chunks_of(*large))
            hosted.await_below([call.number for call in calls])
        place = partial(hosted.workers.reserve, is_kept=True)
        for fetch in (Fetch(*said) for said in fetches):
            coming = self._links.fetch(fetch, place)
            self._shelf.keep_copy(fetch.copy, coming)
            coming.add_done_callback(lambda _: self.later(self._advance))
        hosted.take(Held(calls, payloads, self._rows_of(calls, payloads)))

    def _rows_of(self, calls: Sequence[Entry], payloads: Sequence[Payload]) -> Any:
        """The rows that calls name, by place; the failure if some are gone."""
        found: dict[Any, Any] = {}
        try:
            for place in {place for entry in calls for _, place, _ in entry.rows}:
                found[place] = self._shelf.rows(place[1]) if place[0] == "shelf" else KeptCopy(payloads[place[1]])
        except RowsLost as error:
            return Failure(FailureKind.LOST, str(error))
        return found

    def _advance(self) -> None:
        """Send the calls whose rows have come from other hosts."""
        for hosted in self._groups.values():
            hosted.advance()

    # --- what may take a while ---

    def _answer(self, number: int, what: str, *args: Any) -> None:
        """Answer a question, in a thread of its own."""
        try:
            said, is_error = getattr(self, f"_ask_{what}")(*args), False
        except BaseException as error:
            said, is_error = error, True
        try:
            pickled = pickle.dumps(said)
        except Exception as error:
            pickled, is_error = pickle.dumps(RuntimeError(f"{said!r} ({error})")), True

        def answer() -> None:
            self._tell()  # of deaths first, if it was that
            self._send(self._controller, (Kind.ANSWER, number, is_error, pickled))

        self.later(answer)

    def _ask_start(self, name: str, said: bytes) -> Any:
        """Start the part of a group: where each rank is, and how others find rank 0 if it is one of them."""
        workers, ranks = self._host.start(said, self.show)
        hosted = Hosted(workers, ranks, self._shelf.keep)
        self._in_time(lambda: self._begin(name, hosted))
        return [tuple(record[:3]) for record in workers.records], workers.rendezvous

    def _ask_announce(self, name: str, rendezvous: Mapping[str, str]) -> None:
        self._groups[name].workers.announce(rendezvous)

    def _begin(self, name: str, hosted: Hosted) -> None:
        self._groups[name] = hosted
        fd = hosted.arrivals
        if fd is not None:
            self._by_fd[fd] = hosted
            self._poll.register(fd, select.EPOLLIN)

    def _ask_relay(self, name: str, addresses: Sequence[tuple[str, int]], n_ranks: int) -> None:
        """Pass calls of a group on to other agents, which have so many ranks of it together."""
        missing = [address for address in addresses if address not in self._below]
        made = {}
        for address in missing:
            sock = socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
            made[address] = Conversation(*greet(sock, self._secret, FOR_RELAY), self._place)
        self._in_time(lambda: self._relay(self._groups[name], addresses, n_ranks, made))

    def _relay(self, hosted: Hosted, addresses: Any, n_ranks: int, made: Mapping[Any, Conversation]) -> None:
        for address, below in made.items():
            self._below[address] = below
            self._converse(below)
        hosted.below, hosted.n_below = [self._below[address] for address in addresses], n_ranks

    def _ask_stop(self, name: str, why: str) -> None:
        done: list[Hosted] = []
        self._in_time(lambda: done.append(self._forget(name)))
        if done[0] is not None:
            done[0].workers.stop(why)

    def _forget(self, name: str) -> Any:
        hosted = self._groups.pop(name, None)
        for fd, watched in list(self._by_fd.items()):
            if watched is hosted:
                self._poll.unregister(fd)
                del self._by_fd[fd]
        return hosted

    def _ask_end(self) -> None:
        self._host.close()

    def _ask_stacks(self, name: str, numbers: Mapping[int, int | None]) -> Mapping[int, str]:
        return self._groups[name].stacks(numbers)

    def _ask_kill(self, name: str, numbers: Mapping[int, int | None], why: str) -> None:
        hosted = self._groups[name]
        found: list[dict[int, Any]] = []
        self._in_time(lambda: found.append(hosted.tickets(numbers)))
        hosted.workers.interrupt(found[0], why)

    def _ask_replace(self, name: str, rank: int) -> tuple[Any, Any]:
        """Start a worker anew: where it is, and how others find rank 0."""
        hosted = self._groups[name]
        hosted.workers.replace(rank)
        self._in_time(hosted.forget_deaths)
        record = dict(zip(hosted.ranks, hosted.workers.records, strict=True))[rank]
        return tuple(record[:3]), hosted.workers.rendezvous

    def _in_time(self, do: Callable[[], object]) -> None:
        """Have something done by the thread that serves, and wait for it."""
        done = threading.Event()

        def run() -> None:
            try:
                do()
            finally:
                done.set()

        self.later(run)
        done.wait()
