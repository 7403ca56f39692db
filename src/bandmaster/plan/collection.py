"""Combines the return values of the ranks into the result of a call. Pure."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import compress
from typing import Any

import numpy as np

from bandmaster.errors import BatchError, CollectError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.plan.batch import KNOWN, Batch, as_batch, concat, detached, take_rows
from bandmaster.plan.rows import CollectEach, RealRows
from bandmaster.plan.transfer import Concat, Gather, Incoming, Only, Reduce

ADVICE = f"return a batch ({KNOWN}), or collect with Gather() or Reduce('mean')"
WIDER = {f"{kind}{bits}": "int64" for kind in ("int", "uint") for bits in (8, 16, 32)}  # the dtype to add up in
WIDER |= {"float16": "float32", "bfloat16": "float32"}


def collect(
    incoming: Incoming | CollectEach,
    ranks: Sequence[int],
    values: Sequence[Any],
    method: str,
    real_rows: RealRows | None = None,
) -> Any:
    """Concatenate, list or reduce the collected values.

    Args:
        incoming: The collect of the transfer protocol.
        ranks: The collected ranks, in the order of the mesh axes.
        values: The return values of ``ranks``, in the same order.
        method: ``"Class.method"``, for messages.
        real_rows: The number of rows that each rank of the group received; None if no argument was split.

    Returns:
        The result for the caller: a batch for `Concat`, a list for `Gather`, one value for `Reduce` and `Only`, and a
        tuple with one result per collect for `CollectEach`.

    Raises:
        CollectError: A value cannot be joined or reduced; the message names the rank and the type.
    """
    if isinstance(incoming, Concat):
        return _concat(ranks, values, method, real_rows)
    if isinstance(incoming, Gather):
        return list(values)
    if isinstance(incoming, Only):
        return values[0]
    if isinstance(incoming, Reduce):
        return _reduce(incoming, ranks, values, method, real_rows)
    return _collect_each(incoming, dict(zip(ranks, values, strict=True)), method, real_rows)


def _collect_each(how: CollectEach, values: Mapping[int, Any], method: str, real_rows: RealRows | None) -> Any:
    """Collect tuples item by item: result i is collect i, applied to item i of the ranks' tuples."""
    n = len(how.collects)
    for rank, value in values.items():
        if not isinstance(value, tuple) or len(value) != n:
            what = f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
            collects = ", ".join(repr(collect) for collect, _ in how.collects)
            raise _error(rank, method, f"returned {what}, expected a tuple of {n}: one value for each of {collects}")
    made = []
    for item, (incoming, ranks) in enumerate(how.collects):
        try:
            made.append(collect(incoming, ranks, [values[rank][item] for rank in ranks], method, real_rows))
        except CollectError as error:
            raise _error(
                error.rank, method, f"item {item} of the returned tuple: {error.failures[error.rank].summary}"
            ) from error.__cause__
    return tuple(made)


def _concat(ranks: Sequence[int], values: Sequence[Any], method: str, real_rows: RealRows | None) -> Any:
    if set(map(type, values)) == {type(None)}:
        return None
    batches = [_batch_of(rank, value, method) for rank, value in zip(ranks, values, strict=True)]
    if real_rows is not None and real_rows.padded_to is not None:
        batches = [
            _without_padding(rank, batch, real_rows.padded_to, len(real_rows.numbers[rank]), method)
            for rank, batch in zip(ranks, batches, strict=True)
        ]
    order = None if real_rows is None else real_rows.order(ranks)
    if order is not None:
        assert real_rows is not None, "it has an order"
        _check_counts(ranks, batches, real_rows, method)
    rows = [batch.n_rows for batch in batches]
    if not all(rows) and any(rows):  # the result of 0 rows, such as np.array([]), must not determine the type
        ranks, batches = list(compress(ranks, rows)), list(compress(batches, rows))
    joined = _join(ranks, batches, method, _sender(real_rows))
    return joined if order is None else take_rows(joined, order)


def _check_counts(ranks: Sequence[int], batches: Sequence[Batch], real_rows: RealRows, method: str) -> None:
    """Raise CollectError unless every rank has returned one row for each row that it received."""
    for rank, batch in zip(ranks, batches, strict=True):
        if batch.n_rows != (sent := len(real_rows.numbers[rank])):
            raise _error(
                rank,
                method,
                f"returned {batch.n_rows} rows for {sent} rows of a batch that was not sent in its order, so the order "
                "cannot be restored; return one row for each row, or split without balance",
            )


def _batch_of(rank: int, value: Any, method: str) -> Batch:
    try:
        batch = as_batch(value)
    except BatchError as error:
        raise _error(rank, method, f"returned a value that Concat cannot join: {error}; {ADVICE}") from None
    if batch is None:
        raise _error(rank, method, f"returned {type(value).__name__}, which has no rows for Concat to join; {ADVICE}")
    return batch


def _without_padding(rank: int, batch: Batch, sent: int, real: int, method: str) -> Batch:
    if batch.n_rows != sent:
        raise _error(
            rank,
            method,
            f"returned {batch.n_rows} rows for {sent}, {sent - real} of them padding, so the padding cannot be "
            "identified; return one row for each row, or split without pad=True",
        )
    try:
        return batch if real == sent else _batch_of(rank, batch.rows(range(real)), method)
    except BatchError as error:
        raise _error(rank, method, f"returned rows whose padding cannot be removed: {error}") from error


