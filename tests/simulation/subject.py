"""The worker class of simulated programs."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import numpy as np

import bandmaster as bm
from simulation import callers, sync, turns, workers
from simulation import world as worlds
from simulation.columns import made, passed_on, value_of
from simulation.drawn import Raised


class Subject(bm.Worker):
    """The worker class; simulated ranks run none of this, and those of backend "inprocess" do."""

    @bm.register("ONE_TO_ALL")
    def work(self, token, ballast=None):
        """A call of all ranks."""
        return self._ran(token)

    @bm.register(bm.TransferProtocol(bm.Broadcast(), bm.Concat("dp")))
    def rows(self, token):
        """A call that leaves rows on the ranks."""
        self._ran(token)
        return value_of(made(token, self.rank, is_named=False))

    @bm.register(bm.TransferProtocol(bm.Broadcast(), bm.Concat("dp")))
    def columns(self, token):
        """A call that leaves rows with columns on the ranks."""
        self._ran(token)
        return value_of(made(token, self.rank, is_named=True))

    @bm.register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def take(self, token, rows, more=None):
        """A call that takes rows, which may not be there yet."""
        return self._ran(token, rows, *([] if more is None else [more]))

    @bm.register(bm.TransferProtocol(bm.Split("dp"), bm.Concat("dp")))
    def pass_on(self, token, rows):
        """A call that makes rows of others."""
        passed = passed_on(rows, token)
        self._ran(token, rows)
        return passed

    @bm.register("REQUEST", concurrency=4)
    async def ask(self, token, ballast=None):
        """A request."""
        return await self._ran_beside(token, *([] if ballast is None else [ballast]))

    @bm.register("REQUEST", concurrency=4, is_idempotent=True)
    async def repeat(self, token, ballast=None):
        """A request that may be run twice."""
        return await self._ran_beside(token, *([] if ballast is None else [ballast]))

    @bm.register("REQUEST", concurrency=4)
    async def tell(self, token, ballast=None):
        """A request to all replicas."""
        return await self._ran_beside(token, *([] if ballast is None else [ballast]))

    @bm.register("ONE_TO_ALL")
    def items(self, token):
        """A call that yields items, as many as its token says."""
        with self._runs(token) as plan:
            for number in range(token % 4):
                sync.sleep(plan.seconds)
                yield token, self.rank, number
            self._ended(token, plan)

    @bm.register("REQUEST", concurrency=4)
    async def tokens(self, token):
        """A request that yields items, as many as its token says; every third one is large."""
        with self._runs(token) as plan:
            for number in range(token % 9):
                await asyncio.sleep(plan.seconds / 8)
                yield np.full(12_000 if number % 3 == 1 else 10, token), number
            self._ended(token, plan)

    @bm.register("REQUEST", concurrency=4)
    async def chunk(self, tokens, width):
        """A request for some rows, which all have one token."""
        await self._ran_beside(int(tokens[0]))
        return np.full((len(tokens), width), tokens[0])

    @bm.register("REQUEST", concurrency=4)
    async def score(self, rows, token):
        """A request of a map over rows that ranks keep."""
        token = worlds.world.program.part_of(token, rows)
        passed = passed_on(rows, token)
        await self._ran_beside(token, rows)
        return passed

    @bm.register("REQUEST")
    def exclusive(self, token, ballast=None):
        """A request that runs alone."""
        return self._ran(token, *([] if ballast is None else [ballast]))

    def on_replace(self, rank, state):
        """Nothing."""

    def _ran(self, token, *taken):
        with self._runs(token, *taken) as plan:
            sync._block(sync._never, plan.seconds, "the end of a method", not plan.is_deaf)
            return self._ended(token, plan)

    async def _ran_beside(self, token, *taken):
        with self._runs(token, *taken) as plan:
            await asyncio.sleep(plan.seconds)
            return self._ended(token, plan)

    @contextmanager
    def _runs(self, token, *taken):
        """The block of a call, from whose begin to whose end it runs; its plan."""
        world, worker = worlds.world, workers.here(worlds.world)
        world.note("begins", self.rank, token)
        if worker is None:
            world.program.check_begun(token)
        else:
            worker.begins(token)
        world.program.check_taken(token, self.rank, taken)
        try:
            yield world.program.plan_of(token, self.rank)
            world.program.check_taken(token, self.rank, taken, is_over=True)
        finally:
            if worker is not None:
                worker.ends(token)

    def _ended(self, token, plan):
        world, worker = worlds.world, workers.here(worlds.world)
        world.note("ends", self.rank, token)
        world.ended.setdefault(token, {})[self.rank] = world.now
        if worker is not None:
            worker.has_ended(token, plan)
        if plan.how in ("raise", "die"):
            raise Raised(token, self.rank)
        return (token, self.rank, np.full(12_000, token)) if plan.how == "large" else (token, self.rank)


class Caller(Subject):
    """A worker class that was given a group, which it calls; or None, and calls the one that is given with a call."""

    def __init__(self, called):
        self._called = called

    def _other(self, back):
        return back if self._called is None else self._called

    @bm.register("ONE_TO_ALL")
    async def call_others(self, token, back=None):
        """A call of all ranks, each of which makes calls beside each other."""
        with self._runs(token) as plan:
            await callers.call_beside(self._other(back), token, self.rank, back)
            return self._ended(token, plan)

    @bm.register("ONE_TO_ALL")
    def call_others_alone(self, token, back=None):
        """A call of all ranks, each of which makes calls one after the other."""
        with self._runs(token) as plan:
            callers.call_in_order(self._other(back), token, self.rank, back)
            return self._ended(token, plan)

    @bm.register("REQUEST", concurrency=4)
    async def ask_others(self, token, back=None):
        """A request that makes calls beside each other."""
        with self._runs(token) as plan:
            await callers.call_beside(self._other(back), token, 0, back)
            return self._ended(token, plan)


class Taker(Subject):
    """A worker class with hooks of turns."""

    is_resident = True

    def on_yield(self):
        """Note that it yields."""
        self._hook("on_yield")

    def on_resume(self):
        """Note that it resumes."""
        self._hook("on_resume")

    def _hook(self, method):
        program = worlds.world.program
        turns.check_hook(program, self, method, self.is_resident)
        plan = program.plan_of_hook()
        sync.sleep(plan.seconds)
        if plan.how == "raise":
            raise Raised(turns.HOOK, self.rank)
        self.is_resident = method == "on_resume"
