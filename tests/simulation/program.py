"""One program: threads of the controller that call a group, wait and cancel, as the seed says; and its checks."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

import bandmaster as bm
from bandmaster.calls import progress as progress_module
from bandmaster.contract import NOT_CONSTRUCTED
from simulation import callers, faults, maps, rows, sync, turns, waits
from simulation import world as worlds
from simulation.columns import are_rows, by_name, share_of
from simulation.drawn import LATE_S, Kind, Raised, Sent
from simulation.hosts import Network
from simulation.install import Installed, SimulatedZygote
from simulation.loop import Loop
from simulation.ranks import Plan
from simulation.subject import Caller, Subject, Taker
from simulation.world import START, ThreadEnds, World, WorldEnded

LONG_S = 4.0
QUICK = Plan()
_LOGGERS = "bandmaster", "asyncio", "concurrent.futures"
logging.getLogger("asyncio").addHandler(logging.NullHandler())  # tasks of killed processes end between programs
warnings.filterwarnings("ignore", "coroutine '_value' was never awaited")  # their task was cancelled before it began
SETTLED_S = 60.0  # in which threads end, and leases, once all is closed


class Program:
    """Runs the program of a seed.

    Attributes:
        n_calls: Calls that were made.
    """

    def __init__(self, seed: int, kind: Kind | None = None) -> None:
        self.seed, self.kind = seed, kind or Kind.drawn(seed)
        self.n_calls = 0
        self.grace = random.Random(f"grace {seed}").choice([None, 0.1, 0.1, 0.3, 5.0])
        self.tokens = iter(range(1, 1 << 60))
        self.calls: list[Sent] = []
        self.by_token: dict[int, Sent] = {}
        self.group: Any = None
        self.other: Any = None  # a group of other workers on the same ranks
        self.whole: Any = None  # both
        self.turns: turns.Turns | None = None
        self.callers: Any = None  # the group whose workers call this one
        self._n_running = 0
        self._n_placed: dict[str, int] = {}  # calls of each thread
        self.is_cut = self.kind.is_inprocess  # some host, so that replies may come late; here behind another thread's
        self.broken_at = START - LATE_S  # when a circle of calls was broken last
        self.is_renewed = False  # perhaps: calls may have failed because of it
        self.is_closing = False  # or is closed
        self.n_renewing = 0  # how many threads restart the group, or replace a rank
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
        world.servers = {}  # type: ignore[attr-defined]
        world.n_agents, world.secrets = itertools.count(), itertools.count(1)  # type: ignore[attr-defined]
        world.has_callers, world.n_died = kind.calling > 0, 0  # type: ignore[attr-defined]
        worlds.begin(world)
        log = _Log(world)
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(log)
        try:
            self._main(made)
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
            self.group = self.other = self.whole = self.callers = None
            gc.enable()
        return world

    # --- the main thread ---

    def _main(self, made: Installed) -> None:
        world, kind = self.world, self.kind
        backend = "inprocess" if kind.is_inprocess else "simulated-hosts" if kind.n_hosts else "simulated"
        os.environ["BANDMASTER_TREE_FROM"] = "2" if kind.is_tree else "32"
        with bm.ResourcePool([kind.n_ranks], backend=backend) as pool, ExitStack() as others:
            if kind.circling:
                self.group = bm.WorkerGroup(pool, Caller, None, name="Called")
            elif kind.is_colocated:
                self.whole = bm.colocate(pool, one=Subject, other=Subject)
                self.group, self.other = self.whole.one, self.whole.other
            else:
                self.group = bm.WorkerGroup(pool, Taker if kind.turning and self.seed % 2 else Subject)
            self.whole = self.whole or self.group
            if kind.calling:
                more = others.enter_context(bm.ResourcePool([kind.n_ranks], backend=backend))
                self.callers = bm.WorkerGroup(more, Caller, self.group, name="Callers")
            if kind.turning:
                self.turns = turns.Turns(bm.WorkerGroup(pool, Taker, name="Rival"))
                with self.group.turn():  # from here on it takes turns, also if it has no hooks
                    pass
                self.turns.may_fail = True
            if kind.hot:  # not before: what groups remember of classes and meshes is looked up in the order of hashes
                made.lines.begin(world.is_hot, world.line)
            for number in range(kind.n_threads):
                self._n_running += 1
                world.spawn(f"caller {number}", lambda number=number: self._live(number))
            world.begin()
            self._until_done(lambda: self._steps(random.Random(f"main {self.seed}"), "main"))
            world.end()
            sync._block(lambda: not self._n_running, None, "the other threads")
            if self.turns is not None:
                self.turns.may_fail = False
            self._finish()
            turns.check_over(SETTLED_S)
            self._check_leases()  # not in `_finish`, whose variables refer to values
            has_rows = kind.passing and not kind.calling  # what killed processes of the world have had is left
            if has_rows:
                self._read_dropped()
            self.whole.close()
            if self.callers is not None:
                self.callers.close()
            if self.turns is not None:
                self.turns.rival.close()
            if has_rows:  # not before, as failed calls that nobody reads on may refer to the frames of their callers
                self._let_go()
                rows.check_over(world)
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
                self.step(draw, mine)
            except KeyboardInterrupt:
                self.world.note("interrupted")

    def step(self, draw: random.Random, mine: list[Sent]) -> None:
        """Make a step."""
        kind, is_main = self.kind, self.world.current is self.world.main
        if draw.random() < kind.calling:
            callers.call_callers(self, draw, mine)
            return
        if draw.random() < kind.turning:
            turns.take_turn(self, draw, mine)
            return
        if draw.random() < kind.awaiting and not (is_main and kind.n_interrupts):
            self._await_some(draw)
            return
        if is_main and not kind.n_interrupts and draw.random() < kind.renewing:
            faults.renew(self, draw)
            return
        if is_main and kind.n_hosts and draw.random() < kind.cutting:
            faults.cut(self, draw)
            return
        if is_main and not (kind.n_interrupts or kind.n_hosts) and draw.random() < kind.stalling:
            faults.stall(self, draw)
            return
        if kind.acting and draw.random() < kind.acting and not (is_main and kind.n_interrupts):
            faults.act(self, draw)
            return
        if kind.closing and not self.is_closing and draw.random() < kind.closing:
            faults.close(self, draw)
            return
        if draw.random() < kind.passing:
            rows.use_rows(self, draw, mine, can_await=not (is_main and kind.n_interrupts))
            return
        if draw.random() < kind.choosing:
            waits.wait_for_some(self, draw, mine)
            return
        if draw.random() < kind.yielding:
            is_run = kind.is_inprocess or kind.calling  # the workers' part of requests that yield, too
            (maps.read_items if is_run and draw.random() < 0.5 else maps.take_items)(self, draw)
            return
        if draw.random() < kind.mapping:
            if draw.random() < 0.3:
                maps.stream(self, draw)
            else:
                maps.map_rows(self, draw, mine, can_await=not (is_main and kind.n_interrupts))
            return
        what = draw.random()
        if what < 0.35:
            self._call(draw)
        elif what < 0.7:
            sent = self._submit(draw)
            if sent.future is not None:
                mine.append(sent)
                if draw.random() < 0.3:
                    self.add_callback(sent)
        elif what < 0.72:
            sync.sleep(10 ** draw.uniform(-4, 0))
        elif mine or self.calls:
            sent = draw.choice(mine if mine and draw.random() < 0.7 else self.calls)
            if sent.future is None:
                return
            if draw.random() < self.kind.cancelling:
                self.cancel(sent)
            elif draw.random() < 0.2:
                sent.future.done()
            elif draw.random() < 0.1:
                self.add_callback(sent)
            else:
                self.wait(sent, draw.choice([None, None, None, 0.0, 1e-4, 0.01, 1.0]))

    # --- steps ---

    def _await_some(self, draw: random.Random) -> None:
        """Await some requests in an event loop."""
        all_sent = [self.drawn_once_or_again(draw, asking=1.0) for _ in range(draw.choice([1, 3, 12]))]
        waits = [draw.choice([None, None, 0.001, 0.05]) for _ in all_sent]
        self.calls += all_sent

        async def one(sent: Sent, timeout: float | None) -> None:
            self.world.note("awaits", sent.method, sent.token)
            sent.is_cancelled = timeout is not None  # perhaps: another thread may learn of it first
            try:
                method = self.method_of(sent)
                future = (method.all if sent.method == "tell" else method)(*sent.args)
                sent.future = future
                began = self.world.now
                value = await (future if timeout is None else asyncio.wait_for(_value(future), timeout))
            except asyncio.TimeoutError:
                self.world.note("is late", sent.token)
            except bm.BandmasterError as error:
                self.judge(sent, error)
            else:
                self.judge(sent, value)
                self.check_lateness(sent, began)

        async def every() -> None:
            await asyncio.gather(*[one(sent, timeout) for sent, timeout in zip(all_sent, waits, strict=True)])

        loop = Loop()
        try:
            loop.run_until_complete(every())
        finally:
            loop.close()
            asyncio.set_event_loop(None)

    def cancel(self, sent: Sent) -> None:
        """Cancel a call; an operation on rows goes on."""
        if sent.is_operation:
            self.world.check(not sent.future.cancel(), "an operation on rows was cancelled", sent.token)
            return
        sent.cancel_at(math.inf)
        if sent.future.cancel():
            sent.cancel_at(self.world.now)

    @contextmanager
    def judged(self, sent: Sent) -> Iterator[None]:
        """Judge the error that ends a block, if it is one of the library's; Ctrl-C may have cancelled the call."""
        try:
            yield
        except KeyboardInterrupt:
            sent.cancel_at(math.inf)
            raise
        except bm.CallTimeout as late:
            self.world.check(sent.limit is not None, "a limit that it has not", sent.token)
            if sent.is_request:  # for which there was no place
                sent.cancel_at(self.world.now)
            else:
                sent.future = late.future
        except bm.BandmasterError as error:
            self.judge(sent, error)

    def plan_of(self, token: int, rank: int) -> Plan:
        """What a rank does when it runs a call."""
        sent = self.by_token.get(token)
        plans = None if sent is None else sent.plans
        if sent is not None and sent.retries:
            sent.n_begun += 1
            most = 1 + sent.retries if sent.method == "repeat" else 1
            self.world.check(sent.n_begun <= most, "a request is sent again too often", token, sent.n_begun)
            return plans[min(sent.n_begun, len(plans)) - 1]
        return plans.get(rank, QUICK) if isinstance(plans, dict) else plans or QUICK

    def plan_of_hook(self) -> Plan:
        """What a rank does in a hook."""
        fails = self.turns is not None and self.turns.may_fail and self.world.random.random() < self.kind.raising
        if fails and self.turns is not None:
            self.turns.are_even = False
        return Plan(10 ** self.world.random.uniform(-5, -2), "raise" if fails else "value")

    def check_ran_on(self, running: Any) -> None:
        """A call that was cancelled does not run on to its end."""
        sent = self.by_token.get(running.token)
        if sent is not None and not (running.plan.is_deaf or self.is_cut):
            late_s = self.world.now - max(sent.cancelled_at, running.since)
            self.world.check(late_s < LATE_S, f"a call has run on for {late_s:.1f} s as it was cancelled", sent.token)
            failed_at = self.world.failed_at.get(sent.token, math.inf)  # type: ignore[attr-defined]
            late_s = self.world.now - max(failed_at, running.since, sent.waited_since)
            self.world.check(late_s < 2 * LATE_S, f"a call has run on for {late_s:.1f} s as it had failed", sent.token)

    def check_fence_passed(self, rank: Any, ended_at: float) -> None:
        """No call is waited for while ranks wait at a fence in vain."""
        world = self.world
        for sent in self.calls:
            if self.is_cut:
                return
            is_its = sent.is_rivals == (rank.group.name == "Rival")
            is_behind = is_its and sent.method == "work" and sent.outcome is None and sent.token not in rank.begun
            if is_behind and not (sent.future is None or sent.future._call.done or sent.is_cancelled):
                late_s = world.now - max(ended_at, sent.waited_since)
                world.check(
                    late_s < 2 * LATE_S, f"a rank waited at a fence for {late_s:.2f} s in vain", rank, sent.token
                )

    def drawn(self, draw: random.Random, asking: float | None = None) -> Sent:
        kind, token = self.kind, next(self.tokens)
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
        self.by_token[token] = sent
        return sent

    def drawn_once_or_again(self, draw: random.Random, asking: float | None = None) -> Sent:
        """A call; if it is a request, perhaps one that is sent again if its replica dies, as it often does."""
        sent = self.drawn(draw, asking)
        if sent.method == "ask" and self.kind.retrying and draw.random() < self.kind.retrying:
            sent.may_come_again(draw, draw.choice(["ask", "repeat"]), draw.choice([1, 1, 2]))
        elif sent.method == "ask" and self.kind.aiming and draw.random() < self.kind.aiming:
            sent.replica = draw.choice([None, *range(self.kind.n_ranks)])
            if sent.replica is None:
                sent.method, sent.plans = "tell", dict.fromkeys(range(self.kind.n_ranks), sent.plans)
        return sent

    def _call(self, draw: random.Random) -> None:
        """Make a blocking call."""
        sent = self._drawn_with_limit(draw)
        self.calls.append(sent)
        self.call(sent)

    def _drawn_with_limit(self, draw: random.Random) -> Sent:
        sent = self.drawn_once_or_again(draw)
        if self.kind.limiting and draw.random() < self.kind.limiting and self.turns is None:
            sent.limit = draw.choice([0.0, 1e-4, 0.01, 0.1])
        return sent

    def call(self, sent: Sent) -> None:
        """Make a blocking call."""
        self.world.note("calls", sent.method, sent.token)
        if sent.is_request:
            self.submit_it(sent)
            if sent.future is not None:
                self.wait(sent, None)
            return
        sent.waited_since = self.world.now
        with self._submitting(sent) as args:
            value = self.method_of(sent)(*args)
            self.judge(sent, value)
            self.check_lateness(sent, START)
        if sent.future is not None:  # it has taken longer than it may, and goes on
            return
        self.calls.remove(sent)
        if not sent.is_cancelled:
            del self.by_token[sent.token]  # and what it has returned

    def _submit(self, draw: random.Random) -> Sent:
        sent = self._drawn_with_limit(draw)
        self.calls.append(sent)
        self.submit_it(sent)
        return sent

    def submit_it(self, sent: Sent) -> None:
        """Submit a call."""
        self.world.note("submits", sent.method, sent.token)
        with self._submitting(sent) as args:
            method = self.method_of(sent)
            sent.future = method.all(*args) if sent.method == "tell" else method.submit(*args)

    @contextmanager
    def _submitting(self, sent: Sent) -> Iterator[tuple[Any, ...]]:
        """A block that submits a call, with its arguments; judges its error, if it is one of the library's."""
        if not sent.is_request:
            name = self.world.current.name
            self._n_placed[name] = place = self._n_placed.get(name, 0) + 1
            sent.place = name, place
        with self.judged(sent):
            try:
                yield sent.args  # here, as other threads may drop futures of rows
            finally:
                sent.may_be_lost |= any(parent.may_be_released for parent in sent.parents)

    def method_of(self, sent: Sent) -> Any:
        """The method of a call, of its group."""
        return self.with_options(getattr(self.group_of(sent), sent.method), sent)

    def group_of(self, sent: Sent) -> Any:
        """The group of a call."""
        if sent.is_rivals and self.turns:
            return self.turns.rival
        if sent.is_callers:
            return self.callers
        return self.other if self.other and sent.token % 2 else self.group

    def with_options(self, method: Any, sent: Sent) -> Any:
        """The method of a call with the options of the call."""
        if sent.limit is not None:
            method = method.options(timeout=sent.limit)
        if sent.retries:
            return method.options(retries=sent.retries, key=sent.token % 3 or None)
        if sent.replica is not None:
            return method.options(replica=sent.replica)
        has_grace = sent.method == "work" and sent.token % 3 == 0 and sent.caller is None
        return method.options(grace=self.grace) if has_grace else method

    def add_callback(self, sent: Sent) -> None:
        sent.n_expected += 1
        future = sent.future
        sent.waited_since = min(sent.waited_since, self.world.now)
        self.world.note("adds a callback", sent.token)
        is_added, added_at = False, self.world.now

        def call_back(given: Any) -> None:
            sent.n_callbacks += 1
            self.world.note("called back", sent.token)
            self.world.check(given is future, "a callback gets another future", sent.token)
            if not sent.is_lost:  # Ctrl-C: the next one has it called
                self.check_lateness(sent, added_at)

        try:
            future.add_done_callback(call_back)
            is_added = True
        finally:
            if not is_added:  # Ctrl-C
                sent.n_expected -= 1
                sent.is_lost = True

    def wait(self, sent: Sent, timeout: float | None) -> None:
        began, future = self.world.now, sent.future
        if future is None:  # another thread has dropped it
            return
        if timeout is None:
            sent.waited_since = min(sent.waited_since, began)
        was_released, limit = sent.is_released, sent.limit if timeout is None else timeout
        try:
            value = future.result(timeout)
        except bm.CallTimeout:
            self.world.check(limit is not None, "a wait without a limit has ended by one", sent.token)
            took = self.world.now - began
            self.world.check(took >= (limit or 0) - 1e-3, "a limit has come too early", sent.token, took)
            self.world.check(self.is_cut or took < (limit or 0) + LATE_S, "a limit is late", sent.token, took, limit)
            if timeout is None and sent.is_request:
                sent.cancel_at(self.world.now)
            return
        except bm.BandmasterError as error:
            self.judge(sent, error)
            return
        self.world.check(not was_released, "rows are there that were released", sent.token)
        self.judge(sent, value)
        self.check_lateness(sent, began)

    def check_lateness(self, sent: Sent, began: float) -> None:
        """A thread that waits is told soon after the last reply."""
        ended = self.ended(sent)
        if ended < math.inf and not (self.is_cut or isinstance(sent.outcome, BaseException)):
            late_s = self.world.now - max(ended, began)
            self.world.check(late_s < LATE_S, f"a wait ends {late_s:.2f} s after the last reply", sent.token)

    def ended(self, sent: Sent) -> float:
        """When the last rank has replied, in the case of a map to the last request; infinity before that."""
        if sent.parts or sent.is_operation:
            return max(map(self.ended, sent.parts or sent.parents), default=START)
        by_rank = self.world.ended.get(sent.token, {})  # type: ignore[attr-defined]
        n_ranks = self.kind.n_ranks if sent.is_for_all else 1
        return max(by_rank.values()) if len(by_rank) == n_ranks else math.inf

    def judge(self, sent: Sent, outcome: Any) -> None:
        """Check the outcome of a call."""
        world, hows = self.world, sent.hows
        if world.current.is_killed or (isinstance(outcome, bm.RowsLost) and sent.may_be_released):
            return  # it was a worker's that has ended; or it may have had its rows before
        if sent.outcome is not None and type(sent.outcome) is not type(outcome):
            world.fail(f"call {sent.token} has had another outcome: {sent.outcome!r}, now {outcome!r}")
        sent.outcome = outcome
        self.world.note("has", sent.token, type(outcome).__name__)
        if isinstance(outcome, bm.CallCancelled):
            is_meant = sent.may_be_cancelled or self.is_renewed
            is_meant |= sent.is_request and sent.limit is not None  # another thread has waited for so long
            # Ctrl-C may have come as the main thread sent it for another one: it was behind a call that waits for rows.
            is_meant |= self.kind.n_interrupts > 0 and self.kind.passing > 0
            world.check(is_meant, "a call was cancelled that nobody cancels", sent.token)
        elif isinstance(outcome, bm.WorkerDied):
            died = self.is_renewed or self.has_died() or "ended by the controller" in str(outcome)  # or is about to be
            world.check(died, "a worker is said to have died", sent.token, outcome)
            n_died = sum(not rank.is_alive for rank in self.world.zygote.ranks.values())  # type: ignore[attr-defined]
            is_over = self.is_renewed or sent.method != "repeat" or n_died > min(sent.retries, self.kind.n_ranks - 1)
            is_over |= "ended by the controller" in str(outcome)  # others are, too, but may not have died yet
            is_over |= self.kind.circling > 0  # the other replicas may wait for it
            world.check(is_over, "a request is not sent again", sent.token, n_died, outcome)
        elif isinstance(outcome, bm.RemoteError) and NOT_CONSTRUCTED in str(outcome.__cause__):
            is_call = not (sent.is_request or sent.parts) or bool(sent.parents)
            world.check(self.is_renewed and is_call, "a request comes before the constructor", sent.token, outcome)
        elif isinstance(outcome, bm.RemoteError) and isinstance(outcome.__cause__, LookupError):
            world.check(self.is_renewed and sent.method == "items", "a generator is gone", sent.token, outcome)
        elif isinstance(outcome, bm.RemoteError):
            world.check("raise" in hows, "a call fails that does not", sent.token, outcome)
            cause = outcome.__cause__
            is_its = isinstance(cause, Raised) and cause.args[0] in sent.tokens
            world.check(is_its, "the failure of another call", sent.token, outcome)
            known = [parent.outcome for parent in sent.parents]
            is_own = cause.args[0] in (sent.token, *(part.token for part in sent.parts))
            is_same = is_own or any(one is None or one is outcome for one in known)
            world.check(is_same, "not the error of the rows", sent.token, outcome)
        elif isinstance(outcome, bm.RowsLost):
            world.check(self.is_renewed or self.has_died(), "rows are lost", sent.token, outcome)
        elif isinstance(outcome, bm.ClosedError) or "ClosedError: group" in str(outcome):  # or the group that it takes
            world.check(self.is_renewed, "a group is closed that nobody closes", sent.token)
        elif isinstance(outcome, bm.UsageError) and self.turns is not None:
            is_refused = "turn" in str(outcome) or "yielded" in str(outcome) or "hook" in str(outcome)
            world.check(is_refused, "a call is refused", sent.token, outcome)
        elif isinstance(outcome, bm.UsageError) and sent.caller is not None:
            callers.check_refused(self, sent, outcome)
        elif isinstance(outcome, BaseException):
            world.fail(f"call {sent.token} has {outcome!r}")
        elif sent.columns is not None:
            world.check(not sent.fails, "a call that fails has a value", sent.token, outcome)
            world.check(are_rows(outcome, sent.columns), "the rows of another call", sent.token, outcome, sent.columns)
        elif sent.parts:
            self._judge_map(sent, outcome)
        else:
            world.check(not sent.fails, "a call that fails has a value", sent.token, outcome)
            values = outcome if sent.is_for_all else [outcome]
            n = self.kind.n_ranks if sent.is_for_all else 1
            ranks = [value[1] for value in values]
            world.check(sent.replica in (None, *ranks), "another replica than it names", sent.token, ranks)
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
                self.judge(sent.parts[int(one.numbers[0])], one.error)
        rows = [row for row in range(len(sent.parts)) if row not in failed]
        values = outcome.value if sent.returns_errors else outcome
        self.world.check(len(values) == len(rows), "rows are missing", sent.token, rows, len(values))
        for row, value in zip(rows, values, strict=True):
            self.judge(sent.parts[row], value)

    @property
    def is_alone(self) -> bool:
        """Whether nothing but the main thread and what it asks for changes anything."""
        kind = self.kind
        shares = kind.dying, kind.retrying, kind.cancelling, kind.cutting, kind.closing, kind.raising, kind.turning
        return not (kind.n_threads or any(shares))

    def has_died(self) -> bool:
        return any(not rank.is_alive for rank in self.world.zygote.ranks.values())  # type: ignore[attr-defined]

    def part_of(self, token: int, rows: Any) -> int:
        """The token of the request of a map that gets some rows."""
        whole = self.by_token[token]
        name, array = next(iter(by_name(rows).items()))
        ids = whole.parents[0].columns[name].ids
        return whole.parts[int(np.flatnonzero(ids == array[0, 0])[0]) // (whole.chunk or 1)].token

    def check_begun(self, token: int, rank: Any = None) -> None:
        """Calls of a thread begin in their order, and none begins whose rows are not there."""
        sent = self.by_token.get(token)
        if sent is None:
            return
        deaths = getattr(self.group_of(sent)._ownership.constructed, "deaths", ())  # of ranks that end as well
        if self.turns is not None and not (rank and rank.rank in deaths):
            blocks = self.turns.inside
            groups = self.turns.had.union(*(wanted for _, wanted in blocks))
            is_its = not blocks or sent.is_rivals in groups
            self.world.check(is_its, "a call begins in the turn of a rival", token, blocks)
        for parent in sent.parents:
            is_there = not (parent.hows & {"raise", "die"} or isinstance(parent.outcome, bm.CallCancelled))
            self.world.check(is_there, "a call begins without its rows", token, parent.token)
        if rank is not None and sent.place is not None:
            name, place = sent.place
            self.world.check(place > rank.places.get(name, 0), "a thread's calls begin in another order", rank, token)
            rank.places[name] = place

    def check_taken(self, token: int, rank: int, taken: Any, is_over: bool = False) -> None:
        """What a call takes is what was passed, from its begin to its end."""
        sent = self.by_token.get(token)
        if sent is None:  # it is over for its caller, who was told that the rank has died, or is about to
            return
        for number, value in enumerate(taken):
            if sent.parents:
                whole = sent.taken or sent.parents[number].columns
                expected = whole if sent.is_request else share_of(whole, rank, self.kind.n_ranks)
                is_right = are_rows(value, expected)
            else:
                expected, is_right = token, value is None or bool((value == token).all())
            self.world.check(is_right, "a call has another's arguments", token, rank, number, value, expected)
            if is_over and value is not None:  # it is the call's own: nobody else sees what it writes there
                for array in by_name(value).values():
                    array[...] = -1

    def _finish(self) -> None:
        """Wait for all calls, and check that each has ended once."""
        sync.sleep(LATE_S)  # in which nobody waits
        for sent in self.calls:
            ended = max(self.ended(sent), sent.waited_since) if sent.hows <= {"value", "large"} else math.inf
            is_late = sent.n_callbacks < sent.n_expected and self.world.now > ended + LATE_S
            is_meant = self.is_cut or sent.is_cancelled or sent.is_lost
            self.world.check(not is_late or is_meant, "a callback does not come", sent.token)
        for sent in self.calls:
            if sent.future is not None:
                self.wait(sent, None if sent.limit is None else 1e6)
        # Callbacks run in a thread of their own, if no other has found the call done.
        waiting = [sent for sent in self.calls if sent.n_callbacks < sent.n_expected]
        deadline = self.world.now + LATE_S
        sync._block(lambda: all(s.n_callbacks >= s.n_expected for s in waiting), deadline - self.world.now, "callbacks")
        for sent in self.calls:
            is_right = sent.n_callbacks == sent.n_expected or (sent.is_lost and sent.n_callbacks >= sent.n_expected)
            self.world.check(is_right, "callbacks", sent.token, sent.n_callbacks, sent.n_expected)
        self.calls.clear()
        self.by_token.clear()

    def _check_leases(self) -> None:
        """Leases end when nobody has what lies in segments, on both ends."""
        ranks = self.world.zygote.ranks.values()  # type: ignore[attr-defined]
        if (
            self.is_cut
            or self.is_closing
            or self.kind.acting  # ranks that do not stop may be ended a while after a call
            or self.kind.n_hosts
            or self.kind.is_inprocess
            or self.kind.calling
            or not all(rank.is_alive for rank in ranks)
        ):
            return
        self._read_dropped()
        self._let_go()
        writer = self.group._ownership.workers()._writer
        self.world.check(not writer.has_leases, "leases of ranks are left", writer._segments)
        for rank in ranks:
            self.world.check(not rank.has_leases, "leases of the controller are left", rank)
            self.world.check(not rank.streams or self.kind.n_interrupts, "generators are left", rank, rank.streams)

    def _read_dropped(self) -> None:
        """Read the replies of calls whose futures were dropped, which are read with those of the next one."""
        for _ in range(2):
            with suppress(bm.BandmasterError), self.group.turn() if self.turns is not None else nullcontext():
                self.group.work(next(self.tokens))  # which may be closed

    def _let_go(self) -> None:
        """Wait until nothing refers to what calls have returned."""
        sync.sleep(SETTLED_S / 10)  # in which threads end, which refer to what they have looked at last
        for _ in range(2):  # streams that Ctrl-C has left are closed by a thread, which refers to them meanwhile
            while gc.collect():  # again, as the end of claims may refer to what is collected with them
                pass
            sync.sleep(SETTLED_S / 10)

    def _settle(self) -> None:
        """Wait until ranks and the threads of the library have ended, and check that nothing is left."""
        world = self.world
        ranks = world.zygote.ranks.values()  # type: ignore[attr-defined]
        self.group = self.other = self.whole = self.turns = self.callers = None
        self.calls.clear()
        for _ in range(2):  # maps that Ctrl-C has left, to which frames of its traceback or of threads refer
            gc.collect()
            with suppress(WorldEnded):
                sync._block(
                    lambda: len(world.tasks) == 1 and not any(rank.is_alive for rank in ranks),
                    SETTLED_S,
                    "the end of threads",
                )
        world.check(len(world.tasks) == 1, "threads are left", world.tasks)
        gc.collect()
        world.check(not world.files, "descriptors are left", world.files)
        watches = progress_module.progress._watches
        world.check(not watches, "watches are left", watches)


def warm_up(made: Installed) -> None:
    """Run programs, so that those to come do not depend on what the library does when it is first used."""
    usual = Kind(2, 2, 60, 0.1, 0.0, 0.1, 0.01, 0.5, 0.0, 0, 10.0)
    for kind in (usual._replace(is_colocated=True), usual._replace(n_steps=20, dying=0.0, calling=0.7)):
        Program(0, kind).run(made)


async def _value(future: Any) -> Any:
    return await future


class _Log(logging.Handler):
    """Fails a program of which the library logs an error."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        is_left = World.has_ever_killed and "never retrieved" in text  # by a loop of a process that was killed,
        is_left |= World.has_ever_killed and "was destroyed but" in text  # perhaps in a program before this one
        is_left &= record.name == "asyncio"
        is_left |= "on_stall" in text and not self._world.program.is_alone  # type: ignore[attr-defined]
        if not (self._world.current.is_killed or ThreadEnds.__name__ in text or is_left):
            self._world.fail(f"the library has logged: {text}")


def _hook(args: Any) -> None:
    world = worlds.world
    is_left = World.has_ever_killed and "Event loop is closed" in str(args.exc_value)
    if is_left or (world is not None and world.has_killed):
        return  # perhaps it is of what a killed process has left, in a program before this one
    if world is not None:
        world.fail(f"an exception was lost: {args.exc_value!r} in {args.object!r}")
    else:
        sys.__unraisablehook__(args)


sys.unraisablehook = _hook
assert threading  # its hooks stay as they are
