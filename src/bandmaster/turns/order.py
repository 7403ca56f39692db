"""Which group has its turn on which slots, who waits for one, and whether a wait could end. No call is made here.

::

    Request ── acquire: waits for rivals' owners, or raises if that would never end ──► Claim.owners
       ▲                                                                                   │
       └───────────────────────────── release: wakes who waits ◄──────────────────────────┘

Two claims are rivals if they share a slot. A claim with an owner has its turn; a rival can then only have its own
if both were requested together.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bandmaster.errors import CallCancelled, TurnTimeout, UsageError
from bandmaster.platform.deadline import Deadline

__all__ = ["ORDER", "Claim", "Order", "Owner", "Request"]


class Owner(NamedTuple):
    """The thread that has a turn, or the asyncio task in it."""

    thread: int
    task: Any = None

    @classmethod
    def current(cls) -> Owner:
        """The calling thread, and the task that it runs if there is one."""
        asyncio = sys.modules.get("asyncio")  # a program that has not imported it has no task
        try:
            task = None if asyncio is None else asyncio.current_task()
        except RuntimeError:  # no event loop runs in this thread
            task = None
        return cls(threading.get_ident(), task)


class Claim:
    """The slots of one group, and who has its turn on them.

    Attributes:
        name: The group's name.
        places: Its slots.
        owners: The requests by which each owner of its turn has entered it; empty if the group does not have its turn.
        has_begun: Whether the turn has begun: its rivals have yielded, and the group has resumed.
    """

    def __init__(self, name: str, places: frozenset[Hashable]) -> None:
        self.name, self.places = name, places
        self.owners: dict[Owner, list[Request]] = {}
        self.has_begun = False

    @property
    def is_open(self) -> bool:
        """Whether the group is not closed. A closed group is nobody's rival."""
        return True

    def check(self) -> None:
        """Raise if the group cannot have a turn any more."""

    def shares_with(self, other: Claim) -> bool:
        """Whether it is another group's claim on one of the same slots."""
        return other is not self and not self.places.isdisjoint(other.places)


@dataclass(eq=False)
class Request:
    """A request for the turns of some groups at once.

    Attributes:
        claims: The groups.
        owner: The thread or task that asks.
        blocks_thread: Whether the owner's whole thread waits, with all of its tasks.
        timeout_s: How long it may wait, for messages; None for no limit.
        is_cancelled: Whether it was given up.
        is_entered: Whether the turns have begun, if that is for another thread to know.
    """

    claims: Sequence[Claim]
    owner: Owner
    blocks_thread: bool = True
    timeout_s: float | None = None
    is_cancelled: bool = field(default=False, init=False)
    is_entered: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.timeout_s)
        self.number = 0  # in the order in which requests arrive

    def blocks(self, owner: Owner) -> bool:
        """Whether an owner cannot go on while this request waits."""
        return owner == self.owner or (self.blocks_thread and owner.thread == self.owner.thread)


class _Blocker(NamedTuple):
    """Why a request has to wait: the turn of ``holder`` has an owner, and ``wanted`` is its rival."""

    wanted: Claim
    holder: Claim
    owner: Owner


