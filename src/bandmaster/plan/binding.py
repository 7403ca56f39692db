"""From a call as the user wrote it to its arguments, by the method's real signature. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.errors import ArgumentError
from bandmaster.plan.arguments import BoundArgument
from bandmaster.plan.transfer import Custom

__all__ = ["bind", "bind_per_rank", "signature_without_self"]

ADDED_BY_RAY = "_ray_trace_ctx"  # what @ray.remote writes into the signature of every method, inherited ones included

_TAKES_SELF = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def signature_without_self(cls: type, name: str) -> inspect.Signature:
    """The signature that callers of a method see on an instance of ``cls``, as its author wrote it."""
    signature = inspect.signature(getattr(cls, name))
    parameters = [p for p in signature.parameters.values() if p.name != ADDED_BY_RAY]
    takes_self = not isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    if takes_self and parameters and parameters[0].kind in _TAKES_SELF:  # else it is one of *args
        del parameters[0]
    return signature.replace(parameters=parameters)


def bind(
    method: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[BoundArgument]:
    """The arguments of a call, each with the parameter it belongs to; defaults are left to the worker.

    Raises:
        ArgumentError: The call does not fit the signature.
    """
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ArgumentError(f"{method}{signature} cannot be called so: {error}") from None
    arguments: list[BoundArgument] = []
    by_position = True
    for name, parameter in signature.parameters.items():
        if name not in bound:
            by_position = False  # a default was skipped: what follows can only go by keyword
        elif parameter.kind is parameter.VAR_POSITIONAL:
            arguments += [BoundArgument(len(arguments) + index, name, value) for index, value in enumerate(bound[name])]
        elif parameter.kind is parameter.VAR_KEYWORD:
            arguments += [BoundArgument(key, name, value) for key, value in bound[name].items()]
        elif parameter.kind is parameter.KEYWORD_ONLY or not by_position:
            arguments.append(BoundArgument(name, name, bound[name]))
        else:
            arguments.append(BoundArgument(len(arguments), name, bound[name]))
    return arguments


def bind_per_rank(
    method: str,
    signature: inspect.Signature,
    group: Any,
    custom: Custom,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[BoundArgument]:
    """What a custom dispatch function makes of a call: arguments whose values are sequences, one value per rank.

    Raises:
        ArgumentError: The function does not return ``(args, kwargs)``, or these do not fit the signature.
    """
    outcome = custom.dispatch(group, *map(_shallow, args), **{key: _shallow(value) for key, value in kwargs.items()})
    if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], Mapping)):
        raise ArgumentError(f"the dispatch_fn of {method} returned {type(outcome).__name__}; return (args, kwargs)")
    return bind(method, signature, *outcome)


def _shallow(value: Any) -> Any:
    return list(value) if type(value) is list else value  # a dispatch_fn may extend it; the caller's stays as it is
