"""A model in training on the ranks of a mesh with the axes dp and tp: gradients, clipping, optimizer, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import bandmaster as bm
from bandmaster import rl

__all__ = ["Trainer"]


class Trainer:
    """Updates a model from the rows of all ranks along dp.

    Args:
        worker: The worker, that is ``self``; its mesh has the axes dp and tp.
        model: A model, whole or cut along tp.
        max_norm: The norm of the gradient, at most.
        weight_decay: Of AdamW.
    """

    def __init__(self, worker: bm.Worker, model: nn.Module, max_norm: float = 1.0, weight_decay: float = 0.0) -> None:
        self.model, self.max_norm = model, max_norm
        self.data_parallel, self.tensor_parallel = (_group(worker, axis) for axis in ("dp", "tp"))
        self.cut = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
        self.whole = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        groups = [{"params": weights} for weights in (self.whole, self.cut) if weights]  # torch mixes them in no group
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=weight_decay)

    def step(self, loss: Tensor, n_tokens: Tensor, lr: float, **sums: Tensor) -> dict[str, float]:
        """Update the weights. Collective along dp and tp.

        Args:
            loss: The loss of this rank's rows, summed over their tokens.
            n_tokens: How many tokens these are; the loss of all ranks is divided by all tokens.
            lr: The learning rate.
            **sums: Other sums over these tokens.

        Returns:
            ``loss`` and the other sums, per token of all ranks; ``norm`` of the gradient before it was clipped.
        """
        self.optimizer.zero_grad()
        loss.backward()
        for weight in self.cut:  # the gradient of an embedding comes whole to each rank
            if weight.grad is not None and weight.grad.placements != weight.placements:
                weight.grad = weight.grad.redistribute(weight.device_mesh, weight.placements)
        means = self._average(torch.stack([n_tokens, loss.detach(), *(number.detach() for number in sums.values())]))
        norm = self._norm()
        for gradient in self._gradients([*self.whole, *self.cut]):
            gradient.mul_((self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return {**dict(zip(["loss", *sums], means.tolist(), strict=True)), "norm": float(norm)}

    def add_up(self, numbers: Tensor) -> Tensor:
        """Numbers added up along dp. Collective along dp."""
        if self.data_parallel is not None:
            dist.all_reduce(numbers, group=self.data_parallel)
        return numbers

    def forget(self) -> None:
        """Begin with a new optimizer."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad()

    def save(self, path: str, **more: Any) -> None:
        """Save model and optimizer. Collective."""
        rl.save(path, self.model, self.optimizer, **more)

    def load(self, path: str, **more: Any) -> dict[str, Any]:
        """Load what `save` has saved, on any mesh. Collective."""
        return rl.load(path, self.model, self.optimizer, **more)

    def _average(self, sums: Tensor) -> Tensor:
        """Add up gradients and sums along dp, and divide them by the first sum, the tokens; the other sums divided."""
        gradients = list(self._gradients([*self.whole, *self.cut]))
        if self.data_parallel is not None:
            flat = torch.cat([*(gradient.flatten() for gradient in gradients), sums])
            dist.all_reduce(flat, group=self.data_parallel)
            *parts, sums = flat.split([*(gradient.numel() for gradient in gradients), len(sums)])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        for gradient in gradients:
            gradient.div_(sums[0])
        return sums[1:] / sums[0]

    def _norm(self) -> Tensor:
        """The norm of the gradient of the whole model."""
        squares = torch.stack([_squares(self._gradients(weights)) for weights in (self.cut, self.whole)])
        if self.tensor_parallel is not None:  # what all ranks have whole, each counts once
            squares[1] /= dist.get_world_size(self.tensor_parallel)
            dist.all_reduce(squares, group=self.tensor_parallel)
        return squares.sum().sqrt()

    def _gradients(self, weights: Iterable[Tensor]) -> Iterator[Tensor]:
        """The gradients of weights, as far as they lie on this rank."""
        for weight in weights:
            if weight.grad is not None:
                yield weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad


def _squares(tensors: Iterable[Tensor]) -> Tensor:
    return sum((tensor.square().sum() for tensor in tensors), torch.zeros(()))


def _group(worker: bm.Worker, axis: str) -> Any:
    """The process group along an axis; None if the axis has one rank."""
    return rl.device_mesh(worker, axis).get_group() if worker.mesh.axis_size(axis) > 1 else None
