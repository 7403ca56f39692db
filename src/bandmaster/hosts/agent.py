"""The agent: it takes the calls of one controller for the workers of one host, and sends back their replies.

::

    controller ── link ──► AgentServer ── calls ──► HostRanks, one per group ── lanes ──► workers
    other agents ── connections for rows ──► serve_rows
                 ── connections of a tree ─► calls and replies that are passed on
    workers of other hosts ── connections ─► HostRanks, one for each group and caller
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from bandmaster.codec import Payload
from bandmaster.contract import CLOSED, ShowOutput, Signs, Written
from bandmaster.errors import ClosedError, PlacementError, ResourceError
from bandmaster.errors.failure import Failure
from bandmaster.hosts.handshake import Refused, Secret, welcome
from bandmaster.hosts.link import NO_ANSWER, Address, FrameKind, Link, Message, Purpose, connect, in_memory
from bandmaster.hosts.ranks import HostRanks, WorkersHere
from bandmaster.hosts.rows import Fetch, RowKey, RowLinks, RowStore, StoredRows, serve_rows
from bandmaster.platform.limits import start_thread
from bandmaster.platform.settings import host_timeout_s
from bandmaster.rows.table import contains
from bandmaster.wire.messages import Closed
from bandmaster.wire.poller import Poller
from bandmaster.wire.status_page import AGENT, announce

MAX_STRANGERS = 64  # connections that have not proved that they know the secret; the oldest makes room for another
ACCEPT_AGAIN_S = 0.2  # after a connection could not be accepted
LOOK_S = 1.0  # how often to look whether the host of the controller, of a caller, or of an agent below is gone
OUTPUT_POLL_S = 0.01  # how often to look whether a link takes more of the output of workers
_log = logging.getLogger(__name__)


# Starts the part of a group that the request of a controller asks for; the other argument has the controller show the
# output of the workers. Returns the workers, and their ranks.
StartRanks = Callable[[Any, ShowOutput], tuple[WorkersHere, Sequence[int]]]


class AgentServer:
    """Serves one controller until its link ends.

    Attributes:
        address: The IP address and port that it listens on.
        secret: The secret that the controller and other agents have to know.
        groups: The part of each group that is on this host.
        take_relayed: Called with the value, or an item, of a call that the controller makes for a worker; the lock is
            held.

    Args:
        secret: The secret that the controller and other agents have to know.
        address: The IP address of this host, on which alone it listens.
        controller: The name of the controller in `bandmaster ps`.
        start: Starts workers.
        end: Ends all that was started on this host, and waits for it.
    """

    def __init__(
        self, secret: Secret, address: str, controller: str, start: StartRanks, end: Callable[[], object] = bool
    ) -> None:
        self.secret, self._start, self._end_all = secret, start, end
        self._announced = announce(AGENT, controller)
        self._listening = socket.create_server((address, 0), backlog=128)
        self.address: Address = self._listening.getsockname()[:2]
        self._store: RowStore = {}
        self._links = RowLinks(secret)
        self._poller = Poller()
        self._lock = self._poller.lock  # guards all that follows, but for strangers
        self.groups: dict[str, HostRanks] = {}
        self._called: dict[tuple[Link, str], HostRanks] = {}  # groups as workers of other hosts call them
        self._stopped: dict[str, str] = {}  # groups that were ended, and why: no rank of them starts any more
        self._replacing: dict[str, threading.Lock] = {}  # by group: held while a rank is replaced
        self._last_replacement: dict[str, int] = {}  # by group: its number
        self._controller: Link
        self._below: dict[Address, Link] = {}  # by address: agents that this one passes calls on to
        self._written: deque[Written] = deque()  # output to be shown: with the lock, a thread may wait until it is here
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._meeting = threading.Lock()
        self._first: Future[Link] = Future()  # the link to the controller
        self._serving = 0  # the thread that does
        self.take_relayed: Callable[[Message], object] = bool
        start_thread("bandmaster-agent-listener", self._listen)

    # --- new connections ---

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

    def _welcome(self, sock: socket.socket, peer: Any) -> None:
        with self._meeting:
            if len(self._strangers) == MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):  # the thread that awaits its proof gives up
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[sock] = None
        try:
            trusted, keys, purpose = welcome(sock, self.secret)
        except (Refused, OSError) as error:
            _log.warning("closed a connection from %s:%d: %s", *peer[:2], error)
            sock.close()
            return
        finally:
            with self._meeting:
                self._strangers.pop(sock, None)
        if purpose == Purpose.ROWS:
            serve_rows(Link(trusted, keys, timeout_s=host_timeout_s()), self._store)
            return
        link = Link(trusted, keys, self._place)
        if purpose == Purpose.MESSAGES and not self._first.done():
            self._first.set_result(link)
        elif purpose in (Purpose.RELAY, Purpose.CALLERS):
            with self._lock:
                self._serve(link, self._take if purpose == Purpose.RELAY else self._take_called)
        else:
            link.close()

    # --- serving ---

    def run(self, patience_s: float) -> None:
        """Serve the controller until it is gone, in a thread that is not the main one.

        Args:
            patience_s: Seconds in which it has to connect.
        """
        if not wait([self._first], patience_s).done:
            _log.warning("no controller has connected within %g s", patience_s)
            return
        self._controller, self._serving = self._first.result(), threading.get_ident()
        look_at = 0.0
        with contextlib.suppress(Closed), self._lock:
            self._serve(self._controller, self._take)
            while True:
                every = *self.groups.values(), *self._called.values()
                dues = [due for ranks in every if (due := ranks.due_s) is not None]
                self._poller.receive(min([LOOK_S, *dues]))
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + LOOK_S
                    self._end_what_is_cut()
                while self._written:
                    self._controller.post(FrameKind.OUTPUT, self._written.popleft())
                self._tell()
        self._end_all()

    # --- the lock is held ---

    def _serve(self, other: Link, take: Callable[[Link, Message], object]) -> None:
        """Serve a link from here on."""
        other.serve(self._poller, partial(take, other), partial(self._end, other))

    def _end(self, other: Link, why: str) -> None:
        """A link has ended. Without the controller there is nothing left to do."""
        if other is self._controller:
            raise Closed(why)
        self._poller.ignore(other.fileno())
        for address in [address for address, below in self._below.items() if below is other]:
            del self._below[address]
            self._controller.post(FrameKind.CUT, address, why)
        for ranks in self.groups.values():
            ranks.below = [below for below in ranks.below if below is not other]
            if ranks.home is other:
                ranks.lose_home()
        for key in [key for key in self._called if key[0] is other]:
            self._called.pop(key).cancel()
        other.close()

    def _end_what_is_cut(self) -> None:
        for other in {self._controller, *self._below.values(), *[caller for caller, _ in self._called]}:
            if other.is_cut:
                self._end(other, NO_ANSWER)

    def _tell(self) -> None:
        """Send the replies and deaths of the groups."""
        here = [(self._controller, name, ranks) for name, ranks in self.groups.items()]
        for owner, name, ranks in [*here, *[(*key, ranks) for key, ranks in self._called.items()]]:
            if not ranks.has_news:
                continue
            said, large, deaths = ranks.news()
            if said:
                (ranks.home or owner).post(FrameKind.REPLIES, name, said, large=large)
            if deaths:
                owner.post(FrameKind.DEATHS, name, deaths)

    def _place(self, kind: int, content: tuple[Any, ...], sizes: Sequence[int]) -> Payload:
        """The memory for a large payload: that of a call is received in a segment, which the ranks map."""
        ranks = self.groups.get(content[0]) if kind == FrameKind.CALLS else None
        if ranks is not None:
            with contextlib.suppress(ResourceError, ClosedError):  # the call fails for the same reason, once it is put
                return ranks.workers.reserve(sizes)
        return in_memory(kind, content, sizes)

    def _take(self, other: Link, message: Message) -> None:
        kind, content, large = message
        if kind == FrameKind.FORWARD:
            below = self._below.get(content[0])
            if below is not None:  # else the controller has been told that it is gone
                below.post(content[1], *content[2], large=large)
        elif kind == FrameKind.RELEASE:
            for key in content[0]:
                self._store.pop(key, None)
        elif kind == FrameKind.PING:
            other.post(FrameKind.PONG)
        elif kind == FrameKind.RELAYED:
            self.take_relayed(message)
        elif kind == FrameKind.ASK:
            try:
                start_thread("bandmaster-agent-ask", self._answer, *content)
            except ResourceError as error:
                other.post(FrameKind.ANSWER, content[0], Failure.of(error))
        elif (ranks := self.groups.get(content[0])) is None:
            return  # the group was stopped
        elif kind == FrameKind.CALLS:
            self._call(other, ranks, message)
        elif kind == FrameKind.REPLIES:
            ranks.take_replies(message)
        else:
            (ranks.interrupt if kind == FrameKind.INTERRUPT else ranks.resume)(content[1])

    def _take_called(self, caller: Link, message: Message) -> None:
        """Take a message of a worker of another host, which calls ranks here."""
        if message.kind == FrameKind.PING:
            caller.post(FrameKind.PONG)
            return
        name = message.content[0]
        known, ranks = self.groups.get(name), self._called.get((caller, name))
        if ranks is None and known is not None:
            ranks = self._called[caller, name] = HostRanks(known.workers, known.ranks, {}, self._wake)
        if ranks is None:  # the group was stopped, as the controller tells the caller when this link has ended
            self._end(caller, "the group was stopped")
        elif message.kind == FrameKind.CALLS:
            ranks.take(message, is_passed_on=False)
        elif message.kind == FrameKind.INTERRUPT:
            ranks.interrupt(message.content[1])

    def _call(self, other: Link, ranks: HostRanks, message: Message) -> None:
        _, _, fetches, is_for_all = message.content
        ranks.home = other
        is_passed_on = is_for_all and bool(ranks.below)
        for below in ranks.below if is_passed_on else ():
            below.post(FrameKind.CALLS, *message.content, large=message.large)
        for fetch in fetches:
            self._fetch(fetch, ranks)
        ranks.take(message, is_passed_on)

    def _fetch(self, fetch: Fetch, ranks: HostRanks) -> None:
        """Fetch rows of another host into a segment, unless they are here; there is one copy, of all in the end."""
        copy, n_fetched = self._store.get(fetch.key), len(fetch.rows)
        if copy is not None and not copy.has_failed:
            if copy.numbers is None or contains(copy.numbers, fetch.rows):
                return
            n_fetched += copy.n_fetched
        if n_fetched > fetch.n_rows:  # else this host could fetch all rows many times
            fetch = fetch._replace(rows=range(fetch.n_rows))
        pending = self._links.fetch(fetch, lambda _, __, sizes: self._reserve(ranks, sizes))
        self._store[fetch.key] = StoredRows(pending, fetch.numbers, n_fetched)
        pending.add_done_callback(lambda _: self._go_on())

    # --- from other threads ---

    def _reserve(self, ranks: HostRanks, sizes: Sequence[int]) -> Payload:
        """Memory for fetched rows, of another group if that of the ranks was stopped: it may wait for them as well."""
        for one in (ranks, *self.groups.values()):
            with contextlib.suppress(ClosedError):
                return one.workers.reserve(sizes, is_kept=True)
        raise ClosedError(CLOSED)

    def _go_on(self) -> None:
        """Send the calls whose rows have come: several groups may wait for the same ones."""
        with self._lock:
            for ranks in self.groups.values():
                ranks.advance()
        self._poller.wake()

    def _wake(self) -> None:
        """Have replies sent that another thread has taken; the one that serves sends those that it has taken itself."""
        if threading.get_ident() != self._serving:
            self._poller.wake()

    def show(self, written: Written) -> None:
        """Have the controller show output of a worker; this waits while the link is full."""
        self._written.append(written)
        self._poller.wake()
        while self._controller.has_unsent:
            time.sleep(OUTPUT_POLL_S)

    def _answer(self, number: int, question: Callable[..., object], *args: Any) -> None:
        """Answer a question, in a thread of its own."""
        try:
            said = question(self, *args)
        except BaseException as error:
            said = Failure.of(error)
        with contextlib.suppress(Closed), self._lock:
            self._tell()  # of deaths first, if it was that
        self.tell(FrameKind.ANSWER, number, said)

    def tell(self, kind: FrameKind, *content: Any, large: Mapping[int, Payload] | None = None) -> None:
        """Send a message to the controller."""
        with contextlib.suppress(Closed), self._lock:
            self._controller.post(kind, *content, large=large or {})
        self._poller.wake()

    def _group(self, name: str) -> HostRanks:
        """A group that is asked about. Raises ClosedError if it was stopped."""
        ranks = self.groups.get(name)
        if ranks is None:
            raise ClosedError(self._stopped.get(name, CLOSED))
        return ranks

    # --- questions: a controller asks for one of these methods ---

    def start(self, name: str, said: Any) -> tuple[Sequence[Any], Any]:
        """Start the part of a group: where each rank is, and how others find rank 0 if it is one of them."""
        if name in self._stopped:
            raise ClosedError(self._stopped[name])
        workers, ranks = self._start(said, self.show)
        with self._lock:
            why = self._stopped.get(name)
            if why is None:
                self.groups[name] = HostRanks(workers, ranks, self._store, self._wake)
                if workers.arrivals is not None:
                    self._poller.watch(workers.arrivals, lambda _: workers.check(is_thorough=False))
        if why is not None:
            workers.stop(why)
            raise ClosedError(why)
        return workers.records, workers.rendezvous

    def announce(self, name: str, rendezvous: Mapping[str, str]) -> None:
        """Tell ranks of the rendezvous that rank 0 has opened on another host."""
        self._group(name).workers.announce(rendezvous)

    def relay(self, name: str, addresses: Sequence[Address], n_ranks: int) -> None:
        """Pass calls of a group on to other agents, which have so many ranks of it together."""
        missing = [address for address in addresses if address not in self._below]
        made = {address: self._link_below(address) for address in missing}
        with self._lock:
            for address, below in made.items():
                if address in self._below:  # meanwhile, for another group: calls keep their order on one link alone
                    below.close()
                else:
                    self._below[address] = below
                    self._serve(below, self._take)
            ranks = self._group(name)
            for ip, port in addresses:
                if (ip, port) not in self._below:
                    raise PlacementError(
                        f"host {socket.gethostname()} lost its connection to the agent at {ip}:{port}, to which it has "
                        "to pass calls on"
                    )
            ranks.below, ranks.n_below = [self._below[address] for address in addresses], n_ranks

    def _link_below(self, address: Address) -> Link:
        try:
            return connect(address, self.secret, Purpose.RELAY, self._place)
        except (OSError, Refused) as error:
            raise PlacementError(
                f"host {socket.gethostname()} cannot connect to the agent at {address[0]}:{address[1]}, which it has "
                f"to pass calls on to: {error}; let the hosts of the cluster connect to each other on all ports, and "
                "see `bandmaster doctor --ray`"
            ) from error

    def stop(self, name: str, why: str) -> Sequence[RowKey]:
        """End the part of a group. Returns the keys of its rows here: the replies that tell of some may be lost."""
        with self._lock:
            self._stopped[name] = why  # first: a rank may be about to start
            self._replacing.pop(name, None)
            self._last_replacement.pop(name, None)
            ranks = self.groups.pop(name, None)
            if ranks is not None and ranks.workers.arrivals is not None:
                self._poller.ignore(ranks.workers.arrivals)
        if ranks is not None:
            ranks.workers.stop(why)
        with self._lock:
            self._tell()  # callers on other hosts
            self._called = {key: called for key, called in self._called.items() if key[1] != name}
        return list(ranks.made) if ranks is not None else []

    def end(self) -> None:
        """End all that was started on this host."""
        self._end_all()

    def stacks(self, name: str, numbers: Mapping[int, int | None]) -> Mapping[int, str]:
        """Return the stacks of ranks, given by the numbers of their calls."""
        ranks = self._group(name)
        with self._lock:
            tickets = ranks.tickets(numbers)
        return dict(ranks.workers.stacks(tickets))

    def signs(self, name: str, ranks: Iterable[int]) -> Mapping[int, Signs]:
        """Return the signs of life of ranks."""
        return self._group(name).workers.signs(tuple(ranks))

    def kill(self, name: str, numbers: Mapping[int, int | None], why: str) -> None:
        """End the ranks that are at the calls with these numbers."""
        ranks = self._group(name)
        with self._lock:
            tickets = ranks.tickets(numbers)
        ranks.workers.interrupt(tickets, why)

    def replace(self, name: str, rank: int, number: int, said: Any) -> tuple[Any, Any]:
        """Start a worker anew: where it is, and how others find rank 0.

        Args:
            name: The group.
            rank: The rank.
            number: A number that is larger with each replacement of the group. Ctrl-C may have ended the wait for an
                earlier one, which must not end the worker that a later one has started.
            said: The request to start the rank, which may have been on a host that is lost.
        """
        with self._lock:
            replacing = self._replacing.setdefault(name, threading.Lock())
        with replacing:
            if number < self._last_replacement.get(name, 0):
                raise ClosedError(f"rank {rank} was replaced again meanwhile")
            self._last_replacement[name] = number
            ranks = self.groups.get(name)
            if ranks is None:
                (record,), rendezvous = self.start(name, said)
                return record, rendezvous
            with self._lock:
                for those in [ranks, *[called for (_, other), called in self._called.items() if other == name]]:
                    those.forget(rank)
            ranks.workers.replace(rank)
            return ranks.workers.records[ranks.ranks.index(rank)], ranks.workers.rendezvous
