"""One step of GRPO on bandmaster, on plain Ray and on verl's single_controller: which share of it is no computation?

The workers and their models are those of examples/rlhf: two ranks that hold all models, on CPUs. The work is the same
on each: 512 answers, log-probabilities of the reference, rewards, advantages, four shuffled updates. Ranks
add up the seconds that they spend in methods; what a step takes beyond the busier rank's is overhead. Plain Ray passes
references where rows stay on their rank, and verl is called as its trainers do. Each has a process of its own.

    .verl/bin/python benchmarks/rlhf/grpo_step.py            # where verl is installed: `make bench-rlhf`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "src"), str(ROOT / "examples" / "rlhf")]
sys.path[:0] = PATHS

# ruff: noqa: E402
import addition
import losses
import models
import torch
from random_rows import row_seeds, shuffled
from workers import Actor, Reference, Reward

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register
from bandmaster.worker import WorkerContext, make_worker

N_RANKS, N_PROMPTS, N_SAMPLES, N_BATCHES = 2, 64, 8, 4
Rows = dict[str, torch.Tensor]


class Models:
    """All models of a rank, and the seconds that their methods have taken."""

    def __init__(self, rank: int, world_size: int, hidden: int) -> None:
        small = models.tiny()
        wide = type(small)(**{**small.to_dict(), "hidden_size": hidden, "intermediate_size": 4 * hidden})
        wide._attn_implementation = "eager"
        models.tiny = lambda: wide
        mesh = Mesh(dp=world_size, tp=1).refine(gen_tp=1)
        context = WorkerContext(rank, world_size, rank, world_size, 0, "cpu", mesh, {})
        made = [make_worker(cls, context, (), {}) for cls in (Actor, Reference, Reward)]
        self.actor, self.frozen, self.judge = made
        self.seconds = 0.0

    def timed(self, method: Callable[..., Any], *args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return method(*args)
        finally:
            self.seconds += time.perf_counter() - begun

    def generate(self, prompts: Rows) -> Rows:
        return self.timed(self.actor.generate, prompts)

    def reference(self, rows: Rows) -> Rows:
        return {"reference": self.timed(self.frozen.log_probs, rows)["log_probs"]}

    def score(self, rows: Rows) -> Rows:
        return self.timed(self.judge.score, rows)

    def update(self, rows: Rows) -> dict[str, float]:
        return self.timed(self.actor.update, rows, 1e-4, 0.2, 0.01)

    def spent(self) -> float:
        return self.seconds


class Prompts:
    """The prompts of each step, and the advantages of their answers."""

    def __init__(self) -> None:
        self.pairs, _ = addition.problems()
        self.chosen = shuffled(len(self.pairs), N_PROMPTS, 0)

    def of(self, step: int) -> Rows:
        pairs = self.pairs[next(self.chosen)].repeat_interleave(N_SAMPLES, dim=0)
        return {"prompt": addition.prompts(pairs), "seed": row_seeds(0, step, len(pairs))}


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    return losses.group_advantages(rewards, N_SAMPLES)[:, None]


class OnBandmaster(bm.Worker):
    def __init__(self, hidden: int) -> None:
        self.models = Models(self.rank, self.world_size, hidden)

    @register(Dispatch.DP_PROTO)
    def generate(self, prompts):
        return self.models.generate(prompts)

    @register(Dispatch.DP_PROTO)
    def reference(self, rows):
        return self.models.reference(rows)

    @register(Dispatch.DP_PROTO)
    def score(self, rows):
        return self.models.score(rows)

    @register(bm.TransferProtocol(bm.Split("dp", balance="n_tokens"), bm.Only()))
    def update(self, rows):
        return self.models.update(rows)

    @register(Dispatch.ONE_TO_ALL)
    def spent(self):
        return self.models.spent()


def on_bandmaster(backend: str, hidden: int) -> tuple[Callable[[int], Any], Callable[[], list[float]]]:
    pool = bm.ResourcePool([N_RANKS], backend=backend)
    group, prompts = bm.WorkerGroup(pool, OnBandmaster, hidden), Prompts()

    def step(number: int) -> None:
        rows = group.generate.submit(prompts.of(number))
        rows = rows.join(group.reference.submit(rows))
        rewards = group.score.submit(rows).result()["reward"]
        rows = rows.join(group.put({"advantages": advantages(rewards)}))
        batches = rows.shuffle(seed=number).batches(len(rows) // N_BATCHES)
        for update in [group.update.submit(batch) for batch in batches]:
            update.result()

    return step, group.spent


def on_ray(hidden: int) -> tuple[Callable[[int], Any], Callable[[], list[float]]]:
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=_environment())

    class Rank(Models):
        def __init__(self, rank: int, port: int) -> None:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": N_RANKS}
            os.environ.update({name: str(value) for name, value in where.items()})
            super().__init__(rank, N_RANKS, hidden)

    port, prompts = _free_port(), Prompts()
    ranks = [ray.remote(Rank).remote(rank, port) for rank in range(N_RANKS)]

    def step(number: int) -> None:
        asked = _parts(prompts.of(number))
        made = [rank.generate.remote(rows) for rank, rows in zip(ranks, asked, strict=True)]
        known = [rank.reference.remote(rows) for rank, rows in zip(ranks, made, strict=True)]
        scores = [rank.score.remote(rows) for rank, rows in zip(ranks, made, strict=True)]
        rows = {**_joined(ray.get(made)), **_joined(ray.get(known))}
        rows["advantages"] = advantages(_joined(ray.get(scores))["reward"])
        order = torch.randperm(len(rows["tokens"]), generator=torch.Generator().manual_seed(number))
        updates = []
        for chosen in order.chunk(N_BATCHES):
            parts = _parts({name: column[chosen] for name, column in rows.items()})
            updates += [rank.update.remote(part) for rank, part in zip(ranks, parts, strict=True)]
        ray.get(updates)

    return step, lambda: ray.get([rank.spent.remote() for rank in ranks])


def on_verl(hidden: int) -> tuple[Callable[[int], Any], Callable[[], list[float]]]:
    import ray
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch as Modes
    from verl.single_controller.base.decorator import register as marked
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    def proto(rows: Rows) -> Any:
        return DataProto.from_dict(dict(rows))

    class Rank(Worker):
        def __init__(self) -> None:
            super().__init__()
            self.models = Models(self.rank, self.world_size, hidden)

        @marked(Modes.DP_COMPUTE_PROTO)
        def generate(self, data):
            return proto(self.models.generate(data.batch))

        @marked(Modes.DP_COMPUTE_PROTO)
        def reference(self, data):
            return proto(self.models.reference(data.batch))

        @marked(Modes.DP_COMPUTE_PROTO)
        def score(self, data):
            return proto(self.models.score(data.batch))

        @marked(Modes.DP_COMPUTE_PROTO)
        def update(self, data):
            self.models.update(data.batch)
            return proto({"done": torch.ones(len(data))})

        @marked(Modes.ONE_TO_ALL)
        def spent(self):
            return self.models.spent()

    ray.init(address="local", num_cpus=100, include_dashboard=False, log_to_driver=False)
    group = RayWorkerGroup(RayResourcePool([N_RANKS], use_gpu=False), RayClassWithInitArgs(ray.remote(Rank)))
    prompts = Prompts()

    def step(number: int) -> None:
        rows = group.generate(proto(prompts.of(number)))
        rows = rows.union(group.reference(rows))
        rewards = group.score(rows).batch["reward"]
        rows = rows.union(proto({"advantages": advantages(rewards)}))
        rows.reorder(torch.randperm(len(rows), generator=torch.Generator().manual_seed(number)))
        for batch in rows.split(len(rows) // N_BATCHES):
            group.update(batch)

    return step, group.spent


def _parts(rows: Rows) -> list[Rows]:
    columns = {name: column.chunk(N_RANKS) for name, column in rows.items()}
    return [{name: parts[rank] for name, parts in columns.items()} for rank in range(N_RANKS)]


def _joined(parts: list[Rows]) -> Rows:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment() -> dict[str, Any]:
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}}


PEERS: dict[str, Callable[[int], Any]] = {
    "bandmaster, local": lambda hidden: on_bandmaster("local", hidden),
    "bandmaster, ray": lambda hidden: on_bandmaster("ray", hidden),
    "plain Ray": on_ray,
    "verl": on_verl,
}


def measure(peer: str, hidden: int, n_steps: int) -> None:
    """In a process of its own: print the seconds of a step, and those outside of methods."""
    torch.set_num_threads(1)
    step, spent = PEERS[peer](hidden)
    for number in range(3):
        step(number)
    before, begun = spent(), time.perf_counter()
    for number in range(3, 3 + n_steps):
        step(number)
    seconds = time.perf_counter() - begun
    inside = max(after - then for after, then in zip(spent(), before, strict=True))
    print(json.dumps([seconds / n_steps, (seconds - inside) / n_steps]))


def main() -> None:
    """Measure all peers in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--peers", nargs="+", default=list(PEERS))
    options = parser.parse_args()
    paths = [*PATHS, str(ROOT / "tests" / "verl")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "N_FAKE_GPUS": "8",
        "OMP_NUM_THREADS": "1",
    }
    print("| hidden size | on | ms per step | ms outside of methods | share |\n| --- | --- | --- | --- | --- |")
    for hidden in options.hidden:
        found: dict[str, list[list[float]]] = {peer: [] for peer in options.peers}
        for round_ in range(options.rounds):
            for peer in options.peers if round_ % 2 else reversed(options.peers):
                command = [sys.executable, __file__, "--one", peer, str(hidden), str(options.steps)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode == 0:
                    found[peer].append(json.loads(done.stdout.strip().splitlines()[-1]))
                else:
                    print(f"{peer} failed: {done.stderr[-500:]}", file=sys.stderr)
        for peer, pairs in found.items():
            if pairs:
                whole, outside = (statistics.median(values) * 1e3 for values in zip(*pairs, strict=True))
                print(f"| {hidden} | {peer} | {whole:.0f} | {outside:.1f} | {outside / whole:.1%} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
