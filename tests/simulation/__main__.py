"""Runs programs of a simulated world from new seeds: ``PYTHONPATH=tests python -m simulation --minutes 10``."""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
import zlib

from simulation import world as worlds
from simulation.install import installed
from simulation.program import Program, warm_up
from simulation.world import START

HUNG_S = 240.0  # a program that takes so long waits for something that is not of the world


def main() -> int:
    """Run programs until one fails or the time is over."""
    parser = argparse.ArgumentParser("simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; by default a new one")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--programs", type=int, default=1 << 60, help="run so many programs at most")
    parser.add_argument("--digests", action="store_true", help="print a digest of what happens in each program")
    args = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    print(f"simulation: the first seed is {first}", flush=True)
    # One thread runs at a time: a thread that is woken must not take the processor before the other waits.
    os.sched_setaffinity(0, [random.SystemRandom().choice(sorted(os.sched_getaffinity(0)))])
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    began_cpu_s = time.process_time()
    began, n_calls, n_programs, seed = time.perf_counter(), 0, 0, first
    virtual_s = 0.0
    with installed() as made:
        warm_up(made)
        while n_programs < args.programs and time.perf_counter() - began < 60 * args.minutes:
            program = Program(seed)
            hung = threading.Timer(HUNG_S, _give_up, [seed])
            hung.daemon = True
            hung.start()
            world = program.run(made)
            hung.cancel()
            n_calls, n_programs = n_calls + program.n_calls, n_programs + 1
            if args.digests:
                print(f"seed {seed}: {zlib.crc32(repr([*world.history, *world.trail]).encode()):08x}", flush=True)
            virtual_s += world.now - 1000.0
            if world.failure:
                print(f"seed {seed}, after {time.perf_counter() - began:.1f} s: {program.kind}")
                print("\n".join([*list(world.trail)[-40:], *map(str, world.history[-40:]), world.failure]))
                sys.stdout.flush()
                os._exit(1)  # threads of the program stand still for good
            seed += 1
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu_s
    print(
        f"{n_programs} programs, {n_calls:,} calls, {virtual_s:,.0f} virtual s in {seconds:.1f} s, {cpu_s:.1f} s of "
        f"processor time: {60 * n_calls / cpu_s:,.0f} calls for each minute of that; nothing was found"
    )
    return 0


def _give_up(seed: int) -> None:
    """End this process, as a program takes too long in true time."""
    world = worlds.world
    said = (
        "" if world is None else f"{world.stacks()}\n{world.n_switches:,} switches, {world.now - START:.1f} virtual s"
    )
    print(f"{said}\nseed {seed} takes more than {HUNG_S:.0f} s", flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