def _join(ranks: Sequence[int], batches: Sequence[Batch], method: str, sender: str) -> Any:
    try:
        return detached(concat(batches))
    except BatchError as error:
        for rank, batch in zip(ranks, batches, strict=True):
            if not batch.is_like(batches[0]):
                one, other = type(batch.value).__name__, type(batches[0].value).__name__
                raise _error(
                    rank,
                    method,
                    f"returned {one}, but {sender} {ranks[0]} returned {other}; Concat joins values of one type, so "
                    f"return the same type on every {sender}",
                ) from None
        parts = zip(ranks, batches, strict=True)
        shapes = ", ".join(f"{sender} {rank}: {_describe(batch.value)}" for rank, batch in parts)
        raise _error(ranks[0], method, f"returned a value that Concat cannot join: {error} ({shapes})") from error


def _reduce(how: Reduce, ranks: Sequence[int], values: Sequence[Any], method: str, real_rows: RealRows | None) -> Any:
    if callable(how.op):
        return how.op(list(values))
    shares: Sequence[float] = [1] * len(values)
    if how.weights is not None:
        assert real_rows is not None, "register refuses weights without a split"
        rows = [len(real_rows.numbers[rank]) for rank in ranks]
        if any(rows):  # the result of 0 rows may be NaN, which would spoil the mean
            ranks, values = list(compress(ranks, rows)), list(compress(values, rows))
            shares = _shares([n for n in rows if n])
    try:
        return detached(_reduce_tree(how.op, values, shares))
    except Exception as error:
        types = ", ".join(
            f"{_sender(real_rows)} {rank}: {type(value).__name__}" for rank, value in zip(ranks, values, strict=True)
        )
        raise _error(ranks[0], method, f"returned a value that {how!r} cannot reduce ({types}): {error}") from error


def _shares(rows: Sequence[int]) -> list[float]:
    """Weights in the ratio of the row counts, at most 1, so that weighted values of a small dtype do not overflow.

    Each weight is a whole number over a power of two, so that products and sums are as exact as with whole numbers.
    All weights are 1 if the row counts are equal.
    """
    divisor = math.gcd(*rows)
    scale = 1 << (max(rows) // divisor - 1).bit_length()
    return [n // divisor / scale for n in rows]


def _reduce_tree(op: str, values: Sequence[Any], shares: Sequence[float]) -> Any:
    """Reduce values elementwise, and dicts key by key; ``shares`` are the weights of a mean, at most 1."""
    if isinstance(values[0], dict):
        keys = values[0].keys()
        if any(value.keys() != keys for value in values):
            raise TypeError(f"dicts with different keys: {[list(value) for value in values]}")
        return {key: _reduce_tree(op, [value[key] for value in values], shares) for key in keys}
    if isinstance(values[0], Sequence):
        raise TypeError(f"{type(values[0]).__name__} is neither a number nor an array, tensor or dict of them")
    shapes = [() if getattr(value, "is_nested", False) else tuple(getattr(value, "shape", ())) for value in values]
    if len(set(shapes)) > 1:  # which could be added up if they differ in a dim of size 1
        raise TypeError(f"values of different shapes: {shapes}; return equal shapes, or collect with Gather()")
    if op in ("min", "max"):
        return reduce(_pairwise(op, values[0]), values)
    counted = [_countable(value, op) for value in values]
    if any(share != 1 for share in shares):
        counted = [value * share for value, share in zip(counted, shares, strict=True)]
    total = reduce(operator.add, counted)
    if op == "sum":
        return total
    mean, dtypes = total / sum(shares), {_dtype_of(value) for value in values}
    return _cast(mean, *dtypes) if dtypes in ({"float16"}, {"bfloat16"}) else mean


def _countable(value: Any, op: str) -> Any:
    """A value that can be added up: True + True is 2 in Python, but True in arrays, and sums of a mean may overflow."""
    dtype = _dtype_of(value)
    if "bool" in dtype:
        return value + 0
    return _cast(value, WIDER[dtype]) if op == "mean" and dtype in WIDER else value


def _dtype_of(value: Any) -> str:
    return str(getattr(value, "dtype", "")).removeprefix("torch.")


def _cast(value: Any, dtype: str) -> Any:
    return value.astype(dtype) if hasattr(value, "astype") else value.to(getattr(sys.modules["torch"], dtype))


def _pairwise(op: str, like: Any) -> Callable[[Any, Any], Any]:
    if hasattr(like, "minimum") and hasattr(like, "maximum"):  # a torch tensor has both as methods
        return lambda a, b: getattr(a, f"{op}imum")(b)
    if isinstance(like, np.ndarray):
        return np.minimum if op == "min" else np.maximum
    if op == "min":  # NaN is the least number and the largest, as in arrays
        return lambda a, b: min(a, b, key=lambda number: (number == number, number))
    return lambda a, b: max(a, b, key=lambda number: (number != number, number))


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape is not None else type(value).__name__


def _sender(real_rows: RealRows | None) -> str:
    return "rank" if real_rows is None else real_rows.holder


def _error(rank: int, method: str, summary: str) -> CollectError:
    return CollectError(method, {rank: Failure(FailureKind.RESULT, summary)})
