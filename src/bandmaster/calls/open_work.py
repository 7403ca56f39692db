"""`OpenWork`: the calls to the same workers that are not over, in the order in which they were submitted.

::

    submit(rows) ──► waiting: calls whose rows are not there, and those behind them
                        │ advance: sends the first ones, as far as their rows are there
                        ▼
                     sent: calls that may not be over
                     in parts: streams and maps, which send calls of their own

One rule says which thread drives a call, that is, sends it and reads its replies: **the thread that waits for it, and
the thread of callbacks (`bandmaster.calls.progress`) if a callback was added.** Both drive the calls before it as well,
since a rank begins a call only when it has ended those before: a failed call that no thread waits for must not hold up
the others. Workers that were given the group send requests of which this process does not know; once there may be such,
the thread of callbacks drives all calls that no thread waits for. No other thread drives calls: a thread that reads for
all would cost a blocking call two switches.

- A waiting call is sent by `advance`. The thread that waits for it calls that (`wait_up_to`). If it was submitted
  without a wait, or a callback was added, callbacks of the rows that it takes call it (`send_in_background`).
- The replies to a sent call are read by `Call.wait` in the thread that waits, and by `Call.look` in the thread of
  callbacks. The one that holds the lock of the call reads for both.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from bandmaster.calls.call import Call, Failures
from bandmaster.calls.request import CallSite
from bandmaster.contract import WorkerCall, Workers
from bandmaster.errors import CallCancelled, CallTimeout
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.forks import free_in_forks, in_forks
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.weak import living

FOREVER = Deadline(None)
MANY = 64  # open calls; with more of them, each new call checks whether the oldest is over


class Waiting(Protocol):
    """A call that holds up those that were submitted after it until it was sent.

    Attributes:
        site: Its `CallSite`: names for messages, and limits.
        is_sent_in_background: Whether it is sent when its rows are there, though no thread waits for it.
    """

    site: CallSite
    is_sent_in_background: bool

    @property
    def parents(self) -> Sequence[Any]:
        """The futures of the rows that it takes, until it was sent."""

    def advance(self) -> bool:
        """Send it if it need not wait. Returns whether the calls after it may be sent. The lock is held."""

    def wait_until_sent(self, deadline: Deadline, last: Any) -> bool:
        """Wait until it can be sent, or ``last``, behind it, is cancelled; False if the time is over before."""

    def tell(self) -> None:
        """Run its callbacks if it is done. The lock is not held."""

    def drive_in_background(self) -> None:
        """Have its callbacks run, and ensure that it ends, though no thread waits for it."""

    def give_up(self, why: BaseException) -> object:
        """Do not send it, for a reason."""

    def end_in_fork(self) -> None:
        """End with a UsageError in a fork of this process; see `Result.end_in_fork`."""

    def cancel(self) -> bool:
        """Do not send it, because the user cancels it."""


class InParts(Protocol):
    """A call that is sent part by part: the requests of a map, or those for the items of a generator.

    Attributes:
        site: Its `CallSite`: names for messages, and limits.
        are_requests: Whether its parts are requests, which run beside each other, and calls behind them wait.
    """

    site: CallSite
    are_requests: bool

    @property
    def is_ended(self) -> bool:
        """Whether it has stopped sending parts."""

    def end_in_fork(self) -> None:
        """End with a UsageError in a fork of this process; see `Result.end_in_fork`."""

    def cancel(self) -> bool:
        """Cancel the parts that run, and send no more."""


# Of the waiting calls of all groups, as the calls of two may take rows of each other.
_LOCK = free_in_forks(threading.RLock())


_place = operator.attrgetter("place")


class Routes(InParts, Protocol):
    """The requests of one method; see `bandmaster.requests.router`."""

    def advance(self) -> None:
        """Send the requests that waited for a place, as far as there are any."""

    def wake(self) -> None:
        """Have a request that waits be sent, if it can be now. Any thread may call this; it does not block."""

    def flush(self) -> None:
        """Send the requests that are about to be sent."""

    def open_requests(self) -> Sequence[Any]:
        """The requests that have not ended."""

    def wait_until_over(self, deadline: Deadline) -> None:
        """Wait until no request is open; raises `CallTimeout` if one took too long."""


class OpenWork:
    """The calls to the same workers, of all groups that have these workers.

    Attributes:
        waiting: The calls that are not sent yet, because rows that they, or calls before them, take are missing.
        routers: Those of the methods whose calls are requests, by submitter and method.
        loads: How busy replicas are with the requests of all methods; kept by routers, by the submitter and the ranks.
        first_replica: The number of the replica that gets a request of this caller if all are equally busy.
        outgoing: The router that has requests which are about to be sent; None if there are none.
        renewed: The ranks that are being replaced, and get no requests.
        died: The ranks that have died as a reply says, and when it came; `Workers.deaths` may not say so yet.
        is_given: Whether workers may call the group.
        sending: Held while requests are sent, and calls beside them, so that all ranks get them in one order.
    """

    def __init__(self) -> None:
        self.waiting: deque[Waiting] = deque()
        self._sent: deque[Call] = deque()
        self._in_parts: WeakValueDictionary[int, InParts] = WeakValueDictionary()
        self._is_advancing = self.is_given = False
        self.routers: dict[tuple[object, str], Routes] = {}
        self.first_replica = 0
        self.loads: dict[tuple[object, frozenset[int]], Any] = {}
        self.outgoing: Routes | None = None
        self.renewed: frozenset[int] = frozenset()
        self.died: dict[int, float] = {}
        self.sending = SigintSafeLock()
        in_forks(self, OpenWork._end_in_fork)

    # --- WAITING ---

    def enqueue(self, call: Waiting, is_waited_for: bool) -> None:
        """Send a call when its rows, and all calls before it, are there.

        Args:
            call: The call.
            is_waited_for: Whether a thread waits for the call, and sends it.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        with _LOCK:
            self.waiting.append(call)
        try:
            if not is_waited_for:
                self.send_in_background(call)
                self.advance()  # another thread may have sent the last call before it meanwhile
        except BaseException:
            call.cancel()
            raise

    def send_in_background(self, call: Waiting) -> None:
        """Send a call, and the calls before it, from callbacks when their rows are there; no thread has to wait."""
        for one in self._up_to(call):
            parents = () if one.is_sent_in_background else one.parents
            one.is_sent_in_background = True
            for parent in parents:
                parent.add_done_callback(lambda _: self.advance())

    def wait_up_to(self, call: Waiting, deadline: Deadline) -> bool:
        """Wait until a call and the calls before it are sent; False if the time is over before."""
        for earlier in self._up_to(call):
            if not earlier.wait_until_sent(deadline, call):
                return False
            self.advance()
        return True

    def first_before(self, call: Waiting) -> list[Any]:
        """The first waiting call, if ``call`` is behind it; an empty list if ``call`` itself is the first."""
        first = next(iter(self._up_to(call)), call)
        return [] if first is call else [first]

    def _up_to(self, call: Waiting) -> list[Waiting]:
        """The waiting calls up to and including a call; none if the call is not waiting."""
        with _LOCK:
            calls = list(self.waiting)
        return calls[: calls.index(call) + 1] if call in calls else []

    def advance(self) -> None:
        """Send the first calls as far as their rows are there."""
        if not self.waiting:
            return
        gone: list[Waiting] = []
        interrupt = None
        with _LOCK:
            if self._is_advancing:  # by this thread: reading the rows of a call has come back here
                return
            self._is_advancing = True
            try:
                while self.waiting:
                    try:
                        if not self.waiting[0].advance():
                            break
                        gone.append(self.waiting[0])
                        self.waiting.popleft()
                    except KeyboardInterrupt as error:  # these may be calls of other threads, which would wait for ever
                        if interrupt is not None and self.waiting:  # the second time: it takes too long
                            self.waiting[0].cancel()
                        interrupt = error
            finally:
                self._is_advancing = False
        for call in gone:  # not under the lock, as it may run callbacks
            call.tell()
        if interrupt is not None:
            for call in gone:
                call.drive_in_background()
            raise interrupt

    def wait_until_sent(self, deadline: Deadline = FOREVER) -> None:
        """Wait until all submitted calls are sent, or never will be. Raises `CallTimeout` if one took too long."""
        with _LOCK:
            waiting = list(self.waiting)
        for call in waiting:
            if not call.wait_until_sent(deadline, call):
                raise CallTimeout(call.site.method, (), deadline.timeout_s or 0.0)
            self.advance()

    def give_up(self) -> None:
        """End all waiting calls without sending them, as their workers were stopped or one of them is replaced."""
        with _LOCK:
            calls = list(self.waiting)
        for call in reversed(calls):  # the last one first, so that none is sent meanwhile
            why = (
                f"{call.site.method} was not sent, as its group was closed or restarted, or one of its ranks replaced, "
                "before the rows that it takes were there; make the call again"
            )
            call.give_up(CallCancelled(why))

    # --- SENT ---

    def add(self, call: Call) -> None:
        """Add a call that is about to be sent, or was."""
        self._sent.append(call)
        try:  # not `suppress`, whose three functions would be called for each call
            while (first := self._sent[0]).has_ended:
                self._sent.remove(first)
        except (IndexError, ValueError):  # it is empty, or another thread was faster
            pass
        if len(self._sent) > MANY:
            self._sent[0].drive()  # perhaps no thread waits for it

    def ahead_of(self, call: Call) -> list[Call]:
        """The calls that were sent before a call, or as one with it; other threads may add or remove some meanwhile."""
        if len(self._sent) < 2:
            return []
        found, is_behind = [], False
        for other in sorted(self._sent.copy(), key=_place):  # threads may have sent them in another order than added
            if other is call:
                is_behind = call.place > 0  # else all others may be ahead of it
            elif is_behind and other.failures is not call.failures:
                break
            else:
                found.append(other)
        return found

    def has_unanswered(self, failures: Failures) -> bool:
        """Whether a rank has not replied to one of the calls that share these failures."""
        return any(call.failures is failures and call.tickets for call in list(self._sent))

    def forget(self, call: Call) -> None:
        """Remove a call that is over."""
        try:  # as in `add`
            self._sent.remove(call)
        except ValueError:  # it was forgotten before
            return

    # --- all of them ---

    def add_in_parts(self, call: InParts) -> None:
        """Register a call that is sent part by part, by a weak reference."""
        self._in_parts[id(call)] = call

    def cancel(self, is_meant: Callable[[CallSite], bool]) -> int:
        """Cancel some calls, and return how many. A call that is sent in parts counts as one."""
        with _LOCK:
            waiting = [call for call in reversed(self.waiting) if is_meant(call.site)]
        n_cancelled = sum([call.cancel() for call in waiting])  # the last one first, so that none is sent meanwhile
        feeds = living(self._in_parts.valuerefs())
        in_parts = [
            call for call in (*list(self.routers.values()), *feeds) if is_meant(call.site) and not call.is_ended
        ]
        n_cancelled += sum([call.cancel() for call in in_parts if not call.are_requests])
        as_one = set()
        for sent in self._unfinished():
            if is_meant(sent.site) and not (sent.is_cancelled or sent.is_cleanup):
                sent.cancel()
                as_one.add(id(sent.failures))
        # Requests last, as the calls behind them begin when they have ended.
        n_cancelled += sum([call.cancel() for call in in_parts if call.are_requests and not call.is_ended])
        return n_cancelled + len(as_one)

    @contextlib.contextmanager
    def renewing(self, rank: int) -> Iterator[None]:
        """Send no requests to a rank within the block, which replaces it."""
        try:
            with self.sending:  # so that no thread chooses replicas meanwhile
                self.renewed = frozenset([rank])
            for router in list(self.routers.values()):
                router.flush()  # to the worker that ends: a new one must not get them before it is constructed
            yield
        finally:
            self.renewed = frozenset()
            self.died = {other: moment for other, moment in self.died.items() if other != rank}
            for router in list(self.routers.values()):
                router.advance()

    def cancel_all(self) -> None:
        """Cancel the calls that are not over, and wait until they are, at most for the grace of each."""
        self.give_up()
        open_calls = self._unfinished()
        for call in open_calls:
            if not call.is_cleanup:
                call.cancel()
        for call in open_calls:
            if call.is_cleanup and not call.wait(call.site.limits().grace):
                call.cancel()
            call.wait(None, is_for_all=True)

    def begin_anew(self) -> None:
        """Drop all calls, which have failed because the workers were stopped; new workers may follow."""
        self.give_up()
        self._sent.clear()

    def wait_until_over(self, deadline: Deadline) -> None:
        """Wait until all submitted calls are over.

        Raises:
            CallTimeout: A call took too long.
        """
        self.wait_until_sent(deadline)
        for router in list(self.routers.values()):
            router.wait_until_over(deadline)
        for call in self._unfinished():
            if not call.wait(deadline.left()):
                raise call.late(deadline.timeout_s or 0.0)

    def read_in_background(self) -> None:
        """Have the sent calls read though no thread waits for them: one that fails holds back the requests behind it.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        for call in list(self._sent):
            if not (call.has_ended or call.is_watched):
                call.read_in_background()

    def wake_requests(self) -> None:
        """Have requests that wait be sent, if they can be now. Any thread may call this; it does not block."""
        for router in list(self.routers.values()):
            router.wake()

    def unanswered(self) -> list[Any]:
        """The calls and requests that were sent, and not seen to end."""
        calls = [call for call in self._sent.copy() if not call.has_ended]
        return calls + [request for router in list(self.routers.values()) for request in router.open_requests()]

    def ranks_of_requests(self) -> list[Sequence[int]]:
        """The ranks of each request that has not ended; none for one that waits for a replica."""
        return [request.ranks for router in list(self.routers.values()) for request in router.open_requests()]

    def send_calls(self, workers: Workers, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls behind the requests that were submitted before."""
        outgoing = self.outgoing  # which another thread may send meanwhile
        if outgoing is not None:
            outgoing.flush()
        if not self.routers or workers.arrivals is None:  # the methods run here, and Ctrl-C is not to wait for them
            workers.call(calls, tickets)
            return
        with self.sending:
            workers.call(calls, tickets)

    def _end_in_fork(self) -> None:
        self.sending.refuse()
        found: list[Any] = [*self.waiting, *self._sent, *self.routers.values(), *self._in_parts.values()]
        for one in found:
            one.end_in_fork()
        self.waiting.clear()
        self._sent.clear()

    def _unfinished(self) -> list[Call]:
        """The sent calls that are not over, in the order they were sent. Replies that have come count."""
        calls = list(self._sent)
        for call in calls:
            call.drive()
        return [call for call in calls if not call.has_ended]
