"""`Stragglers`: ends a request on the other ranks of a replica once it has failed on one, for which they may wait."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from bandmaster.calls.escalation import DEATH_PATIENCE_S, PATIENCE_S, Escalation, Step
from bandmaster.calls.request import CallSite
from bandmaster.contract import Ticket, Workers
from bandmaster.errors.failure import Failure, FailureKind, is_in_debugger


class RunsOnSeveral(Protocol):
    """A request to a replica of several ranks; see `bandmaster.requests.request`."""

    site: CallSite
    workers: Workers
    is_done: bool

    @property
    def unanswered(self) -> dict[int, Ticket]:
        """The tickets of the ranks that have not replied."""

    def stacks(self) -> Mapping[int, str]:
        """The Python stacks of these ranks."""


class Stragglers:
    """The ranks that go on with a request, a watch of the thread of callbacks; see `bandmaster.calls.escalation`.

    Attributes:
        workers: The workers.
        due: The moment of the next step.

    Args:
        request: The request.
        failed: The ranks on which it has failed, and how.
    """

    def __init__(self, request: RunsOnSeveral, failed: Mapping[int, Failure]) -> None:
        self.workers, self._request, self._failed = request.workers, request, failed
        self._escalation = Escalation(request.site.limits().grace)
        has_died = any(failure.kind is FailureKind.DIED for failure in failed.values())
        self._escalation.begin(time.monotonic(), DEATH_PATIENCE_S if has_died else PATIENCE_S)
        self.due = self._escalation.next

    def look(self) -> bool:
        """Take the steps that are due. Returns whether all ranks have ended the request."""
        while not self._request.is_done and (step := self._escalation.due(time.monotonic())) is not None:
            left = self._request.unanswered
            if step is Step.INTERRUPT:
                self.workers.interrupt(left)
            elif any(map(is_in_debugger, self._request.stacks().values())):
                self._escalation.put_off_the_end(time.monotonic())
            else:
                rank, failure = next(iter(self._failed.items()))
                why = f"ended by the controller, as it had not stopped {self._request.site.limits().grace:g} s after "
                why += f"{self._request.site.method} failed on rank {rank} ({failure.summary.partition(chr(10))[0]})"
                self.workers.interrupt(dict.fromkeys(left), why)
        self.due = self._escalation.next
        return self._request.is_done
