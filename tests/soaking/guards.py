"""Around what the soak does: limits on how long it may take, Ctrl-C at random moments, and a count of everything."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import Counter, deque

from bandmaster.testing import held_resources
from bandmaster.wire import status_page

REPORT_S = 10.0
N_STACKS = 8


class Stats:
    """What has been done so far."""

    def __init__(self):
        self._start = time.monotonic()
        self.n_groups, self.n_calls, self.faults, self.done = 0, 0, Counter(), Counter()
        self._slowest = {}

    @contextlib.contextmanager
    def timing(self, what):
        start = time.monotonic()
        yield
        self._slowest[what] = max(self._slowest.get(what, 0.0), time.monotonic() - start)

    def __str__(self):
        took = time.monotonic() - self._start
        return f"{took:6.1f} s: {self.n_groups} groups, {self.n_calls} calls, {self.faults.total()} faults"

    def summary(self):
        done, faults = (
            "\n".join(f"  {n:6} {kind}" for kind, n in counts.most_common()) for counts in (self.done, self.faults)
        )
        slowest = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self._slowest.items())
        return f"{self}\ndone:\n{done}\nfaults:\n{faults}\nslowest: {slowest}"


class Watchdog:
    """Ends the program, with all stacks, when something takes longer than it may. Reports now and then."""

    def __init__(self, stats):
        self.recent = deque(maxlen=40)  # what was done, for who has to find out why
        self.worker_pids = []
        self._stats = stats
        self._what, self._deadline = "", float("inf")
        threading.Thread(target=self._watch, name="soak-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def within(self, seconds, what):
        self.recent.append(what)
        before = self._what, self._deadline
        self._what, self._deadline = what, time.monotonic() + seconds
        try:
            yield
        finally:
            self._what, self._deadline = before

    def _watch(self):
        report_at = time.monotonic() + REPORT_S
        while True:
            time.sleep(0.1)
            now = time.monotonic()
            if now > self._deadline:
                self.tell(f"too slow: {self._what}")
                os._exit(1)
            if now > report_at:
                print(self._stats, flush=True)
                report_at = now + REPORT_S

    def tell(self, why):
        """What is known about something that went wrong."""
        print(f"FAILED: {why}\nwhat was done before:", *self.recent, sep="\n  ", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        for pid, stack in status_page.stacks(self.worker_pids[:N_STACKS]).items():
            print(f"worker {pid} is at\n{stack}", file=sys.stderr)
        print("processes:", *held_resources().processes.values(), sep="\n  ", file=sys.stderr, flush=True)


class Interrupter:
    """Sends this process a SIGINT at a random moment of a call, as Ctrl-C does; outside of these none has effect."""

    def __init__(self, rng):
        self._rng = rng
        self._is_armed = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, *_):
        if self._is_armed:
            self._is_armed = False
            raise KeyboardInterrupt

    def run(self, longest_s, function, *args):
        """Call the function.

        Returns:
            Its value, the error that it raised, or the KeyboardInterrupt if that came before.
        """
        timer = threading.Timer(self._rng.random() * longest_s, os.kill, [os.getpid(), signal.SIGINT])
        try:
            timer.start()
            self._is_armed = True
            return function(*args)
        except (Exception, KeyboardInterrupt) as error:
            return error
        finally:
            self._is_armed = False
            timer.cancel()
            timer.join()
