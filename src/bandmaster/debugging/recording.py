"""Stores a call of a worker as it begins, so that `bandmaster replay` can run it again in one process.

A recorded call is a file of two pickles: ``sys.path``, and a dict with the bound method (and so its worker), the
arguments, the states of random number generators, and the names of method and host. Loading runs what is pickled.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from bandmaster.errors.failure import summary_of
from bandmaster.worker import WorkerContext

__all__ = ["SUFFIX", "random_states", "record_call", "restore_random_states"]

SUFFIX = ".call"


def record_call(
    folder: str, context: WorkerContext, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Path:
    """Store a call that is about to run.

    Args:
        folder: Where to; it is made if it is not there.
        context: That of the worker.
        method: The bound method.
        args: Positional arguments, as the worker has received them.
        kwargs: Arguments by keyword.

    Returns:
        The file.

    Raises:
        TypeError: The worker or an argument cannot be pickled.
        OSError: The file cannot be written.
    """
    label, rank = method.__qualname__.rpartition("<locals>.")[2], context.rank
    call = {
        "label": label,
        "rank": rank,
        "world_size": context.world_size,
        "host": os.uname().nodename,
        "random": random_states(),
        "method": method,
        "args": tuple(args),
        "kwargs": dict(kwargs),
    }
    content = _pickled(call, label)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    unfinished = path / f"{uuid.uuid4().hex}.part"
    try:
        unfinished.write_bytes(content)
        return _named(unfinished, path, f"{label}-rank-{rank}{SUFFIX}")  # who reads the folder sees whole files alone
    finally:
        unfinished.unlink(missing_ok=True)


def _named(unfinished: Path, path: Path, name: str) -> Path:
    """Give a file the next free number; several workers may do so at the same time."""
    number = 1 + max((int(file.name[:4]) for file in path.glob(f"[0-9][0-9][0-9][0-9]-{name}")), default=0)
    while True:
        file = path / f"{number:04d}-{name}"
        try:
            os.link(unfinished, file)
            return file
        except FileExistsError:
            number += 1


def _pickled(call: Mapping[str, Any], label: str) -> bytes:
    buffer = io.BytesIO(pickle.dumps(list(sys.path)))
    buffer.seek(0, io.SEEK_END)
    try:
        cloudpickle.dump(call, buffer)
    except Exception as error:  # the user's objects may raise anything
        raise TypeError(
            f"{label} cannot be recorded, as its worker or an argument cannot be pickled: {summary_of(error)}; define "
            f"__getstate__ in {label.partition('.')[0]} to leave out what cannot be, or record another method"
        ) from error
    return buffer.getvalue()


def random_states() -> dict[str, Any]:
    """The states of the generators of `random`, numpy and, if it is loaded, torch."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy": np.random.get_state()}
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators to what `random_states` has returned; those of a GPU only where there is one."""
    random.setstate(states["random"])
    np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
