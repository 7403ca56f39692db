"""`World`: virtual time, and threads of which one runs at a time, as the seed says.

::

    thread of the controller ── lock, wait, poll, clock, line ──► tick: virtual time, due events, perhaps another thread
                             ── cannot go on ──► block: the next thread that can; if there is none, the next event

Threads are threads of the system, so that identifiers, signal handlers and tracing are Python's own. Each has a gate;
the one that runs opens the gate of the next and waits at its own. Events, such as the steps of simulated ranks, run in
whichever thread lets time pass.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import heapq
import inspect
import itertools
import math
import random
import signal
import sys
import threading
import traceback
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

TICK_S = 1e-6
START = 1000.0
MOST_TICKS = 3_000_000  # of a program: more than that is a loop without end
MOST_S = 1_000.0
KEPT_EVENTS = 400
FIRST_INTERRUPT = 40  # calls of functions of the library in the main thread before the first Ctrl-C
MOST_AFTER = 10_000  # steps of the main thread after a failure, in which it leaves what it has entered


class WorldEnded(BaseException):
    """Raised in the main thread when a program cannot go on."""


class ThreadEnds(BaseException):
    """Raised in the threads of a process that was killed."""


class Task:
    """A thread of the world.

    Attributes:
        name: Its name.
        ready: Returns whether it can go on; None if it can.
        deadline: The moment at which it goes on anyway.
        waits: What it waits for, in words.
        process: The process that it belongs to; "" for the controller.
        is_killed: Whether that was killed.
        signal: What the handler of a signal does that has come; None if none has.
    """

    def __init__(self, name: str, process: str = "") -> None:
        self.name, self.process = name, process
        self.is_killed = False
        self.signal: Callable[[], object] | None = None
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.ready: Callable[[], bool] | None = None
        self.deadline = math.inf
        self.waits = ""
        self.is_over = False
        self.ident = 0
        self.is_interruptible = False

    def __repr__(self) -> str:
        return f"<{self.name}{' waits for ' + self.waits if self.ready is not None else ''}>"


class Process:
    """A process of the world.

    Attributes:
        host: The name of its host.
        main: Its main thread.
        parent: The process that has started it.
        pid: Its number.
        state: What modules of the library keep for each process, by name.
        loops: Its event loops.
    """

    def __init__(self, host: str, main: Task, parent: str = "", pid: int = 1) -> None:
        self.host, self.main, self.parent, self.pid = host, main, parent, pid
        self.state: dict[Any, Any] = {}
        self.loops: weakref.WeakSet[Any] = weakref.WeakSet()


class _Carrier:
    """A thread of the system that runs tasks one after the other: to start one takes long."""

    def __init__(self) -> None:
        self._gate = _thread.allocate_lock()
        self._gate.acquire()
        self._task: Task
        self._run: Callable[[], object]
        thread = threading.Thread(target=self._loop, daemon=True, name="simulated")
        thread.start()
        self.ident = thread.ident or 0

    def begin(self, task: Task, run: Callable[[], object]) -> None:
        task.gate, task.ident = self._gate, self.ident
        self._run = run

    def _loop(self) -> None:
        while True:
            self._gate.acquire()
            self._run()


_idle: list[_Carrier] = []


class World:
    """One program's threads, events and time.

    Attributes:
        random: Draws all that is left to chance.
        now: The virtual time, by what the program takes for `time.monotonic`.
        history: What has happened, for checks and to compare runs.
        failure: Why the program cannot go on; "" as long as it can.

    Args:
        seed: Of all that is drawn.
        switch_every: Steps between two switches of threads, on average.
        hot: The share of functions between whose lines threads may be switched.
        n_interrupts: How often Ctrl-C is pressed at the beginning of a function of the main thread.
    """

    has_ever_killed = False  # whether a program of this process has killed one, whose tasks may be collected later

    def __init__(self, seed: int, switch_every: float = 20.0, hot: float = 0.0, n_interrupts: int = 0) -> None:
        self.random = random.Random(seed)
        self.now = START
        self.history: list[tuple[Any, ...]] = []
        self.trail: deque[str] = deque(maxlen=KEPT_EVENTS)
        self.failure = ""
        self.main = self.current = Task("main")
        self.main.ident = threading.get_ident()
        self.tasks = [self.main]
        self.is_in_event = self.has_killed = False
        self.version = 0  # changes whenever a descriptor may have become ready
        self.processes = {"": Process("controller", self.main)}
        self.names: dict[tuple[str, str], Any] = {}  # sockets that listen, by host and name
        self.files: dict[int, Any] = {}
        self.n_ticks = self.n_switches = 0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._switch_every = switch_every
        self._left = 1
        self._next_event = math.inf
        self.is_still = False  # while events happen or a thread is chosen, and once the program has failed
        self._is_choosing, self._n_after_failure = False, 0
        self._is_interrupted = False
        self.hot = hot
        self._seed = seed
        self._lines_left = 1
        self._to_interrupt = FIRST_INTERRUPT
        self.interrupts_left = n_interrupts

    # --- time and events ---

    def at(self, moment: float, function: Callable[..., object], *args: Any) -> None:
        """Call a function at a moment."""
        heapq.heappush(self._events, (moment, next(self._numbers), function, args))
        self._next_event = self._events[0][0]

    def after(self, seconds: float, function: Callable[..., object], *args: Any) -> None:
        """Call a function after some time."""
        self.at(self.now + seconds, function, *args)

    def note(self, *what: Any) -> None:
        """Add an entry to the history."""
        self.history.append((round(self.now, 6), self.current.name, *what))

    def tick(self) -> None:
        """Let a moment pass, in which events happen and another thread may run."""
        if self.is_still:
            if self.failure and not (self.is_in_event or self._is_choosing):
                self._n_after_failure += 1
                if self.current is not self.main or self._n_after_failure > MOST_AFTER:
                    self._stop()
            return
        self.now = now = self.now + TICK_S
        if now >= self._next_event:
            self._run_due()
        self._left -= 1
        if self._left <= 0:
            self._switch()

    def _run_due(self) -> None:
        was_still, self.is_still = self.is_still, True
        self.is_in_event, events = True, self._events
        try:
            while events and events[0][0] <= self.now:
                _, _, function, args = heapq.heappop(events)
                function(*args)
        except BaseException as error:
            self.fail(f"an event failed: {''.join(traceback.format_exception(error))}")
        finally:
            self.is_in_event, self.is_still = False, was_still or bool(self.failure)
            self._next_event = events[0][0] if events else math.inf

    # --- threads ---

    def _switch(self) -> None:
        """Perhaps let another thread run, or none for a while."""
        self.n_ticks += 1
        if self.n_ticks > MOST_TICKS or self.now > START + MOST_S:
            self.fail(f"the program does not end: {self.n_ticks:,} switches, {self.now - START:.0f} s")
            self._stop()
        me = self.current
        if me.is_killed:
            raise ThreadEnds
        draw = self.random.random()
        self._left = 1 + int(self.random.expovariate(1.0 / self._switch_every))
        if draw < 0.01:  # the machine is busy with something else
            me.ready, me.deadline, me.waits = _never, self.now + 10 ** self.random.uniform(-5.0, -0.7), "a processor"
            me.is_interruptible = False
        if draw < 0.5 or me.ready is not None:
            self._pass_on()

    def block(
        self, ready: Callable[[], bool], deadline: float = math.inf, waits: str = "", is_interruptible: bool = True
    ) -> bool:
        """Wait until a function returns True or a moment has come. Returns what the function says then."""
        assert not self.is_in_event, f"an event waits for {waits}"
        if self.failure:
            self._stop()
        me = self.current
        while True:
            if is_interruptible and me.signal is not None:
                handler, me.signal = me.signal, None
                handler()  # raises, or was put off
            me.ready, me.deadline, me.waits, me.is_interruptible = ready, deadline, waits, is_interruptible
            self._pass_on()
            if is_interruptible and self._is_interrupted and me is self.main:
                self._is_interrupted = False
                self._press(sys._getframe())  # raises, or was put off
                continue
            if is_interruptible and me.signal is not None:
                continue
            return ready()

    def send_signal(self, process: str, handler: Callable[[], object]) -> None:
        """Have the main thread of a process call a function the next time that it waits, or now if it does."""
        main = self.processes[process].main
        main.signal = handler
        if main.ready is not None and main.is_interruptible:
            main.deadline = -math.inf

    def _pass_on(self) -> None:
        """Let the next thread run that can, until it is this one's turn again."""
        me = self.current
        chosen = self._chosen()
        if self.failure:
            self._stop()
        if chosen is not me:
            self._hand_over(chosen)
            me.gate.acquire()
            if self.failure:
                raise WorldEnded
        me.ready, me.deadline = None, math.inf
        if me.is_killed:
            self._left = 0  # at its next step again, if this is caught
            raise ThreadEnds

    def _stop(self) -> None:
        """Raise in the main thread, as the program has failed; other threads stand still for good."""
        if self.current is not self.main:
            me = self.current
            self._hand_over(self.main)
            me.gate.acquire()
        raise WorldEnded

    def _hand_over(self, chosen: Task) -> None:
        self.n_switches += 1
        self.current = chosen
        self.trail.append(f"{self.now - START:.6f} {chosen.name} goes on")
        chosen.gate.release()

    def _chosen(self) -> Task:
        self.is_still = self._is_choosing = True
        main = self.main
        try:
            while True:
                now, tasks = self.now, self.tasks
                first = int(self.random.random() * len(tasks))
                for task in tasks[first:] + tasks[:first]:
                    if task.ready is None or task.deadline <= now or task.is_killed or task.ready():
                        return task
                    if task is main and self._is_interrupted and main.is_interruptible:
                        return main
                moment = min([task.deadline for task in self.tasks])
                moment = min(moment, self._next_event)
                if moment == math.inf:
                    self.fail("no thread can go on, and nothing will happen")
                elif moment > START + MOST_S:
                    self.fail(f"the program does not end within {MOST_S:.0f} s")
                if self.failure:
                    return main
                self.now = max(now, moment)
                self._run_due()
        finally:
            self.is_still, self._is_choosing = bool(self.failure), False

    def kill(self, process: str) -> None:
        """Kill a process other than the controller."""
        self.note("killed", process)
        self.has_killed = World.has_ever_killed = True
        for file in [file for file in self.files.values() if file.process == process]:
            file.close()
        for task in self.tasks:
            if task.process == process:
                task.is_killed = True
        for loop in self.processes[process].loops:
            for pending in asyncio.all_tasks(loop):
                pending._log_destroy_pending = False  # type: ignore[attr-defined]  # as nobody is told
        self._left = 0  # a thread that kills its own process ends at its next step

    def start_process(self, process: str, host: str, name: str, target: Callable[[], object], pid: int) -> None:
        """Start a process, whose main thread calls a function."""
        task = Task(name, process)
        self.processes[process] = Process(host, task, self.current.process, pid)
        self._begin(task, target)

    def spawn(self, name: str, target: Callable[[], object], process: str | None = None) -> Task:
        """Start a thread, by default of this one's process."""
        task = Task(name, self.current.process if process is None else process)
        self._begin(task, target)
        return task

    def _begin(self, task: Task, target: Callable[[], object]) -> None:
        carrier = _idle.pop() if _idle else _Carrier()
        carrier.begin(task, lambda: self._live(task, carrier, target))
        self.tasks.append(task)
        self.tick()

    def _live(self, task: Task, carrier: _Carrier, target: Callable[[], object]) -> None:
        task.ready, task.deadline = None, math.inf
        try:
            contextvars.Context().run(target)
        except WorldEnded:
            return
        except ThreadEnds:
            pass
        except BaseException as error:
            if not task.is_killed:  # else what it has left undone may have failed
                self.fail(f"thread {task.name} has died: {''.join(traceback.format_exception(error))}")
        del target  # here, as what ends with it may let other threads run
        task.is_over = True
        self.tasks.remove(task)
        chosen = self.main if self.failure else self._chosen()
        _idle.append(carrier)
        self._hand_over(chosen)

    def fail(self, why: str) -> None:
        """Note why the program cannot go on."""
        if not self.failure:
            self.is_still = True
            self.failure = f"{self.stacks()}\n{why}"

    def check(self, is_right: bool, why: str, *what: Any) -> None:
        """Fail the program unless something holds."""
        if not is_right:
            self.fail(f"{why}: {', '.join(map(repr, what))}" if what else why)

    def stacks(self) -> str:
        """Where each thread is."""
        frames = sys._current_frames()
        lines = []
        for task in self.tasks:
            frame = frames.get(task.ident)
            summary = [] if frame is None else traceback.extract_stack(frame)
            inside = [one for one in summary if "/bandmaster/" in one.filename or one.name.startswith("_step")]
            lines += [
                repr(task),
                *(f"  {one.filename.rpartition('/src/')[2]}:{one.lineno} {one.name}" for one in inside),
            ]
        return "\n".join(lines)

    # --- lines ---

    def is_hot(self, code: Any) -> bool:
        """Whether threads may be switched between the lines of a function; the same in each run of a seed."""
        name = f"{self._seed} {code.co_filename.rpartition('/')[2]}"
        if self._seed % 2:  # all functions of some modules, or some functions of all
            name += f" {code.co_name}"
        return zlib.crc32(name.encode()) < self.hot * (1 << 32)

    def line(self) -> None:
        """Perhaps let another thread run between two lines of a function."""
        if self.is_still:
            return
        self._lines_left -= 1
        if self._lines_left <= 0:
            self._lines_left = 1 + int(self.random.expovariate(1.0 / 12))
            if len(self.tasks) > 1:
                frame = sys._getframe(1)
                self.trail.append(
                    f"{self.now - START:.6f} {self.current.name} at {frame.f_code.co_name}:{frame.f_lineno}"
                )
                self._left = 0
                self.tick()

    # --- Ctrl-C ---

    def begin(self) -> None:
        """Press Ctrl-C in the main thread from here on, as often as it is wanted."""
        if self.interrupts_left:
            sys.settrace(self.trace)

    def end(self) -> None:
        """Press it no more."""
        self.interrupts_left = 0
        sys.settrace(None)

    def trace(self, frame: Any, event: str, arg: object) -> None:
        """The trace function of the main thread, called for each function."""
        code = frame.f_code
        # In no generator, which may be about to be closed.
        if self.is_still or code.co_flags & inspect.CO_GENERATOR or "/bandmaster/" not in code.co_filename:
            return
        # Nor as a turn is left: a `with` block cannot do what it should if Ctrl-C comes before the first step of that.
        if code.co_name == "__exit__" and code.co_filename.endswith("/turns.py"):
            return
        self._to_interrupt -= 1
        if self._to_interrupt <= 0 and not _is_in_finalizer(frame):
            self.note("Ctrl-C", code.co_name)
            self.interrupts_left -= 1
            self._to_interrupt = 1 + int(self.random.expovariate(1 / 300))
            if not self.interrupts_left:
                sys.settrace(None)
            try:
                self._press(frame)
            except BaseException:
                self.after(0.0, self._trace_again)  # Python stops tracing when a trace function raises
                raise

    def _trace_again(self) -> None:
        if self.interrupts_left and self.current is self.main and not self.failure:
            sys.settrace(self.trace)

    def interrupt(self) -> None:
        """Press Ctrl-C while the main thread waits."""
        self._is_interrupted = True

    def _press(self, frame: Any) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)


def _is_in_finalizer(frame: Any) -> bool:
    """Whether Python would lose an exception."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _never() -> bool:
    return False


world: World | None = None  # the one whose program runs


def _nothing() -> None:
    """No program runs."""


tick: Callable[[], object] = _nothing  # lets a moment pass, if a program runs


def begin(new: World) -> None:
    """Have this world's program run from here on."""
    global world, tick
    world, tick = new, new.tick


def end() -> None:
    """Have no program run from here on."""
    global world, tick
    world, tick = None, _nothing
