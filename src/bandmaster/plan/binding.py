"""Binds the arguments of a call to the parameters in the method's real signature. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.errors import ArgumentError, suggestion
from bandmaster.plan.arguments import BoundArgument
from bandmaster.plan.transfer import Custom

ADDED_BY_RAY = "_ray_trace_ctx"  # @ray.remote adds it to the signature of every method, inherited ones included

_TAKES_SELF = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def signature_without_self(cls: type, name: str) -> inspect.Signature:
    """The signature of a method as callers see it on an instance of ``cls``: without self, or Ray's parameter."""
    signature = inspect.signature(getattr(cls, name))
    parameters = [p for p in signature.parameters.values() if p.name != ADDED_BY_RAY]
    takes_self = not isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
    if takes_self and parameters and parameters[0].kind in _TAKES_SELF:  # otherwise *args takes self
        del parameters[0]
    return signature.replace(parameters=parameters)


def bind(
    method: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[BoundArgument]:
    """Bind the arguments of a call to the parameters of a method. The worker fills in the defaults.

    Args:
        method: ``"Class.method"``, for messages.
        signature: Signature of the method without ``self``.
        args: The caller's positional arguments.
        kwargs: The caller's keyword arguments.

    Returns:
        One bound argument per given argument, in the order of the parameters.

    Raises:
        ArgumentError: The arguments do not match the signature.
    """
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        wrong = _unexpected(signature, kwargs) or _predicate(error)
        raise ArgumentError(f"{method}(){wrong}; the signature is {method}{signature}") from None
    arguments: list[BoundArgument] = []
    by_position = True
    for name, parameter in signature.parameters.items():
        if name not in bound:
            by_position = False  # a default was skipped, so all following arguments go by keyword
        elif parameter.kind is parameter.VAR_POSITIONAL:
            arguments += [BoundArgument(len(arguments) + index, name, value) for index, value in enumerate(bound[name])]
        elif parameter.kind is parameter.VAR_KEYWORD:
            arguments += [BoundArgument(key, name, value) for key, value in bound[name].items()]
        elif parameter.kind is parameter.KEYWORD_ONLY or not by_position:
            arguments.append(BoundArgument(name, name, bound[name]))
        else:
            arguments.append(BoundArgument(len(arguments), name, bound[name]))
    return arguments


def dispatched(
    method: str, group: Any, custom: Custom, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Call a custom dispatch function. Returns its ``(args, kwargs)``, in which each value has one item per rank.

    Raises:
        ArgumentError: It returns something else.
    """
    outcome = custom.dispatch(group, *map(_shallow, args), **{key: _shallow(value) for key, value in kwargs.items()})
    if not (isinstance(outcome, tuple) and len(outcome) == 2 and isinstance(outcome[1], Mapping)):
        raise ArgumentError(f"the dispatch_fn of {method} returned {type(outcome).__name__}; return (args, kwargs)")
    return outcome


def _shallow(value: Any) -> Any:
    return list(value) if type(value) is list else value  # a dispatch_fn may extend its list, not the caller's


def _unexpected(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """Name a keyword that no parameter takes, in Python's words; `inspect` may say that the right one is missing."""
    parameters = signature.parameters
    unknown = [name for name in kwargs if name not in parameters]
    if not unknown or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    hint = suggestion(unknown[0], [name for name in parameters if name not in kwargs])
    return f" got an unexpected keyword argument {unknown[0]!r}{hint}"


def _predicate(error: TypeError) -> str:
    """The message of `inspect.Signature.bind` in the form in which it follows ``method()``."""
    words = str(error)
    if words.startswith(("missing", "got")):
        return f" {words}"
    return f" got {words}" if words.startswith(("too many", "multiple")) else f": {words}"
