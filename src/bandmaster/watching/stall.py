"""`Stall`: what is known of a call that made no progress; and what follows, as its ``on_stall`` says.

A policy does what a user could do: cancel the call, restart the group, replace a rank. What takes long, or is the
user's, runs in a thread of its own, so that other groups are still looked after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from bandmaster.calls.options import RAISE, REPLACE, RESTART, WARN
from bandmaster.contract import Workers
from bandmaster.errors import ResourceError, Stalled, UsageError
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.platform.limits import start_thread

ENDED = "ended by the controller, as on_stall='replace' says: other ranks waited for it"
_log = logging.getLogger(__name__)


class Stall(NamedTuple):
    """A call that made no progress; or the start of a group, or a turn that a thread waits for.

    Attributes:
        group: The name of its group.
        method: ``"Class.method"``.
        ranks: The ranks that owed a reply.
        seconds: Seconds without progress, when it was noticed.
        text: The notice.
        at: When it was noticed, in seconds since the epoch.
        guilty: Those of the ranks that the others wait for; all of them, if none comes before others.
    """

    group: str
    method: str
    ranks: tuple[int, ...]
    seconds: float
    text: str
    at: float
    guilty: tuple[int, ...] = ()


class Renewed(Protocol):
    """A group whose processes can be renewed."""

    _ownership: Ownership

    def restart(self) -> None: ...  # noqa: D102
    def replace(self, rank: int) -> None: ...  # noqa: D102


class Policies:
    """Does what the policies of the calls of one group say, in the thread that looks after them."""

    _renewal: Future[None] | None = None

    @property
    def is_renewing(self) -> bool:
        """Whether the group is being restarted, or a rank of it replaced."""
        return self._renewal is not None and not self._renewal.done()

    def act(self, stalls: Mapping[Any, Stall], group: Renewed | None, workers: Workers | None) -> None:
        """Do what the policies of some calls say. While their group is being renewed, calls are ended alone.

        A call of the hook of the renewal is one of these: it may wait for a rank that has stalled as well.

        Args:
            stalls: What was told of each call.
            group: Their group; None for its start and for turns, which can be ended only.
            workers: Its workers.
        """
        ended: dict[Any, Stall] = {}
        for call, stall in stalls.items():
            policy = call.site.limits().on_stall
            if not isinstance(policy, str):
                with suppress(ResourceError):  # there is no thread for it
                    start_thread("bandmaster-on-stall", _call_user, policy, stall)
            elif policy != WARN and (group is None or policy == RAISE):
                call.expire(Stalled(stall.text, stall))
            elif policy != WARN and self.is_renewing:
                call.expire(Stalled(stall.text, stall, self._renewal))
            elif policy != WARN:
                ended[call] = stall
        if ended and group is not None and workers is not None:
            self._renew(ended, group, workers)

    def _renew(self, ended: Mapping[Any, Stall], group: Renewed, workers: Workers) -> None:
        self._renewal = renewal = Future[None]()
        ranks = {rank for stall in ended.values() for rank in stall.guilty}
        is_for_one = all(len(stall.guilty) == 1 for stall in ended.values())
        is_replaced = is_for_one and all(call.site.limits().on_stall == REPLACE for call in ended)
        for call, stall in ended.items():
            call.expire(Stalled(stall.text, stall, renewal))
        try:
            start_thread("bandmaster-on-stall", _renew, group, workers, sorted(ranks) if is_replaced else (), renewal)
        except ResourceError as error:
            _log.warning("on_stall=%r has failed: %s", REPLACE if is_replaced else RESTART, error)
            renewal.set_exception(error)


def _renew(group: Renewed, workers: Workers, ranks: Sequence[int], renewal: Future[None]) -> None:
    """Replace ranks of a group, or restart it if there are none; or if others have died, or stall in the hook."""
    try:
        try:
            for rank in ranks:
                workers.interrupt({rank: None}, ENDED)  # first, so that ranks in a collective with it do not wait on
                group.replace(rank)
        except (UsageError, Stalled) as error:
            if not group._ownership.is_open:
                raise
            _log.warning("the group is restarted, as on_stall=%r is not possible: %s", REPLACE, error)
            ranks = ()
        if not ranks:
            group.restart()
    except BaseException as error:
        if group._ownership.is_open:  # else the user has closed it meanwhile
            _log.exception("on_stall=%r has failed", REPLACE if ranks else RESTART)
        renewal.set_exception(error)
    else:
        renewal.set_result(None)


def _call_user(policy: Callable[[Stall], object], stall: Stall) -> None:
    try:
        policy(stall)
    except Exception:
        _log.exception("the on_stall function of %s has raised", stall.method)
