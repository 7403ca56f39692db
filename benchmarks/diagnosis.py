"""How often the sentence about a run names the bottleneck that was put into it: `bandmaster.timeline.findings`.

70 runs are made of records: four ranks, three methods, noise, and one bottleneck of random size. 30 are real, on local
groups. A run counts as named if its first finding has the kind of the bottleneck, and its rank where there is one; a
run without a bottleneck, if there is no finding. ``--smoke`` makes one run of each kind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.timeline import Call, Finding, Moments, diagnosis, findings

RANKS = 4


class Expected(NamedTuple):
    kind: str  # of the finding; "" for none
    ranks: tuple[int, ...] = ()


class Simulation:
    """Records of calls to ranks that are busy until some time, and of a controller that waits for what it reads."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.free = dict.fromkeys(range(RANKS), 0.0)
        self.calls: list[Call] = []

    def noise(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.97, 1.03)

    def call(self, method, ran, moved=None, nbytes=1000, collective=False, is_read=True, costs=60e-6) -> Call:
        """One call of all ranks: ``ran`` and ``moved`` are seconds by rank; returns at once unless it is read."""
        begun, sent = self.now, self.now + costs
        moved = moved or [20e-6] * RANKS
        starts = {rank: max(sent, self.free[rank]) + self.noise(30e-6) for rank in range(RANKS)}
        decoded = {rank: starts[rank] + self.noise(moved[rank]) for rank in range(RANKS)}
        ends = {rank: decoded[rank] + self.noise(ran[rank]) for rank in range(RANKS)}
        if collective:
            last = max(ends.values())
            ends = {rank: last + self.noise(50e-6) for rank in range(RANKS)}
        encoded = {rank: ends[rank] + self.noise(moved[rank] / 10) for rank in range(RANKS)}
        done = max(encoded.values()) + self.noise(costs)
        ranks = {r: Moments(starts[r], decoded[r], ends[r], encoded[r], encoded[r] + 30e-6) for r in range(RANKS)}
        self.calls.append(Call(len(self.calls), "actor", method, begun, sent, sent, done, ranks, sent_nbytes=nbytes))
        self.free = encoded
        self.now = done if is_read else sent
        return self.calls[-1]

    def requests(self, seconds: list[float], places: int, factors: list[float]) -> None:
        """Requests, each to the replica that is free first."""
        free = [(self.now, rank) for rank in range(RANKS) for _ in range(places)]
        begun = self.now
        for number, length in enumerate(seconds):
            at, rank = free.pop(free.index(min(free)))
            start = max(begun + 20e-6 * number, at) + 50e-6
            end = start + length * factors[rank]
            free.append((end, rank))
            moments = {rank: Moments(start, start + 20e-6, end, end + 20e-6, end + 80e-6)}
            sent = max(begun + 20e-6 * number, at)
            number, times = len(self.calls), (begun, begun + 10e-6, sent, end + 90e-6)
            self.calls.append(Call(number, "rollout", "Rollout.answer", *times, moments, is_request=True))
        self.now = max(end for end, _ in free) + 100e-6


def step(run: Simulation, slow: dict[int, float] | None = None, is_submitted: bool = False) -> None:
    """One step: log-probabilities without a collective, and an update that has one at its end."""
    factors = [(slow or {}).get(rank, 1.0) for rank in range(RANKS)]
    run.call("Actor.log_probs", [0.04 * factor for factor in factors], is_read=not is_submitted)
    run.call("Actor.update", [0.03] * RANKS, collective=True)


def simulated_none(run: Simulation) -> Expected:
    for _ in range(8):
        run.requests([run.noise(0.05) for _ in range(32)], 8, [1.0] * RANKS)
        step(run)
    return Expected("")


def simulated_slow(run: Simulation) -> Expected:
    rank, factor = run.random.randrange(RANKS), run.random.uniform(1.25, 2.5)
    for _ in range(8):
        step(run, {rank: factor})
    return Expected("slow", (rank,))


def simulated_slow_before_a_collective(run: Simulation) -> Expected:
    rank, factor = run.random.randrange(RANKS), run.random.uniform(1.25, 2.5)
    for _ in range(8):
        step(run, {rank: factor}, is_submitted=True)
    return Expected("slow", (rank,))


def simulated_slow_replica(run: Simulation) -> Expected:
    rank, factor = run.random.randrange(RANKS), run.random.uniform(1.5, 2.2)
    factors = [factor if r == rank else 1.0 for r in range(RANKS)]
    for _ in range(6):
        run.requests([0.05 * run.random.uniform(0.8, 1.2) for _ in range(160)], 4, factors)
    return Expected("slow", (rank,))


def simulated_link_of_one_rank(run: Simulation) -> Expected:
    rank, factor = run.random.randrange(RANKS), run.random.uniform(4, 20)
    for _ in range(8):
        moved = [0.01 * (factor if r == rank else 1.0) for r in range(RANKS)]
        run.call("Actor.log_probs", [0.05] * RANKS, moved, nbytes=40_000_000)
        run.call("Actor.update", [0.03] * RANKS, collective=True)
    return Expected("link", (rank,))


def simulated_link(run: Simulation) -> Expected:
    for _ in range(8):
        seconds = run.random.uniform(0.04, 0.2)
        run.call("Actor.log_probs", [0.05] * RANKS, [seconds] * RANKS, nbytes=int(4e7 * seconds))
        run.call("Actor.update", [0.03] * RANKS, collective=True)
    return Expected("link")


