"""What does a request cost, and how many are answered at a time? To 2 workers, from one event loop.

Three questions: no-op requests a second with 256 in flight; 1,000 requests that sleep 0.1 s, all at once; one request
at a time. Then two of maps, of bandmaster alone, as times the best schedule: 2,000 episodes of 1 to 100 times 3 ms, 256
in flight, beside the same on 256 places without any cost; and 400 rows of 12 ms in the mean, Pareto-distributed (1.5),
the dearest first, to 4 replicas of which one is 3 times slower, beside all work evenly spread.
Peers: bandmaster (backends local and ray), plain Ray's async actors with ``max_concurrency=1000``,
Monarch's endpoints, and a floor: asyncio on both ends of one Unix socket for each worker, with nothing built on it.
Each peer runs in a process of its own, in turn, and every answer is compared with what it has to be.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import pickle
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine
from harness.rows import as_text, figure

N_WORKERS, IN_FLIGHT, N_SLEEPS, SLEEP_S = 2, 256, 1000, 0.1
SLOWER = 3  # times, of one replica
Ask = Callable[[str, Any], Awaitable[Any]]  # of method "noop" or "sleep", and its argument


async def measured(ask: Ask, n: int) -> dict[str, float]:
    """Seconds of each kind of work; ``n`` no-ops."""

    async def limited(number: int) -> None:
        async with gate:
            assert await ask("noop", number) == number

    gate = asyncio.Semaphore(IN_FLIGHT)
    found = {}
    for _ in range(2):  # the first time, it warms up
        start = time.perf_counter()
        await asyncio.gather(*map(limited, range(n)))
        found["noop"] = (time.perf_counter() - start) / n
    start = time.perf_counter()
    await asyncio.gather(*[ask("sleep", SLEEP_S) for _ in range(N_SLEEPS)])
    found["sleeps"] = time.perf_counter() - start
    alone = []
    for number in range(min(n, 2000)):
        start = time.perf_counter()
        assert await ask("noop", number) == number
        alone.append(time.perf_counter() - start)
    return {**found, "alone": statistics.median(alone), "alone_p99": sorted(alone)[int(0.99 * len(alone))]}


# --- peers --------------------------------------------------------------------------------------------------------


def on_bandmaster(backend: str, n: int) -> dict[str, float]:
    """Requests of a worker group."""
    import bandmaster as bm

    class Answers(bm.Worker):
        @bm.register(bm.Dispatch.REQUEST, concurrency=1000)
        async def noop(self, value: int) -> int:
            return value

        @bm.register(bm.Dispatch.REQUEST, concurrency=1000)
        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

        @bm.register(bm.Dispatch.ONE_TO_ALL)
        def blocking(self) -> None: ...

    with bm.ResourcePool([N_WORKERS], backend=backend) as pool:
        group = bm.WorkerGroup(pool, Answers)
        methods = {"noop": group.noop, "sleep": group.sleep}
        found = asyncio.run(measured(lambda method, value: methods[method](value), n))
    with bm.ResourcePool([1], backend=backend) as pool:
        group, took = bm.WorkerGroup(pool, Answers), []
        for _ in range(min(n, 2000)):
            start = time.perf_counter()
            group.blocking()
            took.append(time.perf_counter() - start)
    return {**found, "blocking": statistics.median(took)}


def maps(backend: str, is_smoke: bool) -> dict[str, float]:
    """Seconds of two maps, as times the best schedule."""
    import bandmaster as bm

    class Episodes(bm.Worker):
        @bm.register(bm.Dispatch.REQUEST, concurrency=128)
        async def play(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

        @bm.register(bm.Dispatch.REQUEST)
        async def generate(self, seconds: float) -> float:
            start = time.perf_counter()
            await asyncio.sleep(seconds * (SLOWER if self.rank == 0 else 1))
            return (time.perf_counter() - start) / (SLOWER if self.rank == 0 else 1)

    rng = np.random.default_rng(0)
    episodes = 0.003 * rng.integers(1, 101, 200 if is_smoke else 2000)
    rows = -np.sort(-0.004 * (1 + rng.pareto(1.5, 40 if is_smoke else 400)))
    free = [0.0] * IN_FLIGHT
    for seconds in episodes:
        heapq.heapreplace(free, free[0] + seconds)
    found = {}
    with bm.ResourcePool([N_WORKERS], backend=backend) as pool:
        play = bm.WorkerGroup(pool, Episodes).play
        play.map([0.0] * 500).result()
        found["episodes"] = _seconds(lambda: play.map(episodes, in_flight=IN_FLIGHT).result()) / max(free)
    with bm.ResourcePool([4], backend=backend) as pool:
        generate = bm.WorkerGroup(pool, Episodes).generate
        generate.map([0.0] * 500).result()
        start = time.perf_counter()
        took = generate.map(rows).result()  # longer than was asked for, as timers round up
        seconds = time.perf_counter() - start
        found["pareto"] = seconds / max(sum(took) / (3 + 1 / SLOWER), *took)
        found["pareto, as asked for"] = seconds / max(rows.sum() / (3 + 1 / SLOWER), rows[0])
    return found


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def on_plain_ray(n: int) -> dict[str, float]:
    """Calls of async actors, which take turns."""
    import ray

    class Answers:
        async def noop(self, value: int) -> int:
            return value

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    ray.init("local", num_cpus=N_WORKERS, log_to_driver=False, include_dashboard=False, object_store_memory=200 * 2**20)
    actors = [ray.remote(max_concurrency=1000)(Answers).remote() for _ in range(N_WORKERS)]
    turn = iter(range(10**9))

    async def ask(method: str, value: Any) -> Any:
        return await getattr(actors[next(turn) % N_WORKERS], method).remote(value)

    return asyncio.run(measured(ask, n // 5))


def on_monarch(n: int) -> dict[str, float]:
    """Endpoints of actors, which take turns."""
    from monarch.actor import Actor, endpoint, this_host

    class Answers(Actor):
        @endpoint
        async def noop(self, value: int) -> int:
            return value

        @endpoint
        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    async def main() -> dict[str, float]:
        actors = this_host().spawn_procs(per_host={"gpus": N_WORKERS}).spawn("answers", Answers)
        await actors.noop.call(1)
        one, turn = [actors.slice(gpus=rank) for rank in range(N_WORKERS)], iter(range(10**9))
        return await measured(
            lambda method, value: getattr(one[next(turn) % N_WORKERS], method).call_one(value), n // 5
        )

    return asyncio.run(main())


def on_sockets(n: int) -> dict[str, float]:
    """Pickles on sockets between event loops."""
    ends = []
    for _ in range(N_WORKERS):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (mine, theirs):
            end.setblocking(False)
        if os.fork() == 0:
            mine.close()
            asyncio.run(_serve(theirs))
            os._exit(0)
        theirs.close()
        ends.append(mine)

    async def main() -> dict[str, float]:
        loop, open_here = asyncio.get_running_loop(), dict[int, asyncio.Future[Any]]()
        loads, turn = [0] * N_WORKERS, iter(range(10**9))

        def receive(rank: int) -> None:
            while True:
                try:
                    number, value = pickle.loads(ends[rank].recv(65536))
                except BlockingIOError:
                    return
                loads[rank] -= 1
                open_here.pop(number).set_result(value)

        def ask(method: str, value: Any) -> Awaitable[Any]:
            number, rank = next(turn), loads.index(min(loads))
            future = open_here[number] = loop.create_future()
            loads[rank] += 1
            _send(loop, ends[rank], pickle.dumps((number, method, value), 5))
            return future

        for rank, end in enumerate(ends):
            loop.add_reader(end, receive, rank)
        return await measured(ask, n)

    return asyncio.run(main())


def _send(loop: asyncio.AbstractEventLoop, end: socket.socket, message: bytes) -> None:
    try:
        end.send(message)
    except BlockingIOError:
        loop.call_later(0.001, _send, loop, end, message)


async def _serve(end: socket.socket) -> None:
    loop, is_over, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    async def answer(number: int, method: str, value: Any) -> None:
        if method == "sleep":
            await asyncio.sleep(value)
        _send(loop, end, pickle.dumps((number, value if method == "noop" else None), 5))

    def receive() -> None:
        while True:
            try:
                message = end.recv(65536)
            except BlockingIOError:
                return
            if not message:
                is_over.set()
                loop.remove_reader(end)
                return
            task = loop.create_task(answer(*pickle.loads(message)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    loop.add_reader(end, receive)
    await is_over.wait()


PEERS: dict[str, tuple[str, Callable[[int], dict[str, float]]]] = {  # the module that each needs, and what runs it
    "floor": ("socket", on_sockets),
    "bandmaster local": ("bandmaster", lambda n: on_bandmaster("local", n)),
    "bandmaster ray": ("ray", lambda n: on_bandmaster("ray", n)),
    "plain ray": ("ray", on_plain_ray),
    "monarch": ("monarch", on_monarch),
}


# --- routes -------------------------------------------------------------------------------------------------------

N_REPLICAS, N_EPISODES, PLACES, SLOWER = 4, 64, 8, 3.0
HIT_S, MISS_S, MEAN_COST_S = 0.004, 0.04, 0.04


def routes(n: int) -> dict[str, float]:
    """How well ``n`` requests are routed to 4 local replicas: shares of hits, and ratios of times."""
    import bandmaster as bm

    class Engine(bm.Worker):
        def __init__(self) -> None:
            self.known: set[int] = set()

        @bm.register(bm.Dispatch.REQUEST, concurrency=1000, is_idempotent=True)
        async def answer(self, episode: int) -> bool:
            is_hit = episode in self.known
            self.known.add(episode)
            await asyncio.sleep(HIT_S if is_hit else MISS_S)
            return is_hit

        @bm.register(bm.Dispatch.REQUEST, concurrency=PLACES)
        async def work(self, cost_s: float) -> float:
            begun = time.monotonic()
            await asyncio.sleep(cost_s * (SLOWER if self.rank == 0 else 1.0))
            return begun

        def on_replace(self, rank: int, state: object) -> None: ...

    with bm.ResourcePool([N_REPLICAS], backend="local") as pool:
        group = bm.WorkerGroup(pool, Engine)
        found = {"hits": asyncio.run(_hits(group, n // N_EPISODES)), "hits_lost": 0.0}
        found["hits_lost"] = asyncio.run(_hits(group, n // N_EPISODES, is_lost=True))
        for name, is_routed in (("in_turn", False), ("routed", True)):
            found[name] = asyncio.run(_waiting(group, n // 2, is_routed))
    return found


async def _hits(group: Any, n_turns: int, is_lost: bool = False) -> float:
    """The share of turns that find their cache, without the first of each episode; from the death of a replica on."""
    told: list[bool] = []

    async def episode(number: int) -> None:
        ask = group.answer.options(key=number, retries=3)
        await ask(number)
        for _ in range(n_turns):
            told.append(await ask(number))

    async def lose() -> None:
        while len(told) < N_EPISODES * n_turns // 4:
            await asyncio.sleep(0.001)
        told.clear()
        os.kill(group.workers[1].pid, signal.SIGKILL)
        await asyncio.to_thread(_replace, group)

    first = N_EPISODES if is_lost else 0
    await asyncio.gather(*map(episode, range(first, first + N_EPISODES)), *([lose()] if is_lost else []))
    return sum(told) / len(told)


def _replace(group: Any) -> None:
    while group.healthy:
        time.sleep(0.001)
    group.replace(1)


def _costs(n: int) -> list[float]:
    """Seconds of each request: a Pareto distribution with shape 2.5, the same every time."""
    rng = random.Random(0)
    return [rng.paretovariate(2.5) * MEAN_COST_S * 0.6 for _ in range(n)]


async def _waiting(group: Any, n: int, is_routed: bool) -> float:
    """The 99th percentile of the seconds until requests begin that come at 70 % of what the replicas can do."""
    costs, loop = _costs(n), asyncio.get_running_loop()
    start, rate = loop.time(), 0.7 * PLACES * (N_REPLICAS - 1 + 1 / SLOWER) / statistics.mean(costs)

    async def one(number: int) -> float:
        due = start + number / rate
        await asyncio.sleep(due - loop.time())
        method = group.work if is_routed else group.work.options(replica=number % N_REPLICAS)
        begun: float = await method(costs[number])
        return begun - due

    return sorted(await asyncio.gather(*map(one, range(n))))[int(0.99 * n)]


# --- the table ----------------------------------------------------------------------------------------------------


def _python_of(peer: str) -> str | None:
    """The interpreter that has what a peer needs: this one, or that of `make bench`; None if there is none."""
    own = Path(__file__).parents[1] / ".bench" / peer / "bin" / "python"
    return sys.executable if find_spec(PEERS[peer][0]) else str(own) if own.exists() else None


def main() -> None:
    """Measure the peers in turn, and print a table of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny: does it work at all?")
    parser.add_argument("--peer", choices=[*PEERS, "maps"], help="measure one peer in this process, and print JSON")
    parser.add_argument(
        "--routes", action="store_true", help="measure only the routes, in this process, and print JSON"
    )
    options = parser.parse_args()
    if options.routes:
        print(json.dumps(routes(N_EPISODES * (5 if options.smoke else 40))))
        return
    n = 500 if options.smoke else 20_000
    if options.peer == "maps":
        print(json.dumps(maps("local", options.smoke)))
        return
    if options.peer:
        print(json.dumps(PEERS[options.peer][1](n)))
        return
    rounds: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
    for _ in range(1 if options.smoke else options.rounds):
        for peer in PEERS:
            python = _python_of(peer)
            if python is not None:
                rounds[peer].append(_run(python, ["--peer", peer], options.smoke))
    routed = [_run(sys.executable, ["--routes"], options.smoke) for _ in range(1 if options.smoke else options.rounds)]
    medians = {peer: _medians(found) for peer, found in rounds.items() if found}
    print("\n".join(f"{name:18} {fact}" for name, fact in machine.facts().items()))
    header = ["peer", "no-ops/s", "x floor", "1,000 sleeps", "one at a time", "p99", "x blocking no-op of 1 rank"]
    print(as_text([header, *[_row(peer, found, medians["floor"]) for peer, found in medians.items()]]))
    for peer in PEERS.keys() - medians.keys():
        print(f"{peer} is not installed")
    ratios = [maps("local", options.smoke) for _ in range(1 if options.smoke else options.rounds)]
    for what in ratios[0]:
        print(f"map of {what}: {statistics.median(one[what] for one in ratios):.2f} x the best schedule")
    print()
    print(as_text([["routes", "measured", "goal"], *_routes(_medians(routed))]))


def _run(python: str, arguments: list[str], is_smoke: bool) -> dict[str, float]:
    """What this program prints in a process of its own."""
    command = [python, __file__, *arguments, *(["--smoke"] if is_smoke else [])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{run.stderr}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def _routes(found: dict[str, float]) -> list[list[str]]:
    waits = f"{figure(found['routed'], 's')} = {found['routed'] / found['in_turn']:.2f} x in turn"
    return [
        ["turns of a key that find their cache", f"{found['hits']:.1%}", ">= 95 %"],
        ["as a replica is lost and replaced", f"{found['hits_lost']:.1%}", ">= 80 %"],
        ["wait, p99, one of 4 replicas 3 x slower", waits, "<= 0.5 x"],
    ]


def _row(peer: str, found: dict[str, float], floor: dict[str, float]) -> list[str]:
    blocking = f"{found['alone'] / found['blocking']:.2f}" if "blocking" in found else "-"
    rates = [f"{1 / found['noop']:,.0f}", f"{floor['noop'] / found['noop']:.2f}"]
    return [peer, *rates, *[figure(found[name], "s") for name in ("sleeps", "alone", "alone_p99")], blocking]


if __name__ == "__main__":
    main()
