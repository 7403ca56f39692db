"""What do tensors on a GPU cost, which travel through the memory of the host? One worker, and one GPU.

"argument": a tensor of the controller that is on the GPU arrives on that of the worker; beside it, the two copies alone
(to the host and back), by pageable and by pinned memory. "weights": `rl.WeightSync` to another group on the same GPU,
by way of the host and by ``share=True``; beside it, the copy within the GPU by one process. "turn": a worker moves a
model to the host, and another one its own to the GPU. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from harness import machine
from harness.rows import as_text, figure

import bandmaster as bm
from bandmaster import Dispatch, register, rl

MiB = 1 << 20


class Holder(rl.HoldsWeights):
    """A model of bfloat16 matrices on the GPU, which leaves it in the turns of others."""

    def __init__(self, nbytes: int) -> None:
        n_layers = max(nbytes // (32 * MiB), 1)
        layers = [torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(n_layers)]
        self.model = torch.nn.Sequential(*layers).to(self.device).requires_grad_(False)

    def on_yield(self) -> None:
        """Move the model to the host."""
        self.model.to("cpu")
        torch.cuda.empty_cache()

    def on_resume(self) -> None:
        """Move it back."""
        self.model.to(self.device)

    @register(Dispatch.ONE_TO_ALL)
    def last(self, tensor: torch.Tensor) -> float:
        """The last element of a tensor that has arrived on the GPU."""
        assert tensor.is_cuda
        return float(tensor.view(-1)[-1])

    @register(Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Do nothing."""

    @register(Dispatch.ONE_TO_ALL)
    def fill(self, value: float) -> None:
        """Give all weights one value."""
        for weight in self.model.parameters():
            weight.fill_(value)

    @register(Dispatch.ONE_TO_ALL)
    def has(self, value: float) -> bool:
        """Whether all weights have one value."""
        return all(bool((weight == value).all()) for weight in self.model.parameters())


def median_of(work: Callable[[], object], n: int) -> float:
    """Median of the seconds that some work takes, without the first time."""
    seconds = []
    for _ in range(n + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def arguments(group: bm.WorkerGroup, n: int) -> list[list[str]]:
    """Time of a call with a tensor on the GPU, by size."""
    table = [["argument", "call", "copies, pageable", "copies, pinned", "of pageable"]]
    for nbytes in (MiB, 16 * MiB, 256 * MiB):
        tensor = torch.ones(nbytes // 4, device="cuda")
        pinned = torch.empty(nbytes // 4, pin_memory=True)
        call = median_of(lambda tensor=tensor: group.last(tensor), n)
        pageable = median_of(lambda tensor=tensor: tensor.cpu().cuda(), n)
        fast = median_of(lambda tensor=tensor, pinned=pinned: pinned.copy_(tensor).cuda(), n)
        seconds = [figure(value, "s") for value in (call, pageable, fast)]
        table.append([f"{nbytes // MiB} MiB", *seconds, f"{call / pageable:.2f}"])
    return table


def copy_on_gpu(nbytes: int, n: int) -> float:
    """Seconds that a copy within the GPU takes."""
    first, second = (torch.ones(nbytes // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = median_of(partial(second.copy_, first), n)
    del first, second
    torch.cuda.empty_cache()
    return seconds


def weights(pool: bm.ResourcePool, nbytes: int, n: int) -> list[list[str]]:
    """Time of a sync to another group on the same GPU, of the copy alone, and of a turn."""
    source, target = bm.WorkerGroup(pool, Holder, nbytes), bm.WorkerGroup(pool, Holder, nbytes)
    with source.turn(target):
        source.fill(1.0)
        moved = median_of(rl.WeightSync(source, target), n)
        assert target.has(1.0) == [True]
        source.fill(2.0)
        shared = median_of(rl.WeightSync(source, target, share=True), n)
        assert target.has(2.0) == [True]

    def in_turn() -> None:
        for group in (source, target):
            with group.turn():
                group.nothing()

    copied = copy_on_gpu(nbytes, n)
    turned = median_of(in_turn, max(n // 3, 1)) / 2
    rows = [
        ("weights to another group", moved),
        ("the same by share=True", shared),
        ("the copy on the GPU", copied),
        ("one turn, out and in", turned),
    ]
    return [["of " + f"{nbytes // MiB} MiB", "time"], *([name, figure(value, "s")] for name, value in rows)]


def main() -> None:
    """Ask the questions, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--weights-mib", type=int, default=2048)
    options = parser.parse_args()
    facts = {**machine.facts(), "GPU": torch.cuda.get_device_name(), "torch": torch.__version__}
    print("\n".join(f"{name:18} {fact}" for name, fact in facts.items()))
    with bm.ResourcePool([1], backend="local", use_gpu=True) as pool:
        with bm.WorkerGroup(pool, Holder, MiB) as group:
            print(as_text(arguments(group, options.rounds)), flush=True)
        print(as_text(weights(pool, options.weights_mib * MiB, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
