"""Cuts, pads and joins values with rows under verl's import paths, by bandmaster's own batch types.

This module never imports verl; it finds verl's classes if the user's program has imported verl.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from bandmaster.codec import add_reducer
from bandmaster.errors import BatchError
from bandmaster.plan.batch import KNOWN, as_batch, concat_rows, describe, take_rows
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import cut_rows
from bandmaster.plan.transfer import Split
from bandmaster.single_controller.base.later import RowsLater

__all__ = ["Parts", "chunk", "join", "resolved", "teach_codec", "without_padding"]


class Parts(NamedTuple):
    """The parts of all arguments of a call.

    Attributes:
        args: For each positional argument the list of its parts.
        kwargs: For each keyword argument the list of its parts.
        n_padding: How many rows at the end of the last parts are padding.
    """

    args: list[list[Any]]
    kwargs: dict[str, list[Any]]
    n_padding: int


def chunk(n: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Parts:
    """Cut the rows of every argument into ``n`` parts; a value without rows goes into each part as it is.

    Where a verl DataProto asks for it (``auto_padding``), rows are repeated until all parts are equally long; else the
    first parts have one row more. The arguments themselves stay as they are.

    Raises:
        BatchError: No argument has rows, or their numbers of rows differ.
    """
    given = [_whole(value) for value in args] + [_whole(value) for value in kwargs.values()]
    names = [f"argument {index}" for index in range(len(args))] + [f"argument {name!r}" for name in kwargs]
    batches = [None if _chunks_itself(value) else as_batch(value) for value in given]
    sizes = {name: batch.n_rows for name, batch in zip(names, batches, strict=True) if batch is not None}
    if len(set(sizes.values())) > 1:
        raise BatchError(f"the arguments have different numbers of rows: {sizes}; make them equal")
    if not sizes and not any(_chunks_itself(value) for value in given):
        types = ", ".join(f"{name} is {describe(value)}" for name, value in zip(names, given, strict=True))
        raise BatchError(f"no argument has rows to be split ({types or 'there is none'}); pass a batch: {KNOWN}")
    n_rows = next(iter(sizes.values()), 0)
    pads = any(callable(asks := getattr(value, "is_padding_enabled", None)) and asks() for value in given)
    cut = cut_rows(Mesh(dp=n), Split("dp", pad=pads), n_rows)
    size, parts = cut.real_rows.padded_to, []
    for value, batch in zip(given, batches, strict=True):
        if _chunks_itself(value):
            parts.append(list(_batch_data(value).chunk(n)))
        elif batch is None:
            parts.append([value] * n)
        else:
            parts.append([batch.rows(numbers) for numbers in cut.numbers])
    n_padding = 0 if size is None else size * n - n_rows
    return Parts(parts[: len(args)], dict(zip(kwargs, parts[len(args) :], strict=True)), n_padding)


def join(outputs: Sequence[Any]) -> Any:
    """One value with the rows of all outputs in order; None if all are None.

    TensorDicts without a batch dimension, which hold metrics of the whole batch, are not joined: the first one stands
    for all.

    Raises:
        BatchError: The outputs have no rows, or cannot be joined.
    """
    first = outputs[0]
    if all(output is None for output in outputs):
        return None
    if _chunks_itself(first) or _is_reference(first):
        return _batch_data(list(outputs)).concat()
    if getattr(first, "batch_dims", None) == 0 and all(type(output) is type(first) for output in outputs):
        return first
    if as_batch(first) is None:
        raise BatchError(
            f"the ranks returned {describe(first)}, which has no rows to be joined; return a batch: {KNOWN}"
        )
    return concat_rows(outputs)


def without_padding(joined: Any, n_padding: int) -> Any:
    """A joined result without the rows that were computed from padding, which are the last ones."""
    batch = as_batch(joined) if n_padding else None
    return joined if batch is None else take_rows(joined, range(batch.n_rows - n_padding))


def teach_codec() -> None:
    """Have DataProtos travel column by column, without the copies that their own pickling makes; if verl is loaded."""
    protocol = sys.modules.get("verl.protocol")
    if protocol is not None and hasattr(protocol, "DataProto"):
        add_reducer(protocol.DataProto, _reduce_proto)


def _reduce_proto(value: Any) -> Any:
    return _rebuilt_proto, (type(value), vars(value))


def _rebuilt_proto(cls: type[Any], attributes: dict[str, Any]) -> Any:
    made = object.__new__(cls)
    vars(made).update(attributes)
    return made


def resolved(value: Any) -> Any:
    """The value of a ``DataProtoFuture`` or an ObjectRef, waiting for it; any other value as it is."""
    return sys.modules["ray"].get(value) if _is_reference(value) else _whole(value)


def _is_reference(value: Any) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(value, ray.ObjectRef)


def _whole(value: Any) -> Any:
    protocol = sys.modules.get("verl.protocol")
    futures = RowsLater if protocol is None else (RowsLater, protocol.DataProtoFuture)
    return value.get() if isinstance(value, futures) else value


def _chunks_itself(value: Any) -> bool:
    """Whether a value names rows that lie in verl's transfer queue: verl itself cuts and joins such names."""
    return type(value).__name__ in ("BatchMeta", "KVBatchMeta") and "verl.protocol" in sys.modules


def _batch_data(value: Any) -> Any:
    return sys.modules["verl.protocol"].BatchData(value)
