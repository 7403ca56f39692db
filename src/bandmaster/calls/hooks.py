"""The hooks by which features take part in a call, without the path of a call importing them.

::

    admit    Submitter.gate   may the group be called now? (turns)
    trace    hooks.trace      a record of the call, notified of each of its moments (tracing)
    result   Result           a future stands for any result: streams and maps make their own (flow, requests)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from bandmaster.calls.request import CallSite
from bandmaster.contract import Workers


class Traced(Protocol):
    """A call or request that a trace records.

    Attributes:
        site: Its `CallSite`.
    """

    site: CallSite

    def take_arrived(self) -> None:
        """Take the replies that have arrived, so that its record says if it has ended. It does not wait."""


class CallTrace(Protocol):
    """The record of one call.

    Attributes:
        returned_nbytes: Bytes of values that the controller received.
        is_request: Whether it is that of a request.
    """

    returned_nbytes: int
    is_request: bool

    def is_encoded(self, nbytes: int) -> None:
        """Record that the arguments of the call are encoded."""

    def is_sent(self) -> None:
        """Record that the call is sent."""

    def came(self, rank: int, ticket: Any, value: Any) -> None:
        """Record the reply of a rank."""

    def read(self, nbytes: int, way: str, source: Any, rank: int | None) -> None:
        """Record that ranks read rows that a rank has made in another call, whose record is ``source``."""

    def is_done(self, error: BaseException | None, is_read: bool = True) -> None:
        """Record that the call has ended, with an error or without; ``is_read`` says whether it has its result."""


class Gate:
    """Says when a group may be called: always, or in its turns, see `bandmaster.turns.turns`."""

    @property
    def note(self) -> str:
        """The part of the group's repr that says whether it has its turn; "" for nothing to say."""
        return ""

    def admitted(self, label: str) -> AbstractContextManager[None]:
        """The context in which a call is sent. Raises UsageError if none may be sent now."""
        return nullcontext()

    def renewal(self) -> AbstractContextManager[None]:
        """The context in which the group's workers are constructed."""
        return nullcontext()

    def is_new(self) -> None:
        """Note that all workers were constructed again."""

    def has_new(self, rank: int) -> None:
        """Note that the worker of one rank was constructed again."""


OPEN = Gate()  # of a group that takes no turns


class Hooks:
    """The hooks of all groups of this process.

    Attributes:
        trace: Begins the record of a call, by the call and its workers; None as long as nothing is recorded.
    """

    trace: Callable[[Traced, Workers], CallTrace] | None = None


hooks = Hooks()