def simulated_tail(run: Simulation) -> Expected:
    longest = run.random.uniform(4, 12)
    for _ in range(6):
        lengths = [0.05 * run.random.uniform(0.8, 1.2) for _ in range(62)] + [0.05 * longest]
        run.requests(lengths, 8, [1.0] * RANKS)
        step(run)
    return Expected("tail")


def simulated_controller(run: Simulation) -> Expected:
    for _ in range(8):
        step(run)
        run.now += run.random.uniform(0.02, 0.2)
    return Expected("controller")


def simulated_small(run: Simulation) -> Expected:
    work = run.random.uniform(20e-6, 150e-6)
    for _ in range(400):
        run.call("Actor.score", [work] * RANKS, costs=run.random.uniform(60e-6, 120e-6))
    return Expected("small")


SIMULATED: dict[Callable[[Simulation], Expected], int] = {
    simulated_none: 8,
    simulated_slow: 8,
    simulated_slow_before_a_collective: 10,
    simulated_slow_replica: 8,
    simulated_link_of_one_rank: 7,
    simulated_link: 7,
    simulated_tail: 8,
    simulated_controller: 7,
    simulated_small: 7,
}


# --- real runs ---


class Actor(bm.Worker):
    @register(Dispatch.DP_PROTO)
    def log_probs(self, rows, seconds, slow=None, factor=1.0):
        time.sleep(seconds * (factor if self.rank == slow else 1.0))
        return rows

    @register(Dispatch.DP_PROTO)
    def score(self, rows):
        return rows


class Rollout(bm.Worker):
    @register(Dispatch.REQUEST, concurrency=8)
    async def answer(self, seconds, slow=None, factor=1.0):
        await asyncio.sleep(seconds * (factor if self.rank == slow else 1.0))


Groups = tuple["bm.WorkerGroup", "bm.WorkerGroup"]
ROWS = np.arange(64)


def real_none(actor, rollout, chance) -> Expected:
    for _ in range(4):
        actor.log_probs(ROWS, 0.1)
    return Expected("")


def real_slow(actor, rollout, chance) -> Expected:
    rank = chance.randrange(RANKS)
    for _ in range(4):
        actor.log_probs(ROWS, 0.06, rank, chance.uniform(1.5, 2.5))
    return Expected("slow", (rank,))


def real_slow_replica(actor, rollout, chance) -> Expected:
    rank = chance.randrange(RANKS)
    requests = [rollout.answer.submit(0.04, rank, chance.uniform(2.0, 3.0)) for _ in range(300)]
    for request in requests:
        request.result()
    return Expected("slow", (rank,))


def real_tail(actor, rollout, chance) -> Expected:
    for _ in range(2):
        requests = [rollout.answer.submit(0.04) for _ in range(60)] + [rollout.answer.submit(chance.uniform(0.3, 0.5))]
        for request in requests:
            request.result()
    return Expected("tail")


def real_controller(actor, rollout, chance) -> Expected:
    for _ in range(4):
        actor.log_probs(ROWS, 0.04)
        time.sleep(chance.uniform(0.03, 0.2))
    return Expected("controller")


def real_small(actor, rollout, chance) -> Expected:
    for _ in range(300):
        actor.score(ROWS[:8])
    return Expected("small")


REAL = {real_none: 5, real_slow: 5, real_slow_replica: 5, real_tail: 5, real_controller: 5, real_small: 5}


@contextmanager
def groups() -> Iterator[Groups]:
    with bm.ResourcePool([RANKS]) as pool, bm.ResourcePool([RANKS]) as other:
        made = bm.WorkerGroup(pool, Actor), bm.WorkerGroup(other, Rollout)
        made[0].score(ROWS)
        made[1].answer.all(0.0)
        yield made


def is_named(expected: Expected, found: list[Finding]) -> bool:
    if not expected.kind:
        return not found
    return bool(found) and found[0].kind == expected.kind and found[0].ranks == expected.ranks


def simulated_runs(share: float = 1.0) -> Iterator[tuple[str, Expected, list[Call]]]:
    for scene, n in SIMULATED.items():
        for seed in range(max(1, round(share * n))):
            run = Simulation(seed)
            yield scene.__name__, scene(run), run.calls


def real_runs(share: float = 1.0) -> Iterator[tuple[str, Expected, list[Call]]]:
    with groups() as made:
        for scene, n in REAL.items():
            for seed in range(max(1, round(share * n))):
                with bm.trace() as trace:
                    expected = scene(*made, random.Random(seed))
                yield scene.__name__, expected, [Call.of(record) for record in trace.calls]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one run of each kind")
    share = 0.01 if parser.parse_args().smoke else 1.0
    table: dict[str, list[bool]] = {}
    for runs in (simulated_runs(share), real_runs(share)):
        for name, expected, calls in runs:
            table.setdefault(name, []).append(is_named(expected, findings(calls)))
            if not table[name][-1]:
                print(f"{name}, expected {expected}: {diagnosis(calls)}")
    print(f"{'bottleneck':40} runs  named")
    for name, named in table.items():
        print(f"{name.replace('_', ' '):40} {len(named):4} {sum(named):6}")
    n, right = sum(map(len, table.values())), sum(map(sum, table.values()))
    print(f"{'all':40} {n:4} {right:6}")
    return right < 0.95 * n


if __name__ == "__main__":
    sys.exit(main())
