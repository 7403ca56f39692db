"""Requests to a group, many at a time: from an event loop, and from workers that were given the group."""

import asyncio

from soaking.expected import Wrong
from soaking.subject import random_batch, same

import bandmaster as bm
from bandmaster import Dispatch, register

N_REQUESTS, N_KEYS = 24, 3


class Asker(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    async def ask(self, group, batches):
        """Whether each request is answered by its own batch."""
        return [same(got, sent) for got, sent in zip(await asked(group, batches), batches, strict=True)]


async def asked(group, batches):
    return await asyncio.gather(*[group.ask.options(key=n % N_KEYS)(batch) for n, batch in enumerate(batches)])


def ask_many(rng, group, kill=None):
    """Send requests, some of which are cancelled, and check that each of the others is answered by its own batch.

    Args:
        rng: Chooses batches, options, and the requests that are cancelled.
        group: A group of `Subject`.
        kill: Kills a rank while requests are open, and returns its number; None for no such fault.

    Raises:
        Wrong: One came to something else, but for the death of that rank.
    """
    batches = [random_batch(rng) for _ in range(N_REQUESTS)]
    options = [
        rng.choice([{}, {"key": n % N_KEYS}, {"key": 0, "spill": 1}, {"timeout": 20}]) for n in range(N_REQUESTS)
    ]

    async def one(number):
        return same(await group.ask.options(**options[number])(batches[number]), batches[number])

    async def main():
        tasks = [asyncio.ensure_future(one(number)) for number in range(N_REQUESTS)]
        await asyncio.sleep(rng.random() * 0.004)
        cancelled = [task for task in rng.sample(tasks, 4) if task.cancel()]
        dead = None if kill is None else kill()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for task, outcome in zip(tasks, outcomes, strict=True):
            may_be = isinstance(outcome, asyncio.CancelledError) and task in cancelled
            has_died = isinstance(outcome, bm.WorkerDied) and outcome.rank == dead
            if outcome is not True and not may_be and not has_died:
                raise Wrong(f"a request came to {outcome!r}, and dead is {dead}")

    asyncio.run(main())


def ask_from_workers(rng, group):
    """Have workers on other slots send requests, at the same time as the controller.

    Raises:
        Wrong: One was not answered by its own batch.
    """
    batches = [random_batch(rng) for _ in range(N_REQUESTS)]
    with bm.ResourcePool([2]) as pool:
        answered = bm.WorkerGroup(pool, Asker).ask.submit(group, batches)
        ask_many(rng, group)
        if not all(map(all, answered.result())):
            raise Wrong(f"requests of workers came to {answered.result()}")
