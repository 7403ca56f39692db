"""Calls that take rows which are not there yet: each is sent when they are, behind those that were submitted before.

::

    submit(rows) ──► LaterCall ──► LaterCalls, in the order of submission
                         ▲             └── advance: sends the first ones, as far as their rows are there
                         │                     ▲                   ▲
                       Future            who waits for it    the thread of callbacks, when rows come
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from bandmaster.calls.outcome import Outcome, late, wait_for_all
from bandmaster.calls.pending import CallSite, PendingCall
from bandmaster.calls.progress import Watchers
from bandmaster.errors import CallCancelled, CallTimeout
from bandmaster.platform.deadline import Deadline

__all__ = ["LaterCall", "LaterCalls", "Waiting"]


class LaterCall:
    """A call that was submitted and not sent yet, in the place that a sent one has in its future.

    Attributes:
        site: What messages say about it.
        keeps_rows: Whether its rows will stay where they are made.
        parents: The futures of the rows that it takes.
        error: Why it will not be sent; None as long as it may be.
        is_cancelled: Whether it was cancelled.
        on_sent: Called with the call that was sent.

    Args:
        site: What messages say about it.
        keeps_rows: Whether its rows will stay where they are made.
        parents: The futures of the rows that it takes.
        send: Sends it, and returns what was sent; None for a stream, which looks after its own calls.
        others: The calls to the same workers that were not sent yet.
    """

    rows_are_here = False
    outcome: Any = None

    def __init__(
        self,
        site: CallSite,
        keeps_rows: bool,
        parents: Sequence[Any],
        send: Callable[[], Any],
        others: LaterCalls,
    ) -> None:
        self.site, self.keeps_rows, self.parents = site, keeps_rows, tuple(parents)
        self.error: BaseException | None = None
        self.is_cancelled = self.is_sent_in_background = False
        self.on_sent: Callable[[PendingCall], None] = lambda call: None
        self._sent: PendingCall | None = None
        self._watchers = Watchers()
        self._send: Callable[[], Any] | None = send
        self._others = others

    @property
    def is_done(self) -> bool:
        """Whether it will not be sent."""
        return self.error is not None

    is_over = is_done

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it was sent and is done, or will not be sent; False when the time is over before."""
        if self.is_done:
            return True
        deadline = Deadline(timeout_s)
        if not self._others.wait_up_to(self, deadline):
            return False
        return self.is_done if self._sent is None else self._sent.wait(deadline.left())

    def advance(self) -> bool:
        """Send it if the rows that it takes are there; does not block. What goes wrong is its error."""
        if not self.is_done:
            if not wait_for_all(self.parents, Deadline(0.0)):
                return False
            self._send_now()
        return True

    def wait_until_sent(self, timeout_s: float | None) -> bool:
        """Wait until nothing is missing for it to be sent; False when the time is over before."""
        return wait_for_all(self.parents, Deadline(timeout_s))

    @property
    def waits_for(self) -> Sequence[Outcome]:
        """The first call to the same workers that was not sent, and the calls of the rows that it takes."""
        return [*self._others.first_before(self), *(parent._call for parent in self.parents)]

    def _send_now(self) -> None:
        send, self._send, self.parents = self._send, None, ()
        if send is None:
            return
        try:
            self._sent = send()
        except Exception as error:
            self.error = error
        except BaseException:
            self.error = CallCancelled(f"{self.site.method} was interrupted before it was sent; make the call again")
            raise
        else:
            self.on_sent(self._sent)

    def cancel(self) -> bool:
        """Do not send it."""
        if self._sent is not None:
            return self._sent.cancel()
        self.is_cancelled = True
        self.give_up(CallCancelled(f"{self.site.method} was cancelled before it was sent; make the call again"))
        return True

    def late(self, timeout_s: float) -> CallTimeout:
        """The error for who has waited for so long."""
        why = "takes its rows" if self.parents else "was submitted behind a call that takes its rows"
        return late(self, timeout_s, why)

    def watch(self, when_done: Callable[[], object]) -> None:
        """Call a function when it was sent, or will not be, though no thread waits for it."""
        self._others.send_in_background(self)
        self._watchers.add(when_done)

    def tell(self) -> None:
        """Tell who watches that it was sent, or will not be."""
        self._watchers.tell()

    def give_up(self, why: BaseException) -> None:
        """Do not send it, for a reason."""
        self.error = self.error or why
        self._send, self.parents = None, ()
        self._others.advance()
        self.tell()

    def drive(self) -> None:
        """Send what can be sent."""
        self._others.advance()

    def bring_rows(self, deadline: Deadline) -> None:
        """Nothing: there is an error."""

    def release(self) -> None:
        """Nothing is held."""

    def table(self) -> Any:
        """Nothing: there is an error."""
        raise AssertionError("who asks has waited")


