"""What does it cost to give engines the trainer's weights after each update: all of them, and the changes alone?

The trainer has float32 weights, cut over dp=2 tp=2, and takes steps of AdamW at a learning rate of 1e-6. Two engines
take them in bfloat16, and do nothing with what they have staged, so that what an engine itself takes to load is not in
it. Both ways take turns. "copy" is one copy of the engine's weights to fresh memory, in the process of an engine. After
each sync both engines have the bits of the trainer's weights, cast.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import torch
from harness import machine
from harness.rows import as_text

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

MiB = 1 << 20
WIDTH, N_LAYERS, SMOKE_WIDTH = 2048, 24, 64  # 101 million elements
TRAINER, LR = Mesh(dp=2, tp=2), 1e-6


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    """The tensors: square matrices, and a vector to each."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(N_LAYERS):
        found |= {f"{layer}.weight": (width, width), f"{layer}.norm": (width,)}
    return found


class Trainer(rl.HoldsWeights):
    """A model in float32, cut over tp, with its optimizer."""

    def __init__(self, width: int) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        torch.set_num_threads(1)
        mesh = rl.device_mesh(self, "dp", "tp")
        self.parameters, self.local = {}, []
        for number, (name, shape) in enumerate(shapes(width).items()):
            torch.manual_seed(number)
            cut = Shard(0) if len(shape) > 1 else Replicate()
            tensor = distribute_tensor(torch.randn(shape) * 0.02, mesh, [Replicate(), cut])
            self.parameters[name] = tensor
            self.local.append(torch.nn.Parameter(tensor._local_tensor))
        self.optimizer = torch.optim.AdamW(self.local, lr=LR)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The parameters by name."""
        return self.parameters

    @register(Dispatch.ONE_TO_ALL)
    def step(self, number: int) -> None:
        """Take a step with random gradients, which are alike on ranks that have the same part."""
        for parameter, whole in zip(self.local, self.parameters.values(), strict=True):
            place = self.mesh.coordinates(self.rank)["tp"] if whole.ndim > 1 else 0
            torch.manual_seed(number * 1000 + place)
            parameter.grad = 1e-3 * torch.randn(parameter.shape)
        self.optimizer.step()
        for parameter, whole in zip(self.local, self.parameters.values(), strict=True):
            whole._local_tensor.copy_(parameter.detach())
            parameter.grad = None

    @register(Dispatch.ONE_TO_ALL)
    def sums(self) -> dict[str, int]:
        """Checksums of the whole weights in bfloat16, by name."""
        return {name: _sum(weight.full_tensor().bfloat16()) for name, weight in self.parameters.items()}


class Taker(rl.Engine):
    """An engine that has what is staged, and nothing else."""

    vocab_size, max_model_len = 2, 2
    had: Mapping[str, torch.Tensor]

    def __init__(self, width: int) -> None:
        self.specs = {name: (shape, "bfloat16") for name, shape in shapes(width).items()}

    def weights_specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The tensors in bfloat16."""
        return self.specs

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Refer to the weights."""
        self.had = weights

    async def increments(self, prompt: list[int], sampling: rl.Sampling) -> AsyncGenerator[rl.Answer, None]:
        """Yield nothing."""
        yield rl.Answer([], [], [], "length")

    async def answers(self, prompt: list[int], sampling: rl.Sampling) -> list[rl.Answer]:
        """Answer with nothing."""
        return []

    async def resume(self) -> None: ...
    async def abort(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def reset_cache(self) -> None: ...

    async def pause(self, mode: Any = "abort") -> None:
        """Do nothing: there are no requests."""

    @register(Dispatch.ONE_TO_ALL)
    def sums(self) -> dict[str, int]:
        """Checksums of the weights, by name."""
        return {name: _sum(weight) for name, weight in self.had.items()}

    @register(Dispatch.ONE_TO_ALL)
    def copy(self) -> float:
        """Seconds for a copy of all weights to fresh memory."""
        begun = time.perf_counter()
        _ = [weight.clone() for weight in self.had.values()]
        return time.perf_counter() - begun


def _sum(tensor: torch.Tensor) -> int:
    return rl.checksums.checksums([tensor.contiguous()])[0]


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--smoke", action="store_true", help="tiny sizes: does it work at all?")
    arguments.add_argument("--rounds", type=int, default=5, help="turns of each way; default: %(default)s")
    parsed = arguments.parse_args()
    width, n_rounds = (SMOKE_WIDTH, 2) if parsed.smoke else (WIDTH, parsed.rounds)
    print(as_text([[key, str(value)] for key, value in {**machine.facts(), "torch": torch.__version__}.items()]))
    with bm.ResourcePool([TRAINER.size]) as pool, bm.ResourcePool([2]) as other_pool:
        trainer = bm.WorkerGroup(pool, Trainer, width, mesh=TRAINER)
        engines = bm.WorkerGroup(other_pool, Taker, width)
        whole, delta = rl.WeightSync(trainer, engines), rl.WeightSync(trainer, engines, delta=True)
        delta(version=0)
        seconds: dict[str, list[float]] = {"all weights": [], "changes": [], "copy": []}
        sent: dict[str, list[int]] = {"all weights": [], "changes": []}
        for number in range(1, n_rounds + 1):
            for name, sync in (("changes", delta), ("all weights", whole)):
                if name == "changes":
                    delta(version=0)  # the replicas have the weights of the other sync
                trainer.step(2 * number + (name == "changes"))
                begun = time.perf_counter()
                sync(version=number)
                seconds[name].append(time.perf_counter() - begun)
                sent[name].append(sync.sent_nbytes)
                assert trainer.sums()[0] == engines.sums()[0] == engines.sums()[1], "bit for bit"
            seconds["copy"].append(min(engines.copy()))
    print(f"\n{whole.plan.nbytes / MiB:,.0f} MiB in bfloat16, from {TRAINER} to 2 engines; {n_rounds} rounds\n")
    rows = [["way", "median", "most", "sent", "share"]]
    for name, some in seconds.items():
        nbytes = statistics.median(sent.get(name, [0]))
        share = f"{nbytes / whole.plan.nbytes:.2%}" if nbytes else ""
        middle, most = statistics.median(some), max(some)
        rows.append([name, f"{middle:.3f} s", f"{most:.3f} s", f"{nbytes / MiB:,.1f} MiB" if nbytes else "", share])
    print(as_text(rows))


if __name__ == "__main__":
    main()
