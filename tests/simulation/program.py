"""One program: threads of the controller that call a group, wait and cancel, as the seed says; and its checks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

import bandmaster as bm
from bandmaster.calls.progress import progress
from bandmaster.worker_process.executor import NOT_CONSTRUCTED
from simulation import sync
from simulation import world as worlds
from simulation.hosts import Network
from simulation.install import Installed, SimulatedZygote
from simulation.loop import Loop
from simulation.ranks import Plan, Raised
from simulation.world import START, World, WorldEnded

LATE_S = 1.5  # between the last reply of a call and the return of a thread that waits for it: less than any look around
LONG_S = 4.0
QUICK = Plan()
_LOGGERS = "bandmaster", "asyncio"
NOTICED_S = 2.0 + 0.5  # after `stall_after`: the goal, and what a busy machine adds
SETTLED_S = 60.0  # in which threads end, and leases, once all is closed


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
        return np.full((2, 10_000), token)

    @bm.register(bm.TransferProtocol(bm.Split("dp"), bm.Gather("dp")))
    def take(self, token, rows):
        """A call that takes rows, which may not be there yet."""
        return self._ran(token)

    @bm.register("REQUEST", concurrency=4)
    async def ask(self, token, ballast=None):
        """A request."""
        plan = self._begun(token)
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

    @bm.register("REQUEST")
    def exclusive(self, token, ballast=None):
        """A request that runs alone."""
        return self._ran(token)

    def on_replace(self, rank, state):
        """Nothing."""

    def _ran(self, token):
        plan = self._begun(token)
        sync.sleep(plan.seconds)
        return self._ended(token, plan)

    def _begun(self, token):
        world = worlds.world
        world.note("begins", self.rank, token)
        return world.program.plan_of(token, self.rank)

    def _ended(self, token, plan):
        world = worlds.world
        world.note("ends", self.rank, token)
        world.ended.setdefault(token, {})[self.rank] = world.now
        if plan.how in ("raise", "die"):
            raise Raised(token, self.rank)
        return (token, self.rank, np.full(12_000, token)) if plan.how == "large" else (token, self.rank)


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


class Program:
    """Runs the program of a seed.

    Attributes:
        n_calls: Calls that were made.
    """

    def __init__(self, seed: int, kind: Kind | None = None) -> None:
        self.seed, self.kind = seed, kind or Kind.drawn(seed)
        self.n_calls = 0
        self.grace = random.Random(f"grace {seed}").choice([None, 0.1, 0.1, 0.3, 5.0])
        self._tokens = iter(range(1, 1 << 60))
        self._calls: list[Sent] = []
        self._by_token: dict[int, Sent] = {}
        self._group: Any = None
        self._n_running = 0
        self.is_cut = self.kind.is_inprocess  # some host, so that replies may come late; here behind another thread's
        self.is_renewed = False  # perhaps: calls may have failed because of it
        self.world: World

    def run(self, made: Installed) -> World:
        """Run it. Returns its world, whose `failure` says what is wrong."""
        kind = self.kind
        gc.collect()
        gc.disable()
        made.begin_anew()
        self.world = world = World(self.seed, kind.switch_every, kind.hot, kind.n_interrupts)
        world.zygote = SimulatedZygote(world)  # type: ignore[attr-defined]
        world.program, world.ended, world.failed_at = self, {}, {}  # type: ignore[attr-defined]
        world.network, world.links, world.n_hosts = Network(), None, kind.n_hosts  # type: ignore[attr-defined]
        world.n_agents = itertools.count()  # type: ignore[attr-defined]
        if kind.hot:
            made.lines.begin(world.is_hot, world.line)
        worlds.begin(world)
        log = _Log(world)
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(log)
        try:
            self._main()
        except WorldEnded:
            pass
        except BaseException as error:
            world.end()
            import traceback

            world.fail("".join(traceback.format_exception(error)))
        finally:
            world.end()
            for name in _LOGGERS:
                logging.getLogger(name).removeHandler(log)
            worlds.end()
            made.lines.end()
            self._group = None
            gc.enable()
        return world

    # --- the main thread ---

    def _main(self) -> None:
        world, kind = self.world, self.kind
        backend = "inprocess" if kind.is_inprocess else "simulated-hosts" if kind.n_hosts else "simulated"
        with bm.ResourcePool([kind.n_ranks], backend=backend) as pool:
            self._group = bm.WorkerGroup(pool, Subject)
            for number in range(kind.n_threads):
                self._n_running += 1
                world.spawn(f"caller {number}", lambda number=number: self._live(number))
            world.begin()
            self._until_done(lambda: self._steps(random.Random(f"main {self.seed}"), "main"))
            world.end()
            sync._block(lambda: not self._n_running, None, "the other threads")
            self._finish()
            self._check_leases()  # not in `_finish`, whose variables refer to values
            self._group.close()
        if (links := world.links) is not None:  # type: ignore[attr-defined]
            links.close()
        self._settle()

    def _live(self, number: int) -> None:
        try:
            self._steps(random.Random(f"thread {number} {self.seed}"), f"caller {number}")
        finally:
            self._n_running -= 1

    def _until_done(self, function: Any) -> None:
        while True:
            try:
                return function()
            except KeyboardInterrupt:
                self.world.note("interrupted")

    def _steps(self, draw: random.Random, name: str) -> None:
        kind, mine = self.kind, list[Sent]()
        n_left = kind.n_steps
        while n_left > 0:
            n_left -= 1
            try:
                self._step(draw, mine)
            except KeyboardInterrupt:
                self.world.note("interrupted")

    def _step(self, draw: random.Random, mine: list[Sent]) -> None:
        kind, is_main = self.kind, self.world.current is self.world.main
        if draw.random() < kind.awaiting and not (is_main and kind.n_interrupts):
            self._await_some(draw)
            return
        if is_main and not kind.n_interrupts and draw.random() < kind.renewing:
            self._renew(draw)
            return
        if is_main and kind.n_hosts and draw.random() < kind.cutting:
            self._cut(draw)
            return
        if is_main and not (kind.n_interrupts or kind.n_hosts) and draw.random() < kind.stalling:
            self._stall(draw)
            return
        if draw.random() < kind.passing:
            self._pass_rows(draw, mine)
            return
        if draw.random() < kind.yielding:
            self._take_items(draw)
            return
        if draw.random() < kind.mapping:
            if draw.random() < 0.3:
                self._stream(draw)
            else:
                self._map(draw, mine, can_await=not (is_main and kind.n_interrupts))
            return
        what = draw.random()
        if what < 0.35:
            self._call(draw)
        elif what < 0.7:
            sent = self._submit(draw)
            if sent.future is not None:
                mine.append(sent)
                if draw.random() < 0.3:
                    self._add_callback(sent)
        elif what < 0.72:
            sync.sleep(10 ** draw.uniform(-4, 0))
        elif mine or self._calls:
            sent = draw.choice(mine if mine and draw.random() < 0.7 else self._calls)
            if sent.future is None:
                return
            if draw.random() < self.kind.cancelling:
                sent.cancel_at(math.inf)
                if sent.future.cancel():
                    sent.cancel_at(self.world.now)
            elif draw.random() < 0.2:
                sent.future.done()
            elif draw.random() < 0.1:
                self._add_callback(sent)
            else:
                self._wait(sent, draw.choice([None, None, None, 0.0, 1e-4, 0.01, 1.0]))

    # --- steps ---

    def _await_some(self, draw: random.Random) -> None:
        """Await some requests in an event loop."""
        all_sent = [self._drawn(draw, asking=1.0) for _ in range(draw.choice([1, 3, 12]))]
        waits = [draw.choice([None, None, 0.001, 0.05]) for _ in all_sent]
        self._calls += all_sent

        async def one(sent: Sent, timeout: float | None) -> None:
            self.world.note("awaits", sent.method, sent.token)
            sent.is_cancelled = timeout is not None  # perhaps: another thread may learn of it first
            try:
                future = getattr(self._group, sent.method)(*sent.args)
                sent.future = future
                began = self.world.now
                value = await (future if timeout is None else asyncio.wait_for(_value(future), timeout))
            except asyncio.TimeoutError:
                self.world.note("is late", sent.token)
            except bm.BandmasterError as error:
                self._judge(sent, error)
            else:
                self._judge(sent, value)
                self._check_lateness(sent, began)

        async def every() -> None:
            await asyncio.gather(*[one(sent, timeout) for sent, timeout in zip(all_sent, waits, strict=True)])

        loop = Loop()
        try:
            loop.run_until_complete(every())
        finally:
            loop.close()
            asyncio.set_event_loop(None)

    def _pass_rows(self, draw: random.Random, mine: list[Sent]) -> None:
        """Make rows on the ranks, and pass them to other calls before they are there."""
        parent = self._drawn(draw, asking=0.0)
        parent.method, parent.has_ballast = "rows", False
        family = [parent]
        for _ in range(draw.choice([1, 1, 2, 3])):
            child = self._drawn(draw, asking=0.0)
            child.method, child.parent, child.has_ballast = "take", parent, False
            family.append(child)
        for sent in family:
            self._calls.append(sent)
            self.world.note("submits", sent.method, sent.token)
            if sent is parent or parent.future is not None:
                self._submit_it(sent)
            if sent.future is not None:
                mine.append(sent)
                if draw.random() < 0.3:
                    self._add_callback(sent)

    @contextmanager
    def _judged(self, sent: Sent) -> Iterator[None]:
        """Judge the error that ends a block, if it is one of the library's; Ctrl-C may have cancelled the call."""
        try:
            yield
        except KeyboardInterrupt:
            sent.cancel_at(math.inf)
            raise
        except bm.BandmasterError as error:
            self._judge(sent, error)

    def _map(self, draw: random.Random, mine: list[Sent], can_await: bool) -> None:
        """Map a method over rows; iterate over the values, or have them as one, now or later."""
        whole = Sent(next(self._tokens), "map", {})
        whole.parts = [self._drawn(draw, asking=1.0) for _ in range(draw.choice([1, 2, 5, 12]))]
        whole.returns_errors = draw.random() < 0.3
        if not whole.returns_errors and draw.random() < 0.3:
            whole.chunk = draw.choice([1, 2, 3]), draw.choice([1, 10_000])
            for part in whole.parts:
                part.method, part.chunk = "chunk", whole.chunk
        if not whole.returns_errors and whole.hows & {"raise", "die"}:
            for part in whole.parts:
                part.is_cancelled = True  # perhaps, as another one has failed
        is_iterated, method = draw.random() < 0.5, draw.choice(["ask", "ask", "exclusive"])
        options = {
            "in_flight": draw.choice([None, None, 1, 3]),
            "maxsize": draw.choice([None, 1, 4]) if is_iterated else None,
            "on_error": "return" if whole.returns_errors else "raise",
        }
        self.world.note("maps", method, whole.token, [part.token for part in whole.parts], options)
        with self._judged(whole):
            tokens: Any = [part.token for part in whole.parts]
            if whole.chunk is None:
                mapped = getattr(self._group, method).map(tokens, **options)
            else:
                size, width = whole.chunk
                mapped = self._group.chunk.map(np.repeat(tokens, size), width, chunk=size, **options)
            if is_iterated:
                self._iterate(draw, whole, mapped, can_await)
            elif draw.random() < 0.5:
                self._calls.append(whole)
                whole.future = mapped.future
                mine.append(whole)
            else:
                began = self.world.now
                self._judge(whole, mapped.result())
                self._check_lateness(whole, began)

    def _iterate(self, draw: random.Random, whole: Sent, mapped: Any, can_await: bool) -> None:
        """Take values of a map as they come: all, or some, and then close it."""
        n_taken = draw.choice([math.inf, math.inf, 0, 1, 3])
        left = dict(enumerate(whole.parts))

        def take(future: Any, began: float) -> bool:
            """Take one; whether it was the last that is wanted."""
            size = 1 if whole.chunk is None else whole.chunk[0]
            row = future.numbers[0] // size
            self.world.check(len(future.numbers) == size, "the numbers of a chunk", whole.token, future.numbers)
            self.world.check(row in left, "a row comes twice", whole.token, row)
            part = left.pop(row)
            try:
                self._judge(part, future.result())
                self._check_lateness(part, began)
            except bm.BandmasterError as error:
                self._judge(part, error)
            return len(whole.parts) - len(left) >= n_taken

        async def take_all() -> None:
            began = self.world.now
            async for future in mapped:
                if take(future, began):
                    break
                began = self.world.now

        if can_await and draw.random() < 0.3:
            loop = Loop()
            try:
                loop.run_until_complete(take_all())
            finally:
                loop.close()
                asyncio.set_event_loop(None)
        else:
            began = self.world.now
            for future in mapped if n_taken else ():
                if take(future, began):
                    break
                began = self.world.now
        if n_taken is math.inf:
            self.world.check(not left, "rows do not come", whole.token, [part.token for part in left.values()])
            return
        for part in left.values():
            part.is_cancelled = True
        mapped.close()
        for part in left.values():
            part.cancel_at(self.world.now)

    def _stream(self, draw: random.Random) -> None:
        """Take the results of a call as they come: all, or some, and then close the stream."""
        sent, n_taken = self._drawn(draw, asking=0.0), draw.choice([math.inf, math.inf, 0, 1])
        left = set(range(self.kind.n_ranks))
        self.world.note("streams", sent.token, n_taken)
        with self._judged(sent):
            began = self.world.now
            stream = self._group.work.stream(*sent.args)
            for future in stream if n_taken else ():
                self.world.check(future.rank in left, "the value of a rank comes twice", sent.token, future.rank)
                left.remove(future.rank)
                token, rank, *_ = future.result()
                self.world.check((token, rank) == (sent.token, future.rank), "another's value", sent.token, token, rank)
                if self.kind.n_ranks - len(left) >= n_taken:
                    break
            else:
                if n_taken:
                    self.world.check(not left, "values of ranks do not come", sent.token, left)
                    self._check_lateness(sent, began)
            sent.is_cancelled = bool(left)
            stream.close()
            if left:
                sent.cancel_at(self.world.now)

    def _take_items(self, draw: random.Random) -> None:
        """Take the items of generators as they come: all, or some, and then close the stream."""
        sent, n_taken = self._drawn(draw, asking=0.0), draw.choice([math.inf, math.inf, 0, 1, 3])
        sent.method, maxsize = "items", draw.choice([1, 2, 5])
        came = dict.fromkeys(range(self.kind.n_ranks), 0)
        self.world.note("takes items", sent.token, n_taken, maxsize)
        with self._judged(sent):
            stream = self._group.items.options(maxsize=maxsize).stream(sent.token)
            for future in stream if n_taken else ():
                found = future.result()
                expected = (sent.token, future.rank, came[future.rank])
                self.world.check(found == expected, "another item", found, expected)
                came[future.rank] += 1
                if sum(came.values()) >= n_taken:
                    break
            else:
                if n_taken:
                    n_items = {*came.values(), sent.token % 4}
                    self.world.check(len(n_items) == 1, "items do not come", sent.token, came)
                    self.world.check(sent.hows <= {"value", "large"}, "a generator that fails has ended", sent.token)
            sent.is_cancelled = True
            stream.close()
            sent.cancel_at(self.world.now)

    def _renew(self, draw: random.Random) -> None:
        """Restart the group, or replace a rank."""
        self.is_renewed = True
        self.world.note("renews")
        try:
            if draw.random() < 0.5:
                self._group.restart()
            else:
                self._group.replace(draw.randrange(self.kind.n_ranks))
        except (bm.UsageError, bm.WorkerDied, bm.CallCancelled, bm.ConstructorError) as error:
            self.world.note("cannot renew", type(error).__name__)

    def _cut(self, draw: random.Random) -> None:
        """Cut a host off, or kill its agent."""
        self.is_renewed = self.is_cut = True
        network = self.world.network  # type: ignore[attr-defined]
        processes = sorted({task.process for task in self.world.tasks} - {""})
        if processes:
            process = draw.choice(processes)
            if draw.random() < 0.3:
                network.gone.add(process)
                self.world.kill(process)
            else:
                seconds = draw.choice([0.1, 1.0, 30.0])
                self.world.note("cut off", process, seconds)
                network.cut_off(process, seconds)

    def _stall(self, draw: random.Random) -> None:
        """Have a rank stand still or compute, and check who is told of it."""
        world, kind = self.world, self.kind
        for sent in [one for one in self._calls if kind.passing and one.future is not None]:
            self._wait(sent, None)  # else it is the call of the rows that stands still, which has a limit of its own
        after_s, shape = draw.choice([2.0, 5.0]), draw.choice(["stopped", "idle", "busy"])
        lasts_s = after_s * draw.choice([0.4, 3.0, 6.0])
        token = next(self._tokens)
        plans = {0: Plan(lasts_s, is_busy=shape == "busy")}
        if shape == "stopped":
            self.is_cut = True  # its replies come late
            plans = {0: Plan(1e-4)}
            ranks = world.zygote.groups[self._group.name].ranks  # type: ignore[attr-defined]
            ranks[0].stop()
            world.after(lasts_s, ranks[0].go_on)
        sent = self._by_token[token] = Sent(token, "work", plans)
        began, n_before = world.now, len(bm.stalls())
        world.note("stalls", token, shape, after_s, lasts_s)
        try:
            self._judge(sent, self._group.work.options(stall_after=after_s, timeout=None)(token))
        except bm.BandmasterError as error:
            self._judge(sent, error)
            return  # as a rank has died, or is being replaced
        told = [stall for stall in bm.stalls()[n_before:] if stall.method.endswith(".work")]
        told = [one for one in told if one.at - 1.7e9 + START - one.seconds > began - 0.1]  # not of an earlier call
        if shape == "busy" or lasts_s < after_s:
            world.check(not told or kind.n_threads > 0, "a notice of a call that goes on", token, shape, told)
        elif kind.n_threads == 0:
            world.check(bool(told), "nobody was told of a call that stands still", token, shape, after_s, lasts_s)
            late_s = told[0].at - 1.7e9 + START - began - after_s if told else 0.0
            world.check(late_s < NOTICED_S, f"told {late_s:.1f} s late of a call that stands still", token, shape)

    def plan_of(self, token: int, rank: int) -> Plan:
        """What a rank does when it runs a call."""
        sent = self._by_token.get(token)
        plans = None if sent is None else sent.plans
        return plans.get(rank, QUICK) if isinstance(plans, dict) else plans or QUICK

    def check_ran_on(self, running: Any) -> None:
        """A call that was cancelled does not run on to its end."""
        sent = self._by_token.get(running.token)
        if sent is not None and not (running.plan.is_deaf or self.is_cut):
            late_s = self.world.now - max(sent.cancelled_at, running.since)
            self.world.check(late_s < LATE_S, f"a call has run on for {late_s:.1f} s as it was cancelled", sent.token)
            failed_at = self.world.failed_at.get(sent.token, math.inf)  # type: ignore[attr-defined]
            late_s = self.world.now - max(failed_at, running.since, sent.waited_since)
            self.world.check(late_s < 2 * LATE_S, f"a call has run on for {late_s:.1f} s as it had failed", sent.token)

    def check_fence_passed(self, rank: Any, ended_at: float) -> None:
        """No call is waited for while ranks wait at a fence in vain."""
        world = self.world
        for sent in self._calls:
            if self.is_cut:
                return
            is_behind = sent.method == "work" and sent.outcome is None and sent.token not in rank.begun
            if is_behind and sent.future is not None and not sent.is_cancelled:
                late_s = world.now - max(ended_at, sent.waited_since)
                world.check(
                    late_s < 2 * LATE_S, f"a rank waited at a fence for {late_s:.2f} s in vain", rank, sent.token
                )

    def _drawn(self, draw: random.Random, asking: float | None = None) -> Sent:
        kind, token = self.kind, next(self._tokens)
        self.n_calls += 1

        def plan() -> Plan:
            how, faulty = "value", draw.random()
            if faulty < kind.raising:
                how = "raise"
            elif faulty < kind.raising + kind.dying:
                how = "die"
            elif draw.random() < 0.05:
                how = "large"
            seconds = 10 ** draw.uniform(-5, -2) if draw.random() < 0.7 else 0.0
            if draw.random() < kind.hanging:
                seconds = draw.choice([0.01, 0.1, 0.7])
            return Plan(seconds, how, draw.random() < 0.05, draw.random() < 0.1)

        if draw.random() < (kind.asking if asking is None else asking):
            method, one = draw.choice(["ask", "ask", "ask", "exclusive"]), plan()
            if method == "ask" and draw.random() < kind.cancelling / 4:
                one = Plan(LONG_S)
            sent = Sent(token, method, one, draw.random() < 0.03)
        else:
            plans = {rank: plan() for rank in range(kind.n_ranks)}
            sent = Sent(token, "work", plans, draw.random() < 0.03)
            if "raise" in sent.hows and draw.random() < 0.2:  # the others wait for the rank that has failed
                plans |= {rank: Plan(LONG_S) for rank, one in plans.items() if one.how == "value"}
        self._by_token[token] = sent
        return sent

    def _call(self, draw: random.Random) -> None:
        """Make a blocking call."""
        sent = self._drawn(draw)
        self._calls.append(sent)
        self.world.note("calls", sent.method, sent.token)
        if sent.method != "work":
            self._submit_it(sent)
            if sent.future is not None:
                self._wait(sent, None)
            return
        sent.waited_since = self.world.now
        try:
            value = self._method(sent)(*sent.args)
        except KeyboardInterrupt:
            sent.is_cancelled = True
            raise
        except bm.BandmasterError as error:
            self._judge(sent, error)
        else:
            self._judge(sent, value)
            self._check_lateness(sent, START)
        self._calls.remove(sent)
        if not sent.is_cancelled:
            del self._by_token[sent.token]  # and what it has returned

    def _submit(self, draw: random.Random) -> Sent:
        sent = self._drawn(draw)
        self._calls.append(sent)
        self.world.note("submits", sent.method, sent.token)
        self._submit_it(sent)
        return sent

    def _submit_it(self, sent: Sent) -> None:
        try:
            sent.future = self._method(sent).submit(*sent.args)
        except KeyboardInterrupt:
            sent.is_cancelled = True
            raise
        except bm.BandmasterError as error:
            self._judge(sent, error)

    def _method(self, sent: Sent) -> Any:
        method = getattr(self._group, sent.method)
        has_grace = sent.method == "work" and sent.token % 3 == 0
        return method.options(grace=self.grace) if has_grace else method

    def _add_callback(self, sent: Sent) -> None:
        sent.n_expected += 1
        future = sent.future
        sent.waited_since = min(sent.waited_since, self.world.now)
        self.world.note("adds a callback", sent.token)
        is_added, added_at = False, self.world.now

        def call_back(given: Any) -> None:
            sent.n_callbacks += 1
            self.world.note("called back", sent.token)
            self.world.check(given is future, "a callback gets another future", sent.token)
            self._check_lateness(sent, added_at)

        try:
            future.add_done_callback(call_back)
            is_added = True
        finally:
            if not is_added:  # Ctrl-C
                sent.n_expected -= 1
                sent.is_lost = True

    def _wait(self, sent: Sent, timeout: float | None) -> None:
        began = self.world.now
        if timeout is None:
            sent.waited_since = min(sent.waited_since, began)
        try:
            value = sent.future.result(timeout)
        except bm.CallTimeout:
            self.world.check(timeout is not None, "a wait without a limit has ended by one", sent.token)
            self.world.check(self.world.now - began >= (timeout or 0) - 1e-3, "a limit has come too early", sent.token)
            return
        except bm.BandmasterError as error:
            self._judge(sent, error)
            return
        self._judge(sent, value)
        self._check_lateness(sent, began)

    def _check_lateness(self, sent: Sent, began: float) -> None:
        """A thread that waits is told soon after the last reply."""
        ended = self._ended(sent)
        if ended < math.inf and not (self.is_cut or isinstance(sent.outcome, BaseException)):
            late_s = self.world.now - max(ended, began)
            self.world.check(late_s < LATE_S, f"a wait ends {late_s:.2f} s after the last reply", sent.token)

    def _ended(self, sent: Sent) -> float:
        """When the last rank has replied, in the case of a map to the last request; infinity before that."""
        if sent.parts:
            return max(map(self._ended, sent.parts))
        by_rank = self.world.ended.get(sent.token, {})  # type: ignore[attr-defined]
        n_ranks = self.kind.n_ranks if sent.method in ("work", "rows", "take") else 1
        return max(by_rank.values()) if len(by_rank) == n_ranks else math.inf

    def _judge(self, sent: Sent, outcome: Any) -> None:
        """Check the outcome of a call."""
        world, hows = self.world, sent.hows
        if sent.outcome is not None and type(sent.outcome) is not type(outcome):
            world.fail(f"call {sent.token} has had another outcome: {sent.outcome!r}, now {outcome!r}")
        sent.outcome = outcome
        self.world.note("has", sent.token, type(outcome).__name__)
        if isinstance(outcome, bm.CallCancelled):
            is_meant = sent.is_cancelled or self.is_renewed
            if sent.parent is not None:
                is_meant |= sent.parent.is_cancelled
            # Ctrl-C may have come as the main thread sent it for another one: it was behind a call that waits for rows.
            is_meant |= self.kind.n_interrupts > 0 and self.kind.passing > 0
            world.check(is_meant, "a call was cancelled that nobody cancels", sent.token)
        elif isinstance(outcome, bm.WorkerDied):
            died = self.is_renewed or self._has_died() or "ended by the controller" in str(outcome)  # or is about to be
            world.check(died, "a worker is said to have died", sent.token, outcome)
        elif isinstance(outcome, bm.RemoteError) and NOT_CONSTRUCTED in str(outcome.__cause__):
            is_call = sent.method not in ("ask", "exclusive") and not sent.parts
            world.check(self.is_renewed and is_call, "a request comes before the constructor", sent.token, outcome)
        elif isinstance(outcome, bm.RemoteError) and isinstance(outcome.__cause__, LookupError):
            world.check(self.is_renewed and sent.method == "items", "a generator is gone", sent.token, outcome)
        elif isinstance(outcome, bm.RemoteError):
            world.check("raise" in hows, "a call fails that does not", sent.token, outcome)
            cause = outcome.__cause__
            is_its = isinstance(cause, Raised) and cause.args[0] in sent.tokens
            world.check(is_its, "the failure of another call", sent.token, outcome)
        elif isinstance(outcome, bm.RowsLost):
            world.check(self.is_renewed or self._has_died(), "rows are lost", sent.token, outcome)
        elif isinstance(outcome, bm.ClosedError):
            world.check(self.is_renewed, "a group is closed that nobody closes", sent.token)
        elif isinstance(outcome, BaseException):
            world.fail(f"call {sent.token} has {outcome!r}")
        elif sent.chunk is not None:
            size, width = sent.chunk
            rows = np.repeat([part.token for part in sent.parts or [sent]], size)
            is_right = outcome.shape == (len(rows), width) and bool((outcome == rows[:, None]).all())
            world.check(is_right, "the rows of another map", sent.token)
        elif sent.parts:
            self._judge_map(sent, outcome)
        elif sent.method == "rows":
            world.check(not hows & {"raise", "die"}, "a call that fails has a value", sent.token, outcome)
            is_right = len(outcome) == 2 * self.kind.n_ranks and bool((outcome == sent.token).all())
            world.check(is_right, "the rows of another call", sent.token)
        else:
            world.check(not hows & {"raise", "die"}, "a call that fails has a value", sent.token, outcome)
            is_for_all = sent.method in ("work", "take")
            values = outcome if is_for_all else [outcome]
            n = self.kind.n_ranks if is_for_all else 1
            ranks = [value[1] for value in values]
            world.check(len(values) == n and (n == 1 or ranks == [*range(n)]), "ranks are missing", sent.token, ranks)
            tokens = {value[0] for value in values} | {
                int(one) for value in values if len(value) > 2 for one in value[2][::4000]
            }
            world.check(tokens == {sent.token}, "the values of another call", sent.token, tokens)

    def _judge_map(self, sent: Sent, outcome: Any) -> None:
        """Check the values of a map."""
        failed = []
        if sent.returns_errors:
            failed = [int(row) for one in outcome.failed for row in one.numbers]
            for one in outcome.failed:
                self._judge(sent.parts[int(one.numbers[0])], one.error)
        rows = [row for row in range(len(sent.parts)) if row not in failed]
        values = outcome.value if sent.returns_errors else outcome
        self.world.check(len(values) == len(rows), "rows are missing", sent.token, rows, len(values))
        for row, value in zip(rows, values, strict=True):
            self._judge(sent.parts[row], value)

    def _has_died(self) -> bool:
        return any(not rank.is_alive for rank in self.world.zygote.ranks.values())  # type: ignore[attr-defined]

    def expected(self, token: int) -> int:
        """What a large argument of a call is full of."""
        sent = self._by_token.get(token)
        return token if sent is None or sent.parent is None else sent.parent.token

    def _finish(self) -> None:
        """Wait for all calls, and check that each has ended once."""
        sync.sleep(LATE_S)  # in which nobody waits
        for sent in self._calls:
            ended = max(self._ended(sent), sent.waited_since) if sent.hows <= {"value", "large"} else math.inf
            is_late = sent.n_callbacks < sent.n_expected and self.world.now > ended + LATE_S
            is_meant = self.is_cut or sent.is_cancelled or sent.is_lost
            self.world.check(not is_late or is_meant, "a callback does not come", sent.token)
        for sent in self._calls:
            if sent.future is not None:
                self._wait(sent, None)
        # Callbacks run in a thread of their own, if no other has found the call done.
        waiting = [sent for sent in self._calls if sent.n_callbacks < sent.n_expected]
        deadline = self.world.now + LATE_S
        sync._block(lambda: all(s.n_callbacks >= s.n_expected for s in waiting), deadline - self.world.now, "callbacks")
        for sent in self._calls:
            is_right = sent.n_callbacks == sent.n_expected or (sent.is_lost and sent.n_callbacks >= sent.n_expected)
            self.world.check(is_right, "callbacks", sent.token, sent.n_callbacks, sent.n_expected)
        self._calls.clear()
        self._by_token.clear()

    def _check_leases(self) -> None:
        """Leases end when nobody has what lies in segments, on both ends."""
        ranks = self.world.zygote.ranks.values()  # type: ignore[attr-defined]
        if self.is_cut or self.kind.n_hosts or self.kind.is_inprocess or not all(rank.is_alive for rank in ranks):
            return
        sync.sleep(SETTLED_S / 10)  # in which threads end, which refer to what they have looked at last
        gc.collect()
        sync.sleep(SETTLED_S / 10)
        writer = self._group._ownership.workers()._writer
        self.world.check(not writer.has_leases, "leases of ranks are left", writer._segments)
        for rank in ranks:
            self.world.check(not rank.has_leases, "leases of the controller are left", rank)
            self.world.check(not rank.streams or self.kind.n_interrupts, "generators are left", rank, rank.streams)

    def _settle(self) -> None:
        """Wait until the threads of the library have ended, and check that nothing is left."""
        world = self.world
        self._group = None
        self._calls.clear()
        with suppress(WorldEnded):
            sync._block(lambda: len(world.tasks) == 1, SETTLED_S, "the end of threads")
        world.check(len(world.tasks) == 1, "threads are left", world.tasks)
        gc.collect()
        world.check(not world.files, "descriptors are left", world.files)
        world.check(not progress._watches, "watches are left", progress._watches)


def warm_up(made: Installed) -> None:
    """Run a program, so that those to come do not depend on what the library does when it is first used."""
    Program(0, Kind(2, 2, 60, 0.1, 0.0, 0.1, 0.01, 0.5, 0.0, 0, 10.0)).run(made)


async def _value(future: Any) -> Any:
    return await future


class _Log(logging.Handler):
    """Fails a program of which the library logs an error."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self._world.fail(f"the library has logged: {text}")


def _hook(args: Any) -> None:
    world = worlds.world
    if world is not None:
        world.fail(f"an exception was lost: {args.exc_value!r} in {args.object!r}")
    else:
        sys.__unraisablehook__(args)


sys.unraisablehook = _hook
assert threading  # its hooks stay as they are
