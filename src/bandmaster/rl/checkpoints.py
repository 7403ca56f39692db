"""Checkpoints by torch's distributed checkpoint (DCP): saved by all ranks, resumed on any mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.nn import Module
    from torch.optim import Optimizer


def save(path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, **more: Any) -> None:
    """Save a model, its optimizer and more, each rank its own shards.

    Collective, if ``torch.distributed`` is initialised: all ranks call it. Parameters that are not a ``DTensor`` are
    saved once, on the assumption that they are equal on all ranks.

    Args:
        path: A folder that all ranks can reach, and all ranks that will load it.
        model: The model; with FSDP2 or tensor parallelism, its parameters are ``DTensor``.
        optimizer: Its optimizer.
        **more: Tensors, or values that can be pickled, such as ``step=100``; of rank 0.

    Source: ``torch.distributed.checkpoint``.
    """
    from torch.distributed import checkpoint, is_initialized

    with _silent_about_one_process():
        checkpoint.save(_state(model, optimizer, more), checkpoint_id=path, no_dist=not is_initialized())


def load(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, **more: Any
) -> dict[str, Any]:
    """Load a checkpoint of `save` onto any mesh: each rank reads the parts that its shards need.

    Collective, if ``torch.distributed`` is initialised: all ranks call it.

    Args:
        path: The folder.
        model: The model, already sharded; its parameters are overwritten.
        optimizer: Its optimizer, if one was saved; its parameter groups may differ from those of the saved one.
        **more: Further values to load, by name; each is a value of the type to load.

    Returns:
        The loaded values of ``more``.

    Source: ``torch.distributed.checkpoint``.
    """
    from torch.distributed import checkpoint, is_initialized
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    state = _state(model, optimizer, more)
    with _silent_about_one_process():
        checkpoint.load(state, checkpoint_id=path, no_dist=not is_initialized())
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_by_parameter())
    loaded: dict[str, Any] = state["more"]
    return loaded


@contextmanager
def _silent_about_one_process() -> Iterator[None]:
    """Suppress torch's warning that a single process saves and loads, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _state(model: Module, optimizer: Optimizer | None, more: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state = {"model": get_model_state_dict(model), "more": dict(more)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_by_parameter())
    return state


def _by_parameter() -> StateDictOptions:
    """Options that key an optimizer's state by parameter name, as parameter groups may differ between meshes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)
