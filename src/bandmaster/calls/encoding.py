"""Encodes the arguments of a call, and names a value that cannot be pickled before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.codec import Payload, encode
from bandmaster.errors import ArgumentError
from bandmaster.errors.failure import reraise_if_from_signal, summary_of
from bandmaster.plan.arguments import ArgumentGroup
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.worker import Worker


def encode_group(group: ArgumentGroup, method: str) -> Payload:
    """Encode ``((position or keyword, value), ...)``.

    Args:
        group: Arguments with the same receivers.
        method: ``"Class.method"``, for messages.

    Raises:
        ArgumentError: A value cannot be pickled; names the argument.
    """
    try:
        return encode(group.items)
    except BaseException as error:  # the user's objects may raise anything when they are pickled
        named = zip(group.names, group.items, strict=False)
        raise _unpicklable(
            error, method, [(f"argument {name!r} of {method}", value) for name, (_, value) in named]
        ) from error


def encode_argument(value: Any, name: str, method: str) -> Payload:
    """Encode a single argument of a method of the group itself.

    Raises:
        ArgumentError: ``value`` cannot be pickled.
    """
    try:
        return encode(value)
    except BaseException as error:
        raise _unpicklable(error, method, [(f"argument {name!r} of {method}", value)]) from error


def encode_constructor(cls: type[Worker], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Payload:
    """Encode ``(cls, args, kwargs)``.

    Raises:
        ArgumentError: They do not fit the constructor, or one of them cannot be pickled.
    """
    name = f"{cls.__name__}.__init__"
    arguments = bind(name, signature_without_self(cls, "__init__"), args, kwargs)
    try:
        return encode((cls, tuple(args), dict(kwargs)))
    except BaseException as error:
        named = [(f"argument {argument.name!r} of {name}", argument.value) for argument in arguments]
        raise _unpicklable(error, name, [*named, (f"class {cls.__name__}", cls)]) from error


def _unpicklable(error: BaseException, method: str, named: Sequence[tuple[str, Any]]) -> ArgumentError:
    """The error that names the value that cannot be pickled; raises ``error`` again if a signal's handler raised it."""
    reraise_if_from_signal(error)
    for name, value in named:
        try:
            encode(value)
        except BaseException as why:
            reraise_if_from_signal(why)
            return ArgumentError(f"{name} ({type(value).__name__}) cannot be pickled: {summary_of(why)}")
    return ArgumentError(f"the arguments of {method} cannot be pickled together: {summary_of(error)}")
