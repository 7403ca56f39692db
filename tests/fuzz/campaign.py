"""Many programs on each backend: what fails is shrunk, what is left behind is found, and speed is measured."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from pathlib import Path

from bandmaster.testing import LeakError, no_leaks
from fuzz import weights
from fuzz.generate import program_of
from fuzz.run import Groups, run
from fuzz.script import script_of
from fuzz.shrink import shrink
from fuzz.steps import expectations

N_BETWEEN_CHECKS = 100  # programs, after which all groups are closed and nothing may be left
SHOWN = 500  # characters of a value
MOST_ALIKE = 3  # failures of one kind that are shrunk


class Campaign:
    """Runs programs, each on all backends.

    Args:
        backends: Their names; ``"weights"`` stands for programs that move weights, on ``local``.
        folder: Where scripts are written, or None.

    Attributes:
        failures: For each that was found: seed, backend, `Failure`, and the script.
        n_programs: How many programs have run.
    """

    def __init__(self, backends, folder=None, say=print):
        self.failures, self.n_programs = [], 0
        self._folder, self._say = folder and Path(folder), say
        self._is_slow = list(backends) == ["ray"]
        self._groups = {backend: Groups(backend) for backend in backends if backend != "weights"}
        self._worlds = weights.Worlds()
        self._seconds, self._counts = dict.fromkeys(backends, 0.0), Counter()
        self._kinds = Counter()
        self._leaks, self._since = None, 0

    def __enter__(self):
        if "weights" in self._seconds:
            weights.run(weights.program_of(0), self._worlds)
            self._worlds.close()
        for backend in self._groups:  # what stays for good begins before the first look
            run(program_of(0, self._is_slow), backend)
        gc.collect()
        self._begin()
        return self

    def __exit__(self, *error):
        self._end()

    def _begin(self):
        self._leaks, self._since = no_leaks(), self.n_programs
        self._leaks.__enter__()

    def _end(self):
        for groups in (*self._groups.values(), self._worlds):
            groups.close()
        gc.collect()
        try:
            self._leaks.__exit__(None, None, None)
        except LeakError as error:
            self.failures.append((self._since, "all", error, None))
            self._say(f"FAILED: seeds from {self._since} programs on leave something behind: {error}")
        for backend, groups in self._groups.items():
            if kept := groups.never_collected():
                self.failures.append((self._since, backend, kept, None))
                self._say(f"FAILED: seeds from {self._since} programs on, {backend}: never collected: {dict(kept)}")

    def run(self, seed):
        """Run the program of a seed on the backends that have had the least time, as all get about equally much."""
        start = time.monotonic()
        self.n_programs += 1
        try:
            program = program_of(seed, self._is_slow)
            expected = expectations(program)
        except Exception as error:
            self._say(f"FAILED: the oracle, for the program of seed {seed}: {error!r}")
            self.failures.append((seed, "none", error, None))
            return
        making = time.monotonic() - start  # counts for each, as it would if there were no other
        least = min(self._seconds.values(), default=0.0)
        if self._seconds.get("weights", math.inf) <= least + 1:
            start = time.monotonic()
            self._run_weights(seed)
            self._seconds["weights"] += time.monotonic() - start
            self._counts["weights"] += 1
        for backend, groups in self._groups.items():
            if self._seconds[backend] > least + 1:
                continue
            if backend == "inprocess" and any(step.needs_processes for step in program):
                continue
            start = time.monotonic()
            failure = run(program, groups, expected)
            self._seconds[backend] += making + time.monotonic() - start
            self._counts[backend] += 1
            if failure is not None:
                self._tell(seed, backend, program, failure)
        if self.n_programs - self._since >= N_BETWEEN_CHECKS:
            self._end()
            self._begin()

    def _run_weights(self, seed):
        program = weights.program_of(seed)
        wrong = weights.run(program, self._worlds)
        if wrong is not None:
            self._say(f"FAILED: seed {seed}, weights: {wrong}")
            small = weights.shrink(program, lambda less: weights.run(less, self._worlds))
            again = weights.run(small, self._worlds)
            self._say(f" program {small}\n {again}")
            self.failures.append((seed, "weights", wrong, None))

    def _tell(self, seed, backend, program, failure):
        kind = failure.kind, type(program[failure.number]).__name__
        self._kinds[kind] += 1
        script = None
        got, want = failure.got[:SHOWN], str(failure.want)[:SHOWN]
        self._say(f"FAILED: seed {seed}, {backend}: {failure.kind}\n got  {got}\n want {want}")
        if self._kinds[kind] <= MOST_ALIKE:
            small, again = shrink(program, failure, lambda one, expected: run(one, backend, expected))
            script = script_of(small, again, backend, seed)
            self._say(script)
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / f"{seed}_{backend}.py").write_text(script)
        self.failures.append((seed, backend, failure, script))

    def summary(self):
        """Programs, failures and speed, in words."""
        rates = [
            f"{name} {self._counts[name]} programs, {self._counts[name] / max(seconds, 1e-9) * 60:.0f} a minute"
            for name, seconds in self._seconds.items()
        ]
        return f"{len(self.failures)} failures; {'; '.join(rates)}"
