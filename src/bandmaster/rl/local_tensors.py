"""The part of a model on one rank: its local tensors, and their rectangles in the whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from bandmaster import UsageError
from bandmaster.rl.layout import Box, Layout, Spec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


def tensors_of(model: Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model, by name; a tensor with several names appears once."""
    kept = model.state_dict(keep_vars=True)
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in named if name in kept}


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor with the memory on this rank: the local part of a DTensor, else the tensor itself."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)  # to_local() may return a view, as for parameters
    return found


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """The shape of each whole tensor, and its dtype by torch's name such as ``"bfloat16"``, by name."""
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def spec_text(spec: Spec | None) -> str:
    """A spec, or the lack of one, as messages say it."""
    return "missing" if spec is None else f"{spec[1]} of shape {spec[0]}"


def chosen_weights(
    weights: Mapping[str, Tensor], names: Iterable[str], specs: Mapping[str, Spec], is_cast: bool = False
) -> dict[str, Tensor]:
    """Choose weights by name, which have to be as they were when the sync was made.

    Args:
        weights: The weights of this rank now.
        names: Those to choose.
        specs: The whole tensors that the sync moves.
        is_cast: Whether the sync casts them, so that their dtypes may differ.

    Raises:
        UsageError: One is missing, or has another shape or dtype.
    """
    chosen = {name: weights[name] for name in names if name in weights}
    now, compared = tensor_specs(chosen), slice(1 if is_cast else 2)
    for name in names:
        if now.get(name, ())[compared] != specs.get(name, ())[compared]:
            raise UsageError(
                f"weight {name!r} is {spec_text(now.get(name))} on this rank, but this rl.WeightSync was made to move "
                f"{spec_text(specs.get(name))}; nothing was changed here: make a new rl.WeightSync"
            )
    return chosen


def refuse_expanded(weights: Mapping[str, Tensor]) -> None:
    """Raise UsageError if a weight cannot be written to, because several of its elements share memory."""
    for name, tensor in weights.items():
        own = local_tensor(tensor)
        if any(size > 1 and stride == 0 for size, stride in zip(own.shape, own.stride(), strict=True)):
            raise UsageError(
                f"weight {name!r} cannot be written to: it is expanded to shape {tuple(own.shape)} with strides "
                f"{own.stride()}, so that several elements share memory; make it of expand(...).clone(), or leave it "
                "out of weights()"
            )


def own_boxes(tensors: Mapping[str, Tensor]) -> dict[str, Box]:
    """The rectangle of each whole tensor that this rank has."""
    return {name: _own_box(tensor) for name, tensor in tensors.items()}


def _own_box(tensor: Tensor) -> Box:
    if not hasattr(tensor, "_local_tensor"):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    placed: Any = tensor
    chunks = placed.__create_chunk_list__()  # the method that torch's distributed checkpoint calls
    if len(chunks) != 1:
        raise UsageError(
            f"a rank must hold one rectangle of a tensor, got {len(chunks)} of one with {placed.placements}"
        )
    return Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def layout_of_ranks(tensors: Mapping[str, Tensor], world_size: int) -> Layout:
    """The layout of the tensors on all ranks of a group. Collective, if there are several: all ranks call it."""
    own = tensor_specs(tensors), own_boxes(tensors)
    if world_size == 1:
        return Layout(own[0], [own[1]])
    import torch.distributed as dist

    said: list[Any] = [None] * world_size
    dist.all_gather_object(said, own)
    return Layout({name: spec for specs, _ in said for name, spec in specs.items()}, [boxes for _, boxes in said])


def load_tensors(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into the parts of them that this rank has. If shapes differ, nothing is changed.

    Args:
        weights: The tensors to change, such as a state dict: plain ones, or `DTensor`s.
        tensors: The whole tensors, by the same names; those of other names are left out.

    Raises:
        UsageError: A whole tensor is missing, or has another shape.
    """
    for name, weight in weights.items():
        if name not in tensors or tensors[name].shape != weight.shape:
            found = f"of shape {tuple(tensors[name].shape)}" if name in tensors else "that is missing"
            raise UsageError(f"weight {name!r} of shape {tuple(weight.shape)} cannot be filled from one {found}")
    boxes = own_boxes(weights)
    for name, weight in weights.items():
        whole = Box((0,) * weight.ndim, tuple(weight.shape))
        local_tensor(weight).detach().copy_(tensors[name][boxes[name].slices(whole)])
