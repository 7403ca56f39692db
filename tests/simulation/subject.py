"""The worker class of simulated programs."""

from __future__ import annotations

import asyncio

import numpy as np

import bandmaster as bm
from simulation import sync, turns
from simulation import world as worlds
from simulation.drawn import made_ids, passed_on, width_of
from simulation.ranks import Raised


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
        return np.tile(made_ids(token, self.rank)[:, None], width_of(token))

    @bm.register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def take(self, token, rows, more=None):
        """A call that takes rows, which may not be there yet."""
        return self._ran(token, rows, *([] if more is None else [more]))

    @bm.register(bm.TransferProtocol(bm.Split("dp"), bm.Concat("dp")))
    def pass_on(self, token, rows):
        """A call that makes rows of others."""
        self._ran(token, rows)
        return passed_on(rows, token)

    @bm.register("REQUEST", concurrency=4)
    async def ask(self, token, ballast=None):
        """A request."""
        plan = self._begun(token, *([] if ballast is None else [ballast]))
        await asyncio.sleep(plan.seconds)
        return self._ended(token, plan)

    @bm.register("ONE_TO_ALL")
    def items(self, token):
        """A call that yields items, as many as its token says."""
        plan = self._begun(token)
        for number in range(token % 4):
            sync.sleep(plan.seconds)
            yield token, self.rank, number
        self._ended(token, plan)

    @bm.register("REQUEST", concurrency=4)
    async def chunk(self, tokens, width):
        """A request for some rows, which all have one token."""
        plan = self._begun(int(tokens[0]))
        await asyncio.sleep(plan.seconds)
        self._ended(int(tokens[0]), plan)
        return np.full((len(tokens), width), tokens[0])

    @bm.register("REQUEST", concurrency=4)
    async def score(self, rows, token):
        """A request of a map over rows that ranks keep."""
        token = worlds.world.program.part_of(token, rows)
        plan = self._begun(token, rows)
        await asyncio.sleep(plan.seconds)
        self._ended(token, plan)
        return passed_on(rows, token)

    @bm.register("REQUEST")
    def exclusive(self, token, ballast=None):
        """A request that runs alone."""
        return self._ran(token, *([] if ballast is None else [ballast]))

    def on_replace(self, rank, state):
        """Nothing."""

    def _ran(self, token, *taken):
        plan = self._begun(token, *taken)
        sync.sleep(plan.seconds)
        return self._ended(token, plan)

    def _begun(self, token, *taken):
        world = worlds.world
        world.note("begins", self.rank, token)
        world.program.check_begun(token)
        world.program.check_taken(token, self.rank, taken)
        return world.program.plan_of(token, self.rank)

    def _ended(self, token, plan):
        world = worlds.world
        world.note("ends", self.rank, token)
        world.ended.setdefault(token, {})[self.rank] = world.now
        if plan.how in ("raise", "die"):
            raise Raised(token, self.rank)
        return (token, self.rank, np.full(12_000, token)) if plan.how == "large" else (token, self.rank)


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
        sync.sleep(program.plan_of_hook().seconds)
        self.is_resident = method == "on_resume"
