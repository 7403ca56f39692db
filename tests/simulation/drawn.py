"""What is drawn for a program: its kind, and its calls."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np

from simulation.columns import Columns

LATE_S = 1.5  # between the last reply of a call and the return of a thread that waits for it: less than any look around


class Raised(Exception):
    """Raised by a simulated method."""


class Kind(NamedTuple):
    """What a program is like.

    Attributes:
        n_ranks: Ranks of the group.
        n_threads: Threads of the controller, beside those of the library.
        n_steps: Steps of each thread.
        raising: Share of calls in which a rank raises.
        hanging: Share of those in which one takes long.
        cancelling: Share of those that are cancelled.
        dying: Share of those in which one dies.
        asking: Share of requests among all calls.
        hot: See `World`.
        n_interrupts: How often Ctrl-C is pressed.
        switch_every: See `World`.
        awaiting: Share of steps in which a thread awaits several requests in an event loop.
        renewing: Share of steps of the main thread in which it restarts the group, or replaces a rank.
        n_hosts: Hosts that the ranks are on; 0 for the controller's.
        is_inprocess: Whether the ranks are objects in the controller's process, on the true backend for these.
        cutting: Share of steps of the main thread in which a host is cut off, or its agent killed.
        passing: Share of steps with rows that ranks keep: operations on them, and calls that take them.
        joining: Share of these rows that have columns with names, which are joined and chosen.
        choosing: Share of steps in which a thread waits for several calls at once.
        turning: Share of steps in which it takes the turn of the group, or of another one on the same slots.
        stalling: Share of steps of the main thread in which a rank stands still, and is noticed or not.
        mapping: Share of steps in which a thread maps a method over rows, or takes the results of ranks as they come.
        yielding: Share of steps in which it takes the items of generators.
        calling: Share of steps in which it calls a group whose workers call the other one in turn.
        circling: Share of the calls of workers whose ranks call the first group back.
        retrying: Share of requests that are sent again if their replica has died; it dies often.
        aiming: Share of requests that name their replica, or go to all of them.
        limiting: Share of calls that have a limit of time themselves.
        closing: Share of steps in which a thread closes the group, which others use.
        acting: Share of steps in which a call stands still that is ended, perhaps with a rank or the group.
        is_tree: Whether the agents of the hosts pass messages on to each other.
        is_colocated: Whether the ranks have two workers each, of which either gets half of the calls.
    """

    n_ranks: int
    n_threads: int
    n_steps: int
    raising: float
    hanging: float
    cancelling: float
    dying: float
    asking: float
    hot: float
    n_interrupts: int
    switch_every: float
    awaiting: float = 0.0
    renewing: float = 0.0
    stalling: float = 0.0
    n_hosts: int = 0
    cutting: float = 0.0
    passing: float = 0.0
    mapping: float = 0.0
    yielding: float = 0.0
    choosing: float = 0.0
    turning: float = 0.0
    is_inprocess: bool = False
    calling: float = 0.0
    circling: float = 0.0
    retrying: float = 0.0
    aiming: float = 0.0
    limiting: float = 0.0
    closing: float = 0.0
    acting: float = 0.0
    joining: float = 0.0
    is_colocated: bool = False
    is_tree: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Kind:
        """What the program of a seed is like."""
        draw = random.Random(f"kind {seed}")
        faults = draw.random()
        drawn = cls(
            n_ranks=draw.choice([1, 2, 2, 3, 4]),
            n_threads=draw.choice([0, 1, 2, 3]),
            n_steps=draw.choice([10, 20, 50]) if faults > 0.4 else draw.choice([50, 200]),
            raising=0.1 * draw.random() if faults > 0.4 else 0.0,
            hanging=0.05 * draw.random() if faults > 0.4 else 0.0,
            cancelling=0.2 * draw.random() if faults > 0.4 else 0.0,
            dying=0.02 * draw.random() if faults > 0.7 else 0.0,
            asking=draw.choice([0.0, 0.0, 0.3, 0.8, 1.0]),
            hot=draw.choice([0.0, 0.0, 0.05, 0.15, 0.3]),
            n_interrupts=draw.choice([0, 0, 0, 3]),
            switch_every=draw.choice([3.0, 10.0, 30.0, 100.0]),
            awaiting=draw.choice([0.0, 0.0, 0.05, 0.2]),
            renewing=draw.choice([0.0, 0.0, 0.02, 0.06]) if faults > 0.4 else 0.0,
            stalling=draw.choice([0.0, 0.0, 0.0, 0.05]),
            n_hosts=draw.choice([0, 0, 0, 1, 2, 3]),
            passing=draw.choice([0.0, 0.0, 0.1, 0.3]),
            cutting=draw.choice([0.0, 0.0, 0.03]) if faults > 0.4 else 0.0,
            mapping=draw.choice([0.0, 0.0, 0.1, 0.3]),
            yielding=draw.choice([0.0, 0.0, 0.1, 0.2]),
            choosing=draw.choice([0.0, 0.05]),
            turning=draw.choice([0.0, 0.0, 0.0, 0.2]),
            retrying=random.Random(f"retrying {seed}").choice([0.0, 0.5]) if faults > 0.7 else 0.0,
            aiming=random.Random(f"aiming {seed}").choice([0.0, 0.0, 0.4]),
            limiting=random.Random(f"limiting {seed}").choice([0.0, 0.0, 0.3]),
            closing=random.Random(f"closing {seed}").choice([0.0, 0.0, 0.0, 0.02]) if faults > 0.4 else 0.0,
            acting=random.Random(f"acting {seed}").choice([0.0, 0.0, 0.0, 0.05]) if faults > 0.4 else 0.0,
        )
        if drawn.passing:
            drawn = drawn._replace(joining=random.Random(f"joining {seed}").choice([0.0, 0.7]))
        if draw.random() < 0.85:
            if draw.random() < 0.85:
                if drawn.n_hosts > 1 and (tree := random.Random(f"tree {seed}")).random() < 0.3:
                    n_hosts = tree.choice([2, 3, 5])
                    drawn = drawn._replace(is_tree=True, n_hosts=n_hosts, n_ranks=n_hosts + tree.choice([0, 1]))
                if drawn.turning or drawn.stalling:
                    return drawn
                return drawn._replace(is_colocated=random.Random(f"colocated {seed}").random() < 0.2)
            calling = draw.choice([0.1, 0.3, 0.6])  # each of its calls stands for several
            circling = random.Random(f"circling {seed}").choice([0.0, 0.2, 0.5])
            drawn = drawn._replace(turning=0.0, stalling=0.0, n_steps=min(drawn.n_steps, 50))
            return drawn._replace(calling=calling, circling=circling, acting=0.0)
        return drawn._replace(
            is_inprocess=True, n_hosts=0, cutting=0.0, stalling=0.0, dying=0.0, n_interrupts=0, retrying=0.0, acting=0.0
        )


class Sent:
    """One call, and what is known of it.

    Attributes:
        future: Its future; None if Ctrl-C came as it was submitted.
        has_ballast: Whether it takes a large array as well.
        parents: The calls whose rows it takes, or from whose rows it is derived.
        columns: The rows that it has; None if it has no rows.
        taken: The rows that it takes, if it is a request of a map over rows that ranks keep.
        parts: The requests of a map, in the order of the rows.
        chunk: Most rows of each request of a map; None for single rows.
        place: Its place among the calls of a thread, and the name of that.
        is_releasing: Whether its rows were released, or are about to be.
        is_released: Whether they were.
        is_rivals: Whether it is a call of the other group on the same slots.
        is_callers: Whether it is a call of the group whose workers call others.
        inner: The calls that its ranks make in turn, each with its limit of time; of a request, those of rank 0.
        caller: The call whose rank makes it; None for those of the controller.
        back: The group that the ranks of the other one call in turn.
        may_be_lost: Whether rows that it takes may have been released before it was submitted.
        retries: How often it may be sent again; its plans are one for each time.
        n_begun: How often it has begun, if it may be sent again.
        replica: The replica that it names; None if it names none.
        limit: Its limit of time; None for no limit.
        returns_errors: Whether a map goes on after a request that has failed.
        is_cancelled: Whether it may have been cancelled.
        cancelled_at: When it was cancelled for certain.
        n_callbacks: How often its callback was called.
    """

    def __init__(self, token: int, method: str, plans: Any, has_ballast: bool = False) -> None:
        self.token, self.method, self.plans, self.has_ballast = token, method, plans, has_ballast
        self.cancelled_at = math.inf
        self.parents: list[Sent] = []
        self.columns: Columns | None = None
        self.taken: Columns | None = None
        self.is_rivals = self.is_callers = False
        self.inner: dict[int, list[tuple[Sent, float | None]]] = {}
        self.caller: Sent | None = None
        self.back: Any = None
        self.parts: list[Sent] = []
        self.chunk: int | None = None
        self.place: tuple[str, int] | None = None
        self.is_releasing = self.is_released = self.may_be_lost = False
        self.returns_errors = False
        self.retries = self.n_begun = 0
        self.replica: int | None = None
        self.limit: float | None = None
        self.future: Any = None
        self.is_cancelled = False
        self.n_callbacks = self.n_expected = 0
        self.outcome: Any = None
        self.is_lost = False
        self.waited_since = math.inf

    def may_come_again(self, draw: random.Random, method: str, retries: int) -> None:
        """Have it sent again if its replica dies, as it often does."""
        self.method, self.retries = method, retries
        hows = [self.plans.how, *("die" if draw.random() < 0.1 else "value" for _ in range(retries))]
        draw.shuffle(hows)
        self.plans = [self.plans._replace(how=how) for how in hows]

    @property
    def args(self) -> tuple[Any, ...]:
        """Its arguments."""
        if self.parents:
            return self.token, *(parent.future for parent in self.parents)
        if self.back is not None:
            return self.token, self.back
        ballast = (np.full(12_000, self.token),) if self.has_ballast else ()
        return self.token, *ballast

    @property
    def n_rows(self) -> int:
        """Number of the rows that it has."""
        return 0 if self.columns is None else len(next(iter(self.columns.values())).ids)

    @property
    def hows(self) -> set[str]:
        """What its ranks do."""
        plans = self.plans.values() if isinstance(self.plans, dict) else self.plans if self.retries else [self.plans]
        hows = {plan.how for plan in plans}
        return hows.union(*(one.hows for one in (*self.parts, *self.parents)))

    @property
    def fails(self) -> bool:
        """Whether it can have no value."""
        return bool(self.hows & {"raise", "die"}) and not (self.retries and self.hows & {"value", "large"})

    @property
    def tokens(self) -> set[int]:
        """Those of the calls whose failures may be its own."""
        return {self.token}.union(*(one.tokens for one in (*self.parts, *self.parents)))

    @property
    def may_be_cancelled(self) -> bool:
        """Whether it, or a call whose rows it takes, may have been cancelled."""
        return self.is_cancelled or any(parent.may_be_cancelled for parent in self.parents)

    @property
    def may_be_released(self) -> bool:
        """Whether its rows, or those from which they are derived, may have been released."""
        may_be = self.is_releasing or self.may_be_lost
        return may_be or (self.is_operation and any(parent.may_be_released for parent in self.parents))

    @property
    def is_request(self) -> bool:
        """Whether one replica runs it."""
        return self.method in ("ask", "repeat", "tell", "exclusive", "tokens", "chunk", "score", "ask_others")

    @property
    def is_for_all(self) -> bool:
        """Whether all ranks run it."""
        return not self.is_request or self.method == "tell"

    @property
    def runs_beside(self) -> bool:
        """Whether it may run beside others of its kind."""
        return self.is_request and self.method != "exclusive"

    @property
    def is_operation(self) -> bool:
        """Whether it is an operation on rows, or the controller's own rows, which no rank runs."""
        return self.method == "operation"

    def cancel_at(self, moment: float) -> None:
        """Note that it was cancelled."""
        for one in (self, *self.parts):
            one.is_cancelled = True
            one.cancelled_at = min(one.cancelled_at, moment)
