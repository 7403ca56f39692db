"""What is drawn for a program: its kind, and its calls."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np


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
        passing: Share of steps in which rows of one call are passed to others.
        stalling: Share of steps of the main thread in which a rank stands still, and is noticed or not.
        mapping: Share of steps in which a thread maps a method over rows, or takes the results of ranks as they come.
        yielding: Share of steps in which it takes the items of generators.
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
    is_inprocess: bool = False

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
            renewing=draw.choice([0.0, 0.0, 0.02]) if faults > 0.5 else 0.0,
            stalling=draw.choice([0.0, 0.0, 0.0, 0.05]),
            n_hosts=draw.choice([0, 0, 0, 1, 2, 3]),
            passing=draw.choice([0.0, 0.0, 0.1, 0.3]),
            cutting=draw.choice([0.0, 0.0, 0.03]) if faults > 0.4 else 0.0,
            mapping=draw.choice([0.0, 0.0, 0.1, 0.3]),
            yielding=draw.choice([0.0, 0.0, 0.1, 0.2]),
        )
        if draw.random() < 0.85:
            return drawn
        return drawn._replace(is_inprocess=True, n_hosts=0, cutting=0.0, stalling=0.0, dying=0.0, n_interrupts=0)


class Sent:
    """One call, and what is known of it.

    Attributes:
        future: Its future; None if Ctrl-C came as it was submitted.
        has_ballast: Whether it takes a large array as well.
        parent: The call whose rows it takes.
        parts: The requests of a map, in the order of the rows.
        chunk: The number of rows of each request of a map, and their width; None for single rows.
        returns_errors: Whether a map goes on after a request that has failed.
        is_cancelled: Whether it may have been cancelled.
        cancelled_at: When it was cancelled for certain.
        n_callbacks: How often its callback was called.
    """

    def __init__(self, token: int, method: str, plans: Any, has_ballast: bool = False) -> None:
        self.token, self.method, self.plans, self.has_ballast = token, method, plans, has_ballast
        self.cancelled_at = math.inf
        self.parent: Sent | None = None
        self.parts: list[Sent] = []
        self.chunk: tuple[int, int] | None = None
        self.returns_errors = False
        self.future: Any = None
        self.is_cancelled = False
        self.n_callbacks = self.n_expected = 0
        self.outcome: Any = None
        self.is_lost = False
        self.waited_since = math.inf

    @property
    def args(self) -> tuple[Any, ...]:
        """Its arguments."""
        if self.parent is not None:
            return self.token, self.parent.future
        ballast = (np.full(12_000, self.token),) if self.has_ballast else ()
        return self.token, *ballast

    @property
    def hows(self) -> set[str]:
        """What its ranks do."""
        if self.parts:
            return set[str]().union(*(part.hows for part in self.parts))
        hows = {plan.how for plan in self.plans.values()} if isinstance(self.plans, dict) else {self.plans.how}
        return hows if self.parent is None else hows | self.parent.hows

    @property
    def tokens(self) -> set[int]:
        """Those of the calls whose failures may be its own."""
        return {self.token, *(part.token for part in self.parts)} | (self.parent.tokens if self.parent else set())

    def cancel_at(self, moment: float) -> None:
        """Note that it was cancelled."""
        for one in (self, *self.parts):
            one.is_cancelled = True
            one.cancelled_at = min(one.cancelled_at, moment)
