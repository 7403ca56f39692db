"""The processor time of a request from an agent loop to a rollout: by verl's actors of Ray, and by bandmaster's lanes.

256 conversations of four turns, by two processes of agent loops, with two replicas of an engine that answers at once.
verl's own client asks its load balancer and the server's actor; that of `bandmaster.compat.verl_rollout` sends a
request to a group. Both in turn, five times; `make bench-verl` runs this in an environment with verl.

    .verl/bin/python tests/verl/hot_path.py [rounds]
"""

import asyncio
import statistics
import sys
import time

import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle

import bandmaster as bm
from bandmaster import rl
from bandmaster.compat.verl_rollout import EngineClient, Engines

N_CONVERSATIONS, N_TURNS, N_PROMPT, N_ANSWER = 256, 4, 64, 16
N_PROCESSES = N_REPLICAS = 2
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "full_determinism": False}}})


async def converse(client, name):
    """Take turns with the engine. Returns the number of requests."""
    prompt = list(range(N_PROMPT))
    for _ in range(N_TURNS):
        output = await client.generate(
            name, prompt_ids=prompt, sampling_params={"max_tokens": N_ANSWER, "logprobs": True}
        )
        assert len(output.token_ids) == N_ANSWER
        prompt += output.token_ids
    return N_TURNS


async def played(client, names):
    """Play all conversations at a time. Returns the requests, and the processor time of this process."""
    begin = time.process_time()
    counts = await asyncio.gather(*[converse(client, name) for name in names])
    return sum(counts), time.process_time() - begin


class Server:
    """A server of verl's, as an actor of Ray."""

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None):
        return TokenOutput(
            token_ids=[7] * N_ANSWER,
            log_probs=[-1.0] * N_ANSWER,
            stop_reason="completed",
            extra_fields={"global_steps": 1},
        )

    async def used_s(self):
        return time.process_time()


class Balancer(GlobalRequestLoadBalancer):
    """verl's load balancer, which tells its processor time."""

    def used_s(self):
        return time.process_time()


class Agents:
    """A worker of agent loops, as an actor of Ray."""

    def __init__(self, client):
        self.client = client

    async def play(self, names):
        return await played(self.client, names)


class Engine(rl.Engine):
    """An engine that answers at once."""

    vocab_size, max_model_len = 1 << 20, 4096

    async def answers(self, prompt, sampling):
        return [rl.Answer([7] * N_ANSWER, [-1.0] * N_ANSWER, [1] * N_ANSWER, "length")]

    async def increments(self, prompt, sampling):
        for answer in await self.answers(prompt, sampling):
            yield answer

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def used_s(self):
        return time.process_time()

    async def pause(self, mode="abort"): ...

    async def resume(self): ...

    async def abort(self): ...

    async def sleep(self): ...

    async def wake(self): ...

    async def reset_cache(self): ...


class AgentWorker(bm.Worker):
    """The same as a worker of a group."""

    def __init__(self, client):
        self.client = client

    @bm.register(bm.Dispatch.REQUEST)
    async def play(self, names):
        return await played(self.client, names)


class ByActors:
    """verl's own way."""

    def __init__(self):
        self.servers = [ray.remote(num_cpus=0, max_concurrency=1000)(Server).remote() for _ in range(N_REPLICAS)]
        self.balancer = get_router_handle(
            servers={f"server {n}": server for n, server in enumerate(self.servers)}, load_balancer_cls=Balancer
        )
        client = LLMServerClient(CONFIG, self.balancer)
        self.agents = [ray.remote(num_cpus=0)(Agents).remote(client) for _ in range(N_PROCESSES)]

    def play(self, names):
        return ray.get([agent.play.remote(some) for agent, some in zip(self.agents, names, strict=True)])

    def used_s(self):
        """The processor time of the balancer, and of the servers."""
        return ray.get(self.balancer.used_s.remote()), sum(ray.get([server.used_s.remote() for server in self.servers]))


class ByLanes:
    """bandmaster's."""

    def __init__(self):
        pool = bm.ResourcePool([N_REPLICAS], backend="ray", cpus_per_worker=0)
        self.engines = bm.WorkerGroup(pool, Engine, mesh=bm.Mesh(dp=N_REPLICAS))
        client = EngineClient(CONFIG, Engines(self.engines, {"retries": 2}, 1024, 1024))
        self.agents = bm.WorkerGroup(
            bm.ResourcePool([N_PROCESSES], backend="ray", cpus_per_worker=0), AgentWorker, client
        )

    def play(self, names):
        return [one.result() for one in [self.agents.play.options(replica=n)(some) for n, some in enumerate(names)]]

    def used_s(self):
        return 0.0, sum(self.engines.used_s())


def measured(way, number):
    """Milliseconds of processor time for a request, of agent loops and balancer, and of servers; requests a second."""
    share = N_CONVERSATIONS // N_PROCESSES
    names = [[f"{number} {at} {n}" for n in range(share)] for at in range(N_PROCESSES)]
    before, begin = way.used_s(), time.perf_counter()
    found = way.play(names)
    seconds, after = time.perf_counter() - begin, way.used_s()
    n = sum(count for count, _ in found)
    ours = sum(used for _, used in found) + after[0] - before[0]
    return ours / n * 1e3, (after[1] - before[1]) / n * 1e3, n / seconds


def main(rounds):
    ray.init(num_cpus=8, include_dashboard=False, logging_level="WARNING")
    ways = {"verl": ByActors(), "bandmaster": ByLanes()}
    for way in ways.values():
        measured(way, "warm")
    found = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            found[name].append(measured(way, number))
    print("way         agents and balancer  servers   requests per second")
    for name, some in found.items():
        ours, servers, rate = [statistics.median(column) for column in zip(*some, strict=True)]
        print(f"{name:10}  {ours:.2f} ms              {servers:.2f} ms   {rate:,.0f}")
    ratios = sorted(a[0] / b[0] for a, b in zip(found["verl"], found["bandmaster"], strict=True))
    print(f"verl takes {statistics.median(ratios):.1f} times as long ({ratios[0]:.1f} to {ratios[-1]:.1f})")
    bm.close_all()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
