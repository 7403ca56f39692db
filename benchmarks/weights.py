"""What does it cost to give a rollout group the trainer's weights? From dp=2 tp=2 to 3 ranks, and by three ways.

`rl.WeightSync` plans rectangles and moves each by shared memory, with or without comparing the trainer's replicas.
"process group": the trainer gathers whole tensors (DTensor.full_tensor), and its rank 0 sends them to every rollout
rank by gloo, through `rl.connect`. "checkpoint": torch's distributed checkpoint, saved to /dev/shm by the trainer and
loaded by the rollout group. The ways take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import machine, proc
from harness.rows import as_text, figure, times
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

MiB = 1 << 20
WIDTH, SMOKE_WIDTH, N_LAYERS = 1536, 48, 12
TRAINER = Mesh(dp=2, tp=2)
TARGETS = {"3 replicas": Mesh(dp=3, tp=1), "tp=3": Mesh(dp=1, tp=3)}
SAMPLE_EVERY_S = 0.005


class Layer(nn.Module):
    """The matrices of a feed-forward layer, and a norm that all ranks have alike."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)


class Holder(rl.HoldsWeights, rl.Connectable):
    """A model of bfloat16 weights, cut over tp."""

    def __init__(self, width: int, n_layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(width) for _ in range(n_layers))).bfloat16().requires_grad_(False)
        mesh = rl.device_mesh(self, "dp", "tp")
        styles = {"up": ColwiseParallel, "down": RowwiseParallel}
        if mesh["tp"].size() > 1:
            for layer in self.model:
                parallelize_module(layer, mesh["tp"], {name: style() for name, style in styles.items()})

    @register(Dispatch.ONE_TO_ALL)
    def fill(self, value: float) -> None:
        """Give the weights values that depend on one."""
        for weight in self.model.parameters():
            weight.fill_(value)

    @register(Dispatch.ONE_TO_ALL)
    def has(self, value: float) -> bool:
        """Whether all weights are those of `fill`."""
        local = map(rl.local_tensors.local_tensor, self.model.parameters())
        return all(bool((tensor == value).all()) for tensor in local)

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        """Number of the process."""
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def send_whole(self, receivers: range) -> None:
        """Gather each tensor, and send it from rank 0 to all receivers."""
        group = self.process_groups["connection"]
        for tensor in self.weights().values():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.rank == 0:
                for request in [dist.isend(whole, receiver, group) for receiver in receivers]:
                    request.wait()

    @register(Dispatch.ONE_TO_ALL)
    def receive_whole(self) -> None:
        """Receive each tensor, and keep this rank's part."""
        boxes = rl.local_tensors.own_boxes(self.weights())
        for name, tensor in self.weights().items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(whole, 0, self.process_groups["connection"])
            place = boxes[name].slices(rl.Box((0,) * whole.ndim, tuple(whole.shape)))
            rl.local_tensors.local_tensor(tensor).copy_(whole[place])

    @register(Dispatch.ONE_TO_ALL)
    def save(self, folder: str) -> None:
        """Write a checkpoint."""
        dcp.save(dict(self.weights()), checkpoint_id=folder)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, folder: str) -> None:
        """Read a checkpoint into the weights."""
        dcp.load(dict(self.weights()), checkpoint_id=folder)


@dataclass
class Way:
    """A way to move the weights, and what was measured of it."""

    name: str
    move: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    sender_nbytes: int = 0
    receiver_nbytes: int = 0
    shared_nbytes: int = 0


def through_process_group(trainer: Any, rollout: Any, receivers: range) -> None:
    """Both groups at the same time."""
    sent, received = trainer.send_whole.submit(receivers), rollout.receive_whole.submit()
    sent.result()
    received.result()


def through_checkpoint(trainer: Any, rollout: Any) -> None:
    """One after the other, by a folder in memory."""
    folder = tempfile.mkdtemp(dir="/dev/shm")
    try:
        trainer.save(folder)
        rollout.load(folder)
    finally:
        shutil.rmtree(folder)


def measure(target: Mesh, width: int, n_rounds: int) -> tuple[rl.Resharding, list[Way]]:
    """All ways in turns, in random order; the first round does not count, and each result is checked."""
    with bm.ResourcePool([TRAINER.size]) as here, bm.ResourcePool([target.size]) as there:
        trainer = bm.WorkerGroup(here, Holder, width, N_LAYERS, mesh=TRAINER)
        rollout = bm.WorkerGroup(there, Holder, width, N_LAYERS, mesh=target)
        sync, unchecked = rl.WeightSync(trainer, rollout), rl.WeightSync(trainer, rollout, is_compared=False)
        with rl.connect(trainer, rollout) as connection:
            receivers = connection.ranks(rollout)
            ways = [
                Way("WeightSync", sync),
                Way("without comparing replicas", unchecked),
                Way("process group", lambda: through_process_group(trainer, rollout, receivers)),
                Way("checkpoint", lambda: through_checkpoint(trainer, rollout)),
            ]
            value = 0.0
            for round_ in range(n_rounds + 1):
                for way in random.sample(ways, len(ways)):
                    value += 1 / 4
                    trainer.fill(value)
                    turn(way, trainer, rollout, is_counted=round_ > 0)
                    if not all(rollout.has(value)):
                        raise SystemExit(f"{way.name} left other weights than the trainer's")
    return sync.plan, ways


