"""Encoding what a call sends, so that what cannot be pickled is named before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bandmaster.binding import bind, signature_without_self
from bandmaster.errors import ArgumentError
from bandmaster.failure import reraise_if_from_signal, summary_of
from bandmaster.planning import Parcel
from bandmaster.wire.codec import Payload, encode
from bandmaster.wire.gpu import Loan
from bandmaster.worker import Worker

__all__ = ["encode_constructor", "encode_parcel"]


def encode_parcel(
    parcel: Parcel, method: str, lend: Callable[[Sequence[int], Any], Loan | None] | None = None
) -> Payload:
    """Encode ``((position or keyword, value), ...)``; ``lend`` is the crew's, if it may lend here.

    Raises:
        ArgumentError: A value cannot be pickled; names the argument.
    """
    try:
        return encode(parcel.items, lend and partial(lend, parcel.ranks))
    except BaseException as error:  # the user's objects may raise anything when they are pickled
        reraise_if_from_signal(error)
        for (_, value), name in zip(parcel.items, parcel.names, strict=False):
            _check_picklable(value, f"argument {name!r} of {method}")
        raise ArgumentError(f"the arguments of {method} cannot be pickled together: {summary_of(error)}") from error


def encode_constructor(cls: type[Worker], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Payload:
    """Encode ``(cls, args, kwargs)``.

    Raises:
        ArgumentError: They do not fit the constructor, or one of them cannot be pickled.
    """
    name = f"{cls.__name__}.__init__"
    slots = bind(name, signature_without_self(cls, "__init__"), args, kwargs)
    try:
        return encode((cls, tuple(args), dict(kwargs)))
    except BaseException as error:
        reraise_if_from_signal(error)
        for slot in slots:
            _check_picklable(slot.value, f"argument {slot.name!r} of {name}")
        _check_picklable(cls, f"class {cls.__name__}")
        raise ArgumentError(f"the arguments of {name} cannot be pickled together: {summary_of(error)}") from error


def _check_picklable(value: Any, what: str) -> None:
    try:
        encode(value)
    except BaseException as error:
        reraise_if_from_signal(error)
        raise ArgumentError(f"{what} ({type(value).__name__}) cannot be pickled: {summary_of(error)}") from error