class Waiting(Protocol):
    """A call that holds up those that were submitted after it until it was sent.

    Attributes:
        site: What messages say about it.
        parents: The futures of the rows that it takes, until it was sent.
        is_sent_in_background: Whether it is sent when these are done, though no thread waits for it.
        is_done: Whether it has its result, or will not be sent.
    """

    site: CallSite
    parents: tuple[Any, ...]
    is_sent_in_background: bool

    @property
    def is_done(self) -> bool: ...  # noqa: D102

    def advance(self) -> bool:
        """Send what can be sent without waiting; whether the calls after it may be sent. The lock is held."""

    def wait_until_sent(self, timeout_s: float | None) -> bool:
        """Wait until nothing is missing for it to be sent; False when the time is over before."""

    def tell(self) -> None:
        """Tell who watches that it was sent."""

    def give_up(self, why: BaseException) -> None:
        """Do not send it, for a reason."""

    def cancel(self) -> bool:
        """Do not send it, as the user wants."""


_LOCK = threading.RLock()  # of all groups: the calls of two may take rows of each other


class LaterCalls:
    """The calls to the same workers that were not sent yet.

    Attributes:
        calls: In the order in which they were submitted.
    """

    def __init__(self) -> None:
        self.calls: deque[Waiting] = deque()
        self._lock = _LOCK
        self._is_advancing = False

    def add(self, call: Waiting, is_waited_for: bool) -> None:
        """Send a call when its rows, and all calls before it, are there.

        Args:
            call: The call.
            is_waited_for: Whether a thread waits for it, which sends it.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        with self._lock:
            self.calls.append(call)
        try:
            if not is_waited_for:
                self.send_in_background(call)
        except BaseException:
            call.cancel()
            raise

    def send_in_background(self, call: Waiting) -> None:
        """Have a call, and those before it, be sent when their rows are there, though no thread waits for them."""
        for one in self.up_to(call):
            parents = () if one.is_sent_in_background else one.parents
            one.is_sent_in_background = True
            for parent in parents:
                parent.add_done_callback(lambda _: self.advance())

    def wait_up_to(self, call: Waiting, deadline: Deadline) -> bool:
        """Wait until the calls before a call, and it itself, were sent; False when the time is over before."""
        for earlier in self.up_to(call):
            if not earlier.wait_until_sent(deadline.left()):
                return False
            self.advance()
        return True

    def first_before(self, call: Waiting) -> list[Any]:
        """The first of the calls that were not sent, which one of them waits for; none for this one itself."""
        first = next(iter(self.up_to(call)), call)
        return [] if first is call else [first]

    def up_to(self, call: Waiting) -> list[Waiting]:
        """The calls that are sent before a call, and the call itself; none if it is not waiting."""
        with self._lock:
            calls = list(self.calls)
        return calls[: calls.index(call) + 1] if call in calls else []

    def advance(self) -> None:
        """Send the first calls as far as their rows are there."""
        sent: list[Waiting] = []
        with self._lock:
            if self._is_advancing:  # by this thread, which asks a call for its rows that takes rows of another one here
                return
            self._is_advancing = True
            try:
                while self.calls and self.calls[0].advance():
                    sent.append(self.calls.popleft())
            finally:
                self._is_advancing = False
        for call in sent:  # not under the lock, as it may run callbacks
            call.tell()

    def wait(self) -> None:
        """Wait until all of them were sent, or will not be."""
        while self.calls:
            with suppress(IndexError):  # another thread was faster
                self.calls[0].wait_until_sent(None)
            self.advance()

    def cancel(self, is_meant: Callable[[CallSite], bool]) -> int:
        """Cancel some of them, the last ones first, so that none is sent meanwhile. Returns how many."""
        with self._lock:
            calls = [call for call in reversed(self.calls) if is_meant(call.site) and not call.is_done]
        return sum([call.cancel() for call in calls])

    def give_up(self, why: Callable[[str], BaseException]) -> None:
        """Send none of them; ``why`` returns the reason for a method."""
        with self._lock:
            calls = list(self.calls)
            self.calls.clear()
        for call in calls:
            call.give_up(why(call.site.method))
