"""What do requests promise when there are many: from workers, as a replica dies, and a million of them?

Three questions about bandmaster alone, on backend ``local``. From 4 workers to 2 replicas, 256 in flight: how does the
rate compare with that of the controller, and how often does the controller wake up meanwhile? As one of 2 replicas is
killed under 500 open requests: after how long has the last caller its error, has each of the others its answer, and was
none run twice, as counted by the replicas? And from a tenth of a million no-op requests to all of them: what do the
controller and the replicas hold?
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import machine
from harness.rows import as_text, figure

import bandmaster as bm

N_REPLICAS, N_CALLERS, IN_FLIGHT, N_OPEN = 2, 4, 256, 500


class Answers(bm.Worker):
    """Replicas; each writes the numbers of the requests that it runs to a file."""

    def __init__(self, folder: str) -> None:
        self.log = os.open(f"{folder}/{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    @bm.register(bm.Dispatch.REQUEST, concurrency=1000)
    async def noop(self, value: int) -> int:
        """Return the value."""
        return value

    @bm.register(bm.Dispatch.REQUEST, concurrency=1000)
    async def slow(self, number: int) -> int:
        """Note the number, and return it after a while."""
        os.write(self.log, f"{number}\n".encode())
        await asyncio.sleep(0.05 + number % 100 * 0.001)
        return number

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def held(self) -> tuple[int, int, int]:
        """MiB of memory, descriptors and threads."""
        return held()


class Callers(bm.Worker):
    """Workers that were given the replicas."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    async def ask(self, n: int, in_flight: int) -> None:
        """Make ``n`` requests."""
        await gather(self.answers, n, in_flight)


async def gather(answers: Any, n: int, in_flight: int) -> None:
    """Make ``n`` no-op requests, each in a task of its own, as `many_requests.py` does."""

    async def limited(number: int) -> None:
        async with gate:
            assert await answers.noop(number) == number

    gate = asyncio.Semaphore(in_flight)
    await asyncio.gather(*map(limited, range(n)))


async def ask(answers: Any, n: int, in_flight: int) -> None:
    """Make ``n`` no-op requests, in as many tasks as may be in flight."""
    numbers = iter(range(n))

    async def one_after_the_other() -> None:
        for number in numbers:
            assert await answers.noop(number) == number

    await asyncio.gather(*[one_after_the_other() for _ in range(in_flight)])


def held() -> tuple[int, int, int]:
    """MiB of memory of its own, descriptors and threads of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) + int(status["RssShmem"].split()[0])
    return memory // 1024, len(os.listdir("/proc/self/fd")), int(status["Threads"])


def _wakes() -> int:
    """How often the threads of this process have gone on after a wait."""
    texts = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in texts)


def from_workers(answers: Any, n: int) -> dict[str, float]:
    """Requests a second of the controller and of workers, in turn; and wakes of the controller per 1,000 of theirs."""
    with bm.ResourcePool([N_CALLERS]) as pool:
        callers = bm.WorkerGroup(pool, Callers, answers)
        found = {}
        for _ in range(2):  # the first time, they warm up
            start = time.perf_counter()
            asyncio.run(gather(answers, n, IN_FLIGHT))
            found["controller"] = n / (time.perf_counter() - start)
            start, before = time.perf_counter(), _wakes()
            callers.ask(n // N_CALLERS, IN_FLIGHT // N_CALLERS)
            found["workers"] = n / (time.perf_counter() - start)
            found["wakes"] = (_wakes() - before) / n * 1000
    return found


def killed(answers: Any, folder: str) -> dict[str, float]:
    """The fates of requests of which a replica is killed, and of those made as soon as that is known."""

    async def one(number: int) -> tuple[str, float]:
        try:
            value = await answers.slow(number)
            fate = "answered" if value == number else "wrong"
        except bm.WorkerDied as error:
            fate = "died" if error.rank == 1 else "wrong"
        return fate, time.perf_counter()

    async def main() -> tuple[float, list[tuple[str, float]], list[tuple[str, float]]]:
        tasks = [asyncio.ensure_future(one(number)) for number in range(N_OPEN)]
        while sum(path.stat().st_size for path in Path(folder).iterdir()) == 0:
            await asyncio.sleep(0.001)
        os.kill(answers.workers[1].pid, signal.SIGKILL)
        moment = time.perf_counter()
        first = await asyncio.gather(*tasks)
        return moment, first, await asyncio.gather(*map(one, range(N_OPEN, 2 * N_OPEN)))

    moment, first, later = asyncio.run(main())
    n_runs = Counter(line for path in Path(folder).iterdir() for line in path.read_text().splitlines())
    fates = Counter(fate for fate, _ in first)
    return {
        "answered": fates["answered"],
        "died": fates["died"],
        "late_s": max(at for fate, at in first if fate == "died") - moment,
        "answered_later": sum(fate == "answered" for fate, _ in later),
        "twice": sum(n > 1 for n in n_runs.values()),
    }


def million(answers: Any, n: int) -> list[list[str]]:
    """A table of what the controller and the replicas hold after a tenth of ``n`` requests, and after all."""
    table = [["", "MiB", "descriptors", "threads"]]
    for after, some in ((n // 10, n // 10), (n, n - n // 10)):
        asyncio.run(ask(answers, some, IN_FLIGHT))
        of_replicas = answers.held()
        table.append([f"after {after:,}: controller", *map(str, held())])
        table.append(["replicas, at most", *[str(max(one[i] for one in of_replicas)) for i in range(3)]])
    return table


def main() -> None:
    """Ask the questions, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of the first question")
    parser.add_argument("--smoke", action="store_true", help="tiny: does it work at all?")
    options = parser.parse_args()
    print("\n".join(f"{name:18} {fact}" for name, fact in machine.facts().items()))
    n, n_all = (400, 2000) if options.smoke else (16_000, 1_000_000)
    with tempfile.TemporaryDirectory() as folder, bm.ResourcePool([N_REPLICAS]) as pool:
        answers = bm.WorkerGroup(pool, Answers, folder)
        rounds = [from_workers(answers, n) for _ in range(1 if options.smoke else options.rounds)]
        table = million(answers, n_all)
        found = killed(answers, folder)
    rates = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratio = statistics.median(one["workers"] / one["controller"] for one in rounds)
    print(
        f"requests of the controller {rates['controller']:,.0f}/s, of workers {rates['workers']:,.0f}/s = {ratio:.2f} "
        f"x; {rates['wakes']:.1f} wakes of the controller per 1,000 of these"
    )
    print(as_text(table))
    print(
        f"a replica killed under {N_OPEN} requests: {found['answered']:.0f} answered, {found['died']:.0f} with its "
        f"death, the last after {figure(found['late_s'], 's')}; {found['twice']:.0f} run twice; of {N_OPEN} sent "
        f"after that, {found['answered_later']:.0f} answered"
    )


if __name__ == "__main__":
    main()
