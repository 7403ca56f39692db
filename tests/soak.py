"""Random groups, calls and faults for minutes on end: the right result or an error that names the right rank, in time.

::

    python tests/soak.py [--minutes 10] [--seed N]

Groups of one to four ranks are started, called, hurt, mended and closed (soaking/episode.py). Whatever is done to them,
each call gives exactly what it should, or an error of the library that names a rank which was hurt (expected.py); so do
rows by reference (rows.py), streams (streams.py), requests of the controller and of workers (requests.py), and weights
that are synced or change their layout (weights.py). No wait is longer than its limit (guards.py); and every hundred
groups, and in the end, the process has no more threads, processes, descriptors and shared memory than in the beginning.
Most of the time goes to backend local, the rest to Ray where it is installed. Pytest does not collect it: `make soak`.
"""

import argparse
import importlib
import importlib.util
import os
import random
import signal
import sys
import time
import traceback

from soaking.episode import Episode
from soaking.expected import Wrong, outcome_of
from soaking.guards import Interrupter, Stats, Watchdog
from soaking.subject import Subject
from soaking.weights import EngineEpisode, SyncEpisode

import bandmaster as bm
from bandmaster.testing import LeakError, no_leaks

CHECK_EVERY = 100  # groups
RAY_SHARE, LEAST_RAY_S = 0.2, 20.0  # Ray takes seconds to start
WEIGHTS_SHARE = 0.1  # of the groups with torch
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_RAY = importlib.util.find_spec("ray") is not None


class Soak:
    def __init__(self, seed, check_every, skipped, n_groups):
        self.rng = random.Random(seed)
        self.stats = Stats()
        self.watchdog = Watchdog(self.stats)
        self.interrupter = Interrupter(self.rng)
        self.check_every, self.skipped, self.n_groups = check_every, skipped, n_groups

    def is_over(self, until):
        return time.monotonic() >= until or self.stats.n_groups >= self.n_groups

    def run_local(self, seconds):
        """Groups whose workers are forked now from a process with torch, now from one without."""
        until = time.monotonic() + seconds
        while not self.is_over(until):
            has_torch = HAS_TORCH and self.rng.random() < 0.5
            os.environ["BANDMASTER_PRELOAD"] = "numpy.random,torch" if has_torch else "numpy"
            self.run_episodes("local", until, 3, has_torch)
            if not self.is_over(until):
                self.kill_zygote()

    def run_ray(self, seconds):
        import ray

        with self.watchdog.within(60, "the start of Ray"):
            ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        self.run_episodes("ray", time.monotonic() + seconds, 1000, HAS_TORCH)
        with self.watchdog.within(60, "the end of Ray"):
            ray.shutdown()

    def run_episodes(self, backend, until, n_rounds, has_torch):
        """Rounds of groups; each round leaves nothing behind."""
        for _ in range(n_rounds):
            if self.is_over(until):
                return
            kinds = ["threads", "processes", "segments", "placements"] + ["descriptors"] * (backend == "local")
            with no_leaks(kinds=kinds):
                for _ in range(self.check_every):
                    if not self.is_over(until):
                        self.episode(backend, has_torch).run()

    def episode(self, backend, has_torch):
        """One of groups that call, or of groups that have weights."""
        if has_torch and self.rng.random() < WEIGHTS_SHARE:
            importlib.import_module("torch")  # an interrupt in the midst of it would leave it broken
            return self.rng.choice([SyncEpisode, EngineEpisode])(self, backend)
        return Episode(self, backend, has_torch)

    def kill_zygote(self):
        """The process that workers are forked from: they are gone with it, and the next group gets a new one."""
        with self.watchdog.within(30, "the end of the zygote"), bm.ResourcePool([2]) as pool:
            group = bm.WorkerGroup(pool, Subject)
            os.kill(group.execute_rank_zero_sync("parent"), signal.SIGKILL)
            while not isinstance(outcome := outcome_of(group.echo, 1), bm.WorkerDied):
                if isinstance(outcome, Exception):
                    raise Wrong("the zygote was killed, and it came to") from outcome
        self.stats.faults["kill -9 of the zygote"] += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long at most (%(default)g)")
    parser.add_argument("--groups", type=int, default=sys.maxsize, help="how many at most (default: as time allows)")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="of what is done; timing is not in it"
    )
    parser.add_argument("--check-every", type=int, default=CHECK_EVERY, help="groups between leak checks (%(default)s)")
    parser.add_argument("--skip", nargs="*", default=(), help="what not to do, such as 'interrupt close' or 'kill'")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    soak = Soak(options.seed, options.check_every, options.skip, options.groups)
    ray_s = options.minutes * 60 * RAY_SHARE * HAS_RAY
    ray_s = ray_s if ray_s >= LEAST_RAY_S else 0.0
    try:
        soak.run_local(options.minutes * 60 - ray_s)
        if ray_s:
            soak.run_ray(ray_s)
        if told := bm.stalls():  # no wait is long enough to be told of
            raise Wrong("\n".join(stall.text for stall in told))
    except (Exception, LeakError) as error:
        traceback.print_exc()
        soak.watchdog.tell(f"{type(error).__name__} with seed {options.seed}")
        os._exit(1)
    print(soak.stats.summary(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
