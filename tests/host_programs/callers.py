"""Runs on the first host: workers of three hosts call groups on these hosts."""

import asyncio
import contextlib
import json
import os
import sys

import ray

import bandmaster as bm
from bandmaster import Dispatch, register

LARGE = 8_000_000


class Rollout(bm.Worker):
    @register(Dispatch.REQUEST, concurrency=64)
    async def chat(self, prompt):
        return self.rank, prompt[-1:]

    @register(Dispatch.REQUEST, concurrency=8)
    async def hold(self):
        await asyncio.sleep(60)

    @register(Dispatch.REQUEST, concurrency=8)
    async def tokens(self, n):
        for number in range(n):
            yield number

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return os.uname().nodename

    def on_replace(self, rank, state):
        """Nothing: ranks do not know each other."""


class Agent(bm.Worker):
    def __init__(self, rollout):
        self.rollout = rollout

    @register(Dispatch.ONE_TO_ALL)
    async def ask(self):
        found = await asyncio.gather(*[self.rollout.chat(str(n % 10)) for n in range(100)])
        return {
            "values": "".join(value for _, value in found) == "0123456789" * 10,
            "ranks": sorted({rank for rank, _ in found}),
            "items": [number async for number in self.rollout.tokens.stream(40)] == list(range(40)),
            "places": await self.rollout.place.submit(),
        }

    @register(Dispatch.ONE_TO_ALL)
    async def send(self):
        return (await self.rollout.chat(b"x" * LARGE))[1] == b"x"

    @register(Dispatch.ONE_TO_ALL)
    async def hold(self):
        try:
            await self.rollout.hold.options(replica=1)()
        except bm.WorkerDied as error:
            return str(error)

    @register(Dispatch.ONE_TO_ALL)
    async def again(self):
        return (await self.rollout.chat("a"))[1]


def tell(**facts):
    print(json.dumps(facts), flush=True)
    sys.stdin.readline()


ray.init(logging_level="warning", log_to_driver=False)  # whose lines could come between those of `tell`
NODES = {"first": {"number": "1"}, "second": {"number": "2"}}
with contextlib.ExitStack() as stack:
    pools = {"controller": stack.enter_context(bm.ResourcePool([1], backend="local"))}
    for place, node in NODES.items():
        pools[place] = stack.enter_context(bm.ResourcePool([2], backend="ray", nodes=node))
    pools["both"] = stack.enter_context(bm.ResourcePool([1, 1], backend="ray", nodes=list(NODES.values())))
    rollouts = {name: bm.WorkerGroup(pools[name], Rollout) for name in ("controller", "first", "both")}
    callers = {
        f"{place} asks {name}": bm.WorkerGroup(pools[place], Agent, rollout)
        for place in ("controller", *NODES)
        for name, rollout in rollouts.items()
    }
    tell(asked={name: caller.ask()[0] for name, caller in callers.items()})
    tell(sent=[callers[f"{place} asks {name}"].send()[0] for place in NODES for name in ("first", "both")])
    held = {name: caller.hold.submit() for name, caller in callers.items() if name.endswith("both")}
    del held["second asks both"]
    tell(is_held=True)
    tell(died={name: future.result()[0] for name, future in held.items()})
    rollouts["both"].replace(1)
    tell(again={name: callers[name].again()[0] for name in held})
    tell(is_over=True)