def turn(way: Way, trainer: Any, rollout: Any, is_counted: bool) -> None:
    """Move the weights once, and note how long it took, and how far memory rose."""
    pids = {"sender_nbytes": trainer.process(), "receiver_nbytes": rollout.process()}
    before = {pid: proc.resident_nbytes(pid) for some in pids.values() for pid in some}
    for pid in before:
        proc.forget_peak(pid)
    with shared_memory() as shared:
        begun = time.perf_counter()
        way.move()
        took = time.perf_counter() - begun
    if is_counted:
        way.seconds.append(took)
        way.shared_nbytes = max(way.shared_nbytes, max(shared) - shared[0])
        for name, some in pids.items():
            rise = max(proc.peak_nbytes(pid) - before[pid] for pid in some)
            setattr(way, name, max(getattr(way, name), rise))


@contextmanager
def shared_memory() -> Iterator[list[int]]:
    """Samples of the shared memory of the machine, mapped or not, while it is open."""
    samples, is_over = [machine.shared_nbytes()], threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_EVERY_S):
            samples.append(machine.shared_nbytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def way_table(ways: list[Way]) -> list[list[str]]:
    """A line for each way; ratios are medians of the ratios of rounds."""
    first = ways[0]
    lines = [["way", "n", "median", "p99", "x WeightSync", "extra: sender", "receiver", "shared memory of all"]]
    for way in ways:
        ratio = statistics.median(a / b for a, b in zip(way.seconds, first.seconds, strict=True))
        rises = (way.sender_nbytes, way.receiver_nbytes, way.shared_nbytes)
        seconds = (figure(statistics.median(way.seconds), "s"), figure(max(way.seconds), "s"))
        rising = (figure(nbytes / MiB, "MiB") for nbytes in rises)
        lines.append([way.name, str(len(way.seconds)), *seconds, times(ratio), *rising])
    return lines


def changed_shares(n_elements: int, n_steps: int, lr: float) -> dict[str, tuple[float, float]]:
    """Which share of elements and of bytes an update by AdamW changes, by kind of weights; gradients are noise."""
    generator = torch.Generator().manual_seed(0)
    master = nn.Parameter(0.02 * torch.randn(n_elements, generator=generator))
    direct = nn.Parameter(master.detach().bfloat16())
    optimizer = torch.optim.AdamW([master, direct], lr=lr)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "float32": lambda: master.detach().clone(),
        "bfloat16, cast from float32": lambda: master.detach().bfloat16(),
        "bfloat16, updated as such": lambda: direct.detach().clone(),
    }
    shares: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(n_steps):
        before = {kind: weights() for kind, weights in kinds.items()}
        master.grad = 1e-3 * torch.randn(n_elements, generator=generator)
        direct.grad = master.grad.bfloat16()
        optimizer.step()
        for kind, weights in kinds.items():
            after = weights()
            differs = before[kind].view(torch.uint8) != after.view(torch.uint8)
            shares[kind].append(((before[kind] != after).float().mean().item(), differs.float().mean().item()))
    late = {kind: some[n_steps // 2 :] for kind, some in shares.items()}
    return {kind: tuple(statistics.mean(share) for share in zip(*some, strict=True)) for kind, some in late.items()}


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--smoke", action="store_true", help="tiny sizes: does it work at all?")
    arguments.add_argument("--rounds", type=int, default=7, help="turns of each way; default: %(default)s")
    arguments.add_argument("--json", type=Path, help="write the figures to this file, too")
    parsed = arguments.parse_args()
    width, n_rounds = (SMOKE_WIDTH, 1) if parsed.smoke else (WIDTH, parsed.rounds)
    said: dict[str, Any] = {**machine.facts(), "torch": torch.__version__}
    print(as_text([[key, str(value)] for key, value in said.items()]))
    for name, target in [*TARGETS.items()][1 if parsed.smoke else 0 :]:
        plan, ways = measure(target, width, n_rounds)
        over = plan.nbytes / plan.minimum_nbytes
        sent = [plan.sent(rank) for rank in range(TRAINER.size)]
        print(f"\nfrom {TRAINER} to {name}: {plan.nbytes / MiB:,.0f} MiB, {over:.3f} x what has to be moved;")
        print(f"a sender sends {max(sent) * len(sent) / sum(sent):.3f} x the mean\n")
        print(as_text(way_table(ways)))
        said[name] = {"nbytes": plan.nbytes, "over_minimum": over, "ways": [vars(way) | {"move": ""} for way in ways]}
    shares = changed_shares(10_000 if parsed.smoke else 1 << 20, 4 if parsed.smoke else 40, lr=1e-6)
    print("\nwhat one step of AdamW changes at a learning rate of 1e-6\n")
    lines = [[kind, *(f"{share:.2%}" for share in both)] for kind, both in shares.items()]
    print(as_text([["weights", "elements", "bytes"], *lines]))
    said["changed"] = shares
    if parsed.json:
        parsed.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