class Order:
    """The claims of all groups of this controller, and the requests that wait.

    Attributes:
        changed: Held while anything here is read or changed; notified of every change that may end a wait.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._claims: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._taken: dict[Claim, None] = {}  # those that have owners
        self._waiting: list[Request] = []
        self._numbers = itertools.count()

    def add(self, claim: Claim) -> None:
        """Add the claim of a new group. It leaves when the group is closed or collected."""
        with self.changed:
            self._claims.add(claim)

    def rivals(self, claim: Claim) -> list[Claim]:
        """The other open groups that share a slot with a group, by name."""
        with self.changed:
            found = [other for other in self._claims if claim.shares_with(other) and other.is_open]
        return sorted(found, key=lambda other: other.name)

    def holders(self, claim: Claim) -> list[Claim]:
        """The rivals of a group that have their turns."""
        with self.changed:
            return [other for other in self._taken if claim.shares_with(other) and other.is_open]

    def acquire(self, request: Request) -> list[Claim]:
        """Wait until the groups can have their turns, and make the owner of the request an owner of them.

        Returns:
            The groups that had no turn before. Their turns begin with `begin`.

        Raises:
            UsageError: The wait would never end.
            TurnTimeout: Other groups had their turns for too long.
            ClosedError: One of the groups was closed.
        """
        with self.changed:
            request.number = next(self._numbers)
            self._waiting.append(request)
            try:
                self._check_wait_can_end(request)
                while not self._is_free(request):
                    if not self.changed.wait(request.deadline.left()) and not self._is_free(request):
                        raise self._late(request)
            finally:
                self._waiting.remove(request)
                self.changed.notify_all()  # a request that arrived later may be free now
            new = [claim for claim in request.claims if not claim.owners]
            for claim in request.claims:
                claim.owners.setdefault(request.owner, []).append(request)
                self._taken[claim] = None
            return new

    def begin(self, claims: Sequence[Claim]) -> None:
        """Begin the turns of groups: others may own them as well, and their calls are sent."""
        with self.changed:
            for claim in claims:
                claim.has_begun = True
            self.changed.notify_all()

    def release(self, request: Request) -> None:
        """Take back what `acquire` has given."""
        with self.changed:
            for claim in request.claims:
                claim.owners[request.owner].remove(request)
                if not claim.owners[request.owner]:
                    del claim.owners[request.owner]
                if not claim.owners:
                    claim.has_begun = False
                    del self._taken[claim]
            self.changed.notify_all()

    def wake(self) -> None:
        """Have requests that wait look again: a group was closed, or a request cancelled."""
        with self.changed:
            self.changed.notify_all()

    def _is_free(self, request: Request) -> bool:
        for claim in request.claims:
            claim.check()
        if request.is_cancelled:
            raise CallCancelled("the task that waited for a turn was cancelled")
        return next(self._blockers(request), None) is None and not self._is_behind(request)

    def _blockers(self, request: Request) -> Iterator[_Blocker]:
        """The owners that a request waits for. Nothing else can keep it waiting forever.

        Whether it waits for an owner depends on what these two have, and on nobody else: so two that both wait cannot
        come to wait for each other later, and it is enough to look for circles when a wait begins.
        """
        for claim in request.claims:
            if request.owner in claim.owners:
                continue
            if claim.owners and not claim.has_begun:  # its owners share it once it has begun
                yield from (_Blocker(claim, claim, owner) for owner in claim.owners)
            for rival in self.holders(claim):
                may_share = rival in request.claims  # with itself, or with a request for the same two
                for owner in rival.owners:
                    if not (may_share and (owner == request.owner or owner in claim.owners)):
                        yield _Blocker(claim, rival, owner)

    def _is_behind(self, request: Request) -> bool:
        """Whether it has to let an earlier request go first. An owner of a turn never has to: that could be in vain.

        It joins a turn ahead of an earlier request only beside an owner that arrived before both. Such owners get
        fewer, so that threads which join each other's turns again and again cannot keep a rival waiting.
        """
        if any(request.blocks(owner) for claim in self._taken for owner in claim.owners):
            return False
        for earlier in itertools.takewhile(lambda other: other is not request, self._waiting):
            for claim in request.claims:
                joins = any(entered[0].number < earlier.number for entered in claim.owners.values())
                if not joins and any(claim.shares_with(other) for other in earlier.claims):
                    return True
        return False

    def _check_wait_can_end(self, request: Request) -> None:
        """Raise UsageError if the request waits, perhaps by way of other requests, for its own thread or task."""
        todo: list[tuple[_Blocker, ...]] = [(blocker,) for blocker in self._blockers(request)]
        seen: set[Owner] = set()
        while todo:
            path = todo.pop(0)
            *_, (wanted, holder, owner) = path
            if wanted is holder:  # which begins in a thread that waits for no turn
                continue
            if request.blocks(owner):
                raise UsageError(_never_ends(request, path))
            if owner not in seen:
                seen.add(owner)
                blocked = [other for other in self._waiting if other is not request and other.blocks(owner)]
                todo += [(*path, blocker) for other in blocked for blocker in self._blockers(other)]

    def _late(self, request: Request) -> TurnTimeout:
        wanted = ", ".join(repr(claim.name) for claim in request.claims)
        holders = ", ".join({repr(blocker.holder.name): None for blocker in self._blockers(request)})
        why = f"group {holders} has its turn on the same slots" if holders else "an earlier request goes first"
        return TurnTimeout(
            f"group {wanted} did not get its turn within {request.timeout_s:g} s: {why}; end that turn, or "
            f"wait longer, for example with turn(timeout={2 * (request.timeout_s or 1):g})"
        )


def _never_ends(request: Request, path: Sequence[_Blocker]) -> str:
    wanted, held = path[0].wanted, path[-1].holder
    if len(path) == 1 and path[0].owner == request.owner:
        what = "this task" if request.owner.task is not None else "this thread"
        return (
            f"group {wanted.name!r} cannot have its turn: {what} has the turn of group {held.name!r}, which shares "
            "slots with it; end that turn first, or take both at once with turn(other_group)"
        )
    if len(path) == 1:
        return (
            f"group {wanted.name!r} cannot have its turn: another task of this thread has the turn of group "
            f"{held.name!r}, and could not end it while the thread waits; write async with"
        )
    chain = "; ".join(
        f"a thread or task has the turn of {before.holder.name!r} and waits for that of {after.wanted.name!r}"
        for before, after in itertools.pairwise(path)
    )
    return (
        f"group {wanted.name!r} would wait for its turn forever: {chain}; and this one has the turn of {held.name!r}. "
        "Take turns in the same order everywhere, or all at once with turn(other_group)"
    )


ORDER = Order()  # of this controller: two pools may share slots, and a cycle of waits may go through several pools
