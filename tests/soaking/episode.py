"""The life of one group: it is started, called and hurt at random, mended or not, and closed."""

import contextlib
import os
import signal
import threading
from collections import deque

from soaking.callers import Callers, check_order
from soaking.expected import Expected, Prediction, Wrong, outcome_of, random_faults
from soaking.requests import ask_from_workers, ask_many
from soaking.rows import Chain
from soaking.streams import Reading
from soaking.subject import DEADLY, HANGING, Subject, random_array, random_batch, same

import bandmaster as bm
from bandmaster.testing import with_faults

GRACE_S = 0.2  # before ranks are ended that cannot be interrupted


class Episode:
    def __init__(self, soak, backend, has_torch):
        self.soak, self.rng, self.backend = soak, soak.rng, backend
        rng = self.rng
        self.is_local = backend == "local"
        n = rng.choice([1, 2, 2, 3, 4] if self.is_local else [1, 2])
        self.mesh = bm.Mesh(dp=2, tp=2) if n == 4 and rng.random() < 0.5 else bm.Mesh(dp=n)
        self.ranks = range(n)
        self.methods = [
            "echo",
            "rows",
            "rows_async",
            "hold",
            "overwrite",
            "fork_with",
            *(["through_torch"] if has_torch else []),
        ]
        self.faults = random_faults(rng, n)
        self.expected = Expected(self.mesh, self.faults, soak.stats)
        self.cls = with_faults(Subject, *self.faults)
        self.pending = None  # a call that hangs when the group is closed
        self.kept = deque(maxlen=4)  # results, which must stay as they are
        self.rows = deque(maxlen=4)  # futures, whose rows must be there when the group is closed

    def run(self):
        self.soak.watchdog.recent.append(f"--- {self.backend}, {self.mesh!r}, {self.faults}")
        with bm.ResourcePool([self.mesh.size], backend=self.backend, max_colocate_count=1) as pool:
            if self.may("fail to start", 0.05):
                self.fail_to_start(pool)
            if self.may("interrupt start", 0.1):
                self.interrupt_start(pool)
            with self.within(20, "start"), self.soak.stats.timing("start"):
                self.group = bm.WorkerGroup(pool, self.cls, mesh=self.mesh)
            self.soak.stats.n_groups += 1
            self.know_processes()
            for _ in range(self.rng.choice([0, 1, 1, 2, 3, 6])):
                if self.pending is None:
                    self.act()
            if self.may("interrupt close", 0.1):
                self.interrupt("close", 0.02, self.group.close)
            if self.may("close under calls", 0.1) and not (self.faults or self.expected.is_dead or self.pending):
                with self.within(25, "close under calls"), Callers(self.group, may_fail=True):
                    self.group.close()
            with self.within(10, "close"), self.soak.stats.timing("close"):
                self.group.close()
                if self.pending is not None and not isinstance(outcome_of(self.pending.result, 8.0), bm.WorkerDied):
                    raise Wrong(f"closed, and a pending call came to {outcome_of(self.pending.result, 8.0)!r}")
            if not all(same(now, then) for now, then in self.kept):
                raise Wrong("a result has changed after it was received")
            for known in self.rows:
                if not same(known.outcome(), known.value):
                    raise Wrong(f"rows of a group that was closed are {known.outcome()!r} and not {known.value!r}")

    def act(self):
        """Do something at random."""
        actions = [self.call] * 8 + [self.pipeline] * 4 + [self.call_from_threads, self.callers, self.mistake]
        actions += [self.rows_by_reference] * 3 + [self.stream] * 3 + [self.requests] * 2
        if not self.expected.is_dead:
            actions += [self.misbehave, self.misbehave, self.kill, self.hang, self.hang, self.start_children]
            actions += [self.interrupt_call] * 3 + [
                self.interrupt_stream,
                self.kill_under_calls,
                self.kill_under_requests,
                self.restart_under_calls,
            ]
        else:
            actions += [self.restart, self.replace] * 4
        actions += [self.restart, self.replace]
        action = self.rng.choice(actions)
        name = action.__name__.replace("_", " ")
        if name not in self.soak.skipped:
            self.soak.stats.done[name] += 1
            action()

    def may(self, what, probability):
        """Whether to do something beside the actions; Ray is not interrupted in the middle of its own affairs."""
        is_chosen = self.rng.random() < probability and what not in self.soak.skipped
        return is_chosen and (self.is_local or not what.startswith("interrupt"))

    # --- calls ---

    def random_call(self):
        """A call that can be made, its prediction and its value."""
        method = self.rng.choice(self.methods)
        argument = random_batch(self.rng) if method.startswith("rows") else random_array(self.rng)
        value = True if method == "hold" else argument
        value = value if method.startswith("rows") else [value] * self.mesh.size
        self.soak.watchdog.recent.append(f"{method} of {str(argument)[:60]!r}")
        return getattr(self.group, method), argument, self.expected.count(method), value

    def call(self):
        method, argument, prediction, value = self.random_call()
        with self.within(15, "call"):
            self.judge(prediction, outcome_of(method, argument), value)

    def pipeline(self):
        """Calls that are sent before the results of those before them are there."""
        with self.within(30, "pipeline"):
            sent = []
            for _ in range(self.rng.randint(2, 12)):
                method, argument, prediction, value = self.random_call()
                sent.append((prediction, method.submit(argument), value))
                if sent[1:] and prediction.died:  # which may fail calls before it that other ranks have not answered
                    self.expected.may_be_dead |= prediction.died
            for prediction, future, value in sent:
                self.judge(prediction, outcome_of(future.result), value)

    def rows_by_reference(self):
        """Calls and operations on futures; some of their rows are looked at when the group is closed."""
        if self.faults or self.expected.is_dead:
            return
        with self.within(30, "rows by reference"):
            prediction, chain = Prediction(is_hopeless=False), Chain(self.rng, self.group)
            for known in self.rng.sample([*chain.known, *chain.kept], len(chain.known) + len(chain.kept)):
                self.judge(prediction, outcome := known.outcome(), known.value)
                if (
                    any(known is one for one in chain.known)
                    and not isinstance(outcome, BaseException)
                    and self.rng.random() < 0.2
                ):
                    self.rows.append(known)
            chain.check_lost(may_fail=bool(self.expected.may_be_dead))

    def stream(self):
        """Results, items or chunks as they come, with other calls in between."""
        if self.faults or self.expected.is_dead:
            return
        with self.within(30, "stream"):
            reading = outcome_of(Reading, self.rng, self.group)
            if not isinstance(reading, Exception):
                reading = self.read(reading)
            self.judge(Prediction(is_hopeless=False), reading, None)
        self.check_generators()

    def read(self, reading):
        """Read a stream.

        Returns:
            The error that ended it, or None.
        """
        calls = []

        def between():
            if self.rng.random() < 0.2:
                calls.append(outcome_of(self.group.echo, 1))

        error = outcome_of(reading.read, between)
        reading.check()
        for outcome in calls:
            self.judge(Prediction(is_hopeless=False), outcome, [1] * self.mesh.size)
        return error

    def interrupt_stream(self):
        if self.faults or self.expected.may_be_dead:
            return
        reading = outcome_of(Reading, self.rng, self.group)
        outcome = self.interrupt("stream", 0.004, self.read, reading)
        if outcome is not None and not isinstance(outcome, KeyboardInterrupt):
            raise Wrong("a stream that was interrupted") from outcome
        self.check_generators()

    def check_generators(self):
        """All have ended, whether or not they were read to their end."""
        prediction = self.expected.count("count_open")
        with self.within(15, "generators"):
            self.judge(prediction, outcome_of(self.group.count_open), [0] * self.mesh.size)

    def call_from_threads(self):
        """The calls of several threads come in any order."""
        if self.faults or self.expected.is_dead:
            return
        calls = [[self.random_call() for _ in range(4)] for _ in range(3)]
        wrong = []

        def work(calls):
            try:
                for method, argument, prediction, value in calls:
                    self.judge(prediction, outcome_of(method, argument), value)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=[calls]) for calls in calls]
        with self.within(30, "calls of three threads"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if wrong:
            raise wrong[0]

    def callers(self):
        """Several threads call all ranks with rows of their own, in an order that all ranks share."""
        if self.faults or self.expected.may_be_dead:
            return
        with self.within(25, "callers"):
            self.group.heard()
            with Callers(self.group, may_fail=False):
                outcome_of(self.group.echo, 1)
            check_order(self.group.heard())

    def requests(self):
        """Requests from an event loop, and sometimes from workers as well."""
        if self.faults or self.expected.may_be_dead:
            return
        with self.within(30, "requests"):
            (ask_from_workers if self.is_local and self.rng.random() < 0.3 else ask_many)(self.rng, self.group)

    def kill_under_requests(self):
        if self.faults or self.expected.may_be_dead:
            return
        rank = self.rng.choice(self.ranks)

        def kill():
            kill_process(self.pids[rank])
            return rank

        with self.within(25, "kill under requests"):
            ask_many(self.rng, self.group, kill)
            self.expected.may_be_dead |= {rank}
            self.await_death()
        self.count_fault("kill -9 under requests")

    def restart_under_calls(self):
        if self.faults:
            return
        with self.within(30, "restart under calls"):
            with Callers(self.group, may_fail=True):
                self.group.restart()
            check_order(self.group.heard())
        self.expected.all_are_new()
        self.know_processes()
        self.count_fault("restart under calls")

    def kill_under_calls(self):
        if self.faults or self.expected.may_be_dead:
            return
        rank = self.rng.choice(self.ranks)
        with self.within(25, "kill under calls"), Callers(self.group, may_fail=True):
            kill_process(self.pids[rank])
            self.expected.may_be_dead |= {rank}
            self.await_death()
        self.count_fault("kill -9 under calls")

    def mistake(self):
        """Nothing is sent."""
        with self.within(5, "mistake"):
            outcome = outcome_of(
                self.rng.choice([lambda: self.group.echo(threading.Lock()), lambda: self.group.echo()])
            )
        if not isinstance(
            outcome, (bm.ArgumentError, bm.WorkerDied) if self.expected.may_be_dead else bm.ArgumentError
        ):
            raise Wrong(f"a call that cannot be made came to {outcome!r}")

    def start_children(self):
        prediction = self.expected.count("start_child")
        with self.within(15, "start children"):
            outcome = outcome_of(self.group.start_child, self.rng.random() < 0.5)
            self.judge(prediction, outcome, [True] * self.mesh.size)

    def judge(self, prediction, outcome, value):
        self.expected.judge(prediction, outcome, value)
        if not isinstance(outcome, BaseException) and self.rng.random() < 0.3:
            self.kept.append((outcome, value))

    # --- what goes wrong on the ranks ---

    def misbehave(self):
        """Ranks fail or die, while others may hang or work."""
        rng = self.rng
        how = {r: rng.choice(["raise", *DEADLY, *HANGING, "sleep", None, None]) for r in self.ranks}
        died = {rank for rank in how if how[rank] in DEADLY}
        raised = {rank for rank in how if how[rank] == "raise"}
        stuck = {rank for rank in how if how[rank] == "deadlock"}
        prediction = self.expected.count("misbehave_on")
        if not (died or raised) or prediction or not self.is_harmless():
            how, died, raised, stuck = {}, set(), set(), set()
        with self.within(20, f"misbehave: {how}"):
            outcome = outcome_of(self.group.misbehave_on.options(grace=GRACE_S), how)
        if not how:
            self.judge(prediction, outcome, [None] * self.mesh.size)
        elif isinstance(outcome, bm.WorkerDied) if died else type(outcome) is bm.RemoteError:
            if outcome.rank not in (died or raised):
                raise Wrong(f"{how} and the rank is said to be {outcome.rank}") from outcome
            self.count_fault(", ".join(sorted({str(what) for what in how.values() if what})))
            self.expected.may_be_dead |= died | stuck
            self.expected.is_dead = bool(self.expected.may_be_dead)
            self.expected.is_certain = False
        else:
            raise Wrong(f"{how} and it came to {outcome!r}")

    def is_harmless(self):
        """Whether it is sure that no fault of the class falls on the next call."""
        return not self.expected.may_be_dead and (self.expected.is_certain or not self.faults)

    def hang(self):
        """Ranks hang until the call is cancelled."""
        rng = self.rng
        ranks, what = rng.sample(self.ranks, rng.randint(1, self.mesh.size)), rng.choice(HANGING)
        prediction = self.expected.count("misbehave_on")
        if prediction or not self.is_harmless():
            self.judge(prediction, outcome_of(self.group.misbehave_on, {}), [None] * self.mesh.size)
            return
        method = self.group.misbehave_on.options(timeout=rng.random() * 0.3, grace=GRACE_S)
        with self.within(10, f"{what} on {ranks}"):
            outcome = outcome_of(method, dict.fromkeys(ranks, what))
        if not isinstance(outcome, bm.CallTimeout) or not set(ranks) <= set(outcome.missing):
            raise Wrong(f"{what} on {ranks} and it came to {outcome!r}")
        if not outcome.stacks.keys() <= set(outcome.missing):
            raise Wrong(f"stacks of {outcome.stacks.keys()}") from outcome
        self.count_fault(f"timeout in {what}")
        self.expected.is_certain = False
        then = rng.random()
        if then < 0.2:
            self.restart(pending=outcome.future)
        elif then < 0.3:
            self.pending = outcome.future
        else:
            self.cancel(outcome.future, set(ranks) if what == "deadlock" else set())

    def cancel(self, future, stuck):
        """Give a call up; ranks that are stuck are ended."""
        with self.within(10, f"cancel with {stuck} stuck"):
            future.cancel()
            self.expected.may_be_dead |= stuck
            if stuck:
                self.await_death()
            outcome = outcome_of(future.result, 8.0)
        if not isinstance(outcome, bm.CallCancelled):
            raise Wrong(f"cancelled, and came to {outcome!r}")

    def kill(self):
        """From outside, while calls are on their way."""
        rank, told = self.rng.choice(self.ranks), threading.Event()
        if self.expected.may_be_dead:
            return
        with self.within(10, "on_death"):
            self.group.on_death(lambda error: told.set())
        timer = threading.Timer(self.rng.random() * 0.03, kill_process, [self.pids[rank]])
        self.expected.may_be_dead |= {rank}
        timer.start()
        self.rng.choice([self.call, self.pipeline, self.rows_by_reference, self.stream])()
        timer.join()
        self.count_fault("kill -9")
        self.await_death()
        with self.within(10, "word of a death"):
            if self.group.healthy:
                raise Wrong("a group whose worker was killed is healthy")
            if not told.wait(8):
                raise Wrong("on_death was not called")

    def await_death(self):
        """Some calls after a rank has died, all of them say so."""
        with self.within(10, f"the death of one of {self.expected.may_be_dead}"):
            while not self.expected.is_dead:
                prediction = self.expected.count("echo")
                self.judge(prediction, outcome_of(self.group.echo, 1), [1] * self.mesh.size)

    # --- Ctrl-C ---

    def interrupt(self, what, longest_s, function, *args):
        """What became of it."""
        with self.within(15, f"Ctrl-C in {what}"):
            outcome = self.soak.interrupter.run(longest_s, function, *args)
        if isinstance(outcome, KeyboardInterrupt):
            self.count_fault(f"Ctrl-C in {what}")
        return outcome

    def interrupt_call(self):
        if not self.is_harmless():
            return
        if self.rng.random() < 0.3:
            how = dict.fromkeys(self.ranks, self.rng.choice(["spin", "sleep"]))
            prediction, value = self.expected.count("misbehave_on"), None
            method, argument = self.group.misbehave_on.options(timeout=5.0), {} if prediction else how
            longest_s = 0.1
        else:
            method, argument, prediction, value = self.random_call()
            longest_s = self.rng.choice([0.001, 0.003, 0.01])
        outcome = self.interrupt("call", longest_s, method, argument)
        if isinstance(outcome, KeyboardInterrupt):
            self.expected.is_certain = False
            self.expected.may_be_dead |= prediction.died
        elif isinstance(outcome, bm.CallTimeout):  # the interrupt came in somebody's __del__, where it is swallowed
            self.expected.is_certain = False
            outcome.future.cancel()
        else:
            self.judge(prediction, outcome, value)

    def interrupt_start(self, pool):
        outcome = self.interrupt("start", 0.06 * self.mesh.size, lambda: bm.WorkerGroup(pool, self.cls, mesh=self.mesh))
        if isinstance(outcome, bm.WorkerGroup):
            outcome.close()
        elif not isinstance(outcome, KeyboardInterrupt):
            raise Wrong("a start that was interrupted") from outcome

    # --- starting and mending ---

    def fail_to_start(self, pool):
        rank, how = self.rng.choice(self.ranks), self.rng.choice(["raise", "sleep", *DEADLY])
        others = dict.fromkeys(self.ranks, "sleep") if self.rng.random() < 0.3 else {}
        with self.within(15, f"start with {how} on {rank}"):
            limit_s = None if how in ("raise", *DEADLY) else 0.3
            arguments = {"start_timeout": limit_s, "mesh": self.mesh}
            error = outcome_of(bm.WorkerGroup, pool, self.cls, {**others, rank: how}, **arguments)
        self.count_fault(f"{how} in a constructor")
        kinds = {"raise": bm.ConstructorError, "sleep": bm.CallTimeout}
        if type(error) is not kinds.get(how, bm.WorkerDied):
            raise Wrong(f"{how} on rank {rank} in the constructor came to {error!r}")
        if rank not in (error.missing if how == "sleep" else [error.rank]):
            raise Wrong(f"{how} on rank {rank} in the constructor, but another rank is named") from error

    def restart(self, pending=None):
        if self.may("interrupt restart", 0.2):
            self.interrupt("restart", 0.08, self.group.restart)
        with self.within(20, "restart"), self.soak.stats.timing("restart"):
            self.group.restart()
        self.expected.all_are_new()
        self.know_processes()
        if pending is not None and not isinstance(outcome_of(pending.result, 8.0), bm.WorkerDied):
            raise Wrong(f"restarted, and a pending call came to {outcome_of(pending.result, 8.0)!r}")

    def replace(self):
        if self.expected.may_be_dead and not self.expected.is_dead:
            return
        rank = min(self.expected.may_be_dead, default=self.rng.choice(self.ranks))
        if self.may("interrupt replace", 0.2):
            outcome = self.interrupt("replace", 0.05, self.group.replace, rank)
            if isinstance(outcome, KeyboardInterrupt):
                self.restart()
                return
        others = self.expected.may_be_dead - {rank}
        with self.within(20, f"replace {rank}"), self.soak.stats.timing("replace"):
            outcome = outcome_of(self.group.replace, rank)
        if not isinstance(outcome, BaseException):
            self.expected.is_new(rank)
            self.know_processes()
        elif others and isinstance(outcome, bm.UsageError | bm.WorkerDied):  # one can be replaced, not several
            self.restart()
        else:
            raise Wrong(f"replaced {rank} while {others} were dead") from outcome

    def know_processes(self):
        """By rank, without a call."""
        header, *rows = self.group.describe().splitlines()[1:]
        column = header.split().index("pid")
        self.pids = self.soak.watchdog.worker_pids = [int(row.split()[column]) for row in rows]

    def within(self, seconds, what):
        return self.soak.watchdog.within(seconds if self.is_local else 5 * seconds, what)

    def count_fault(self, what):
        self.soak.stats.faults[what] += 1


def kill_process(pid):
    with contextlib.suppress(ProcessLookupError):  # a fault has been faster
        os.kill(pid, signal.SIGKILL)
