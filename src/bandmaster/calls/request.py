"""The request for a call: its method, arguments, ranks and limits, as data; and the encoding of single arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from bandmaster.calls.options import CallOptions, library
from bandmaster.codec import Payload, encode
from bandmaster.errors import ArgumentError, CollectError
from bandmaster.errors.failure import reraise_if_from_signal, summary_of
from bandmaster.plan.arguments import ArgumentGroup, CallPlan
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import CollectEach
from bandmaster.plan.transfer import Gather, Incoming
from bandmaster.worker import Worker


class CallSite(NamedTuple):
    """The names for messages about a call, and its time limits.

    Attributes:
        method: ``"Class.method"``.
        mesh: The group's mesh.
        group: The group's name.
        options: The limits of this call; None uses those of the group and the library.
        defaults: The group's own options of calls.
    """

    method: str
    mesh: Mesh
    group: str = ""
    options: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = MappingProxyType({})

    def limits(self) -> CallOptions:
        """The time limits of the call: its own, else those of its group, else those of the library."""
        own = {**self.defaults, **self.options} if self.options else self.defaults
        return replace(library.options, **own) if own else library.options  # they were checked as they were set

    def located(self, error: CollectError) -> CollectError:
        """A copy of an error with the coordinates of its ranks."""
        where = {rank: self.mesh.coordinates(rank) for rank in error.failures}
        return CollectError(error.method, error.failures, where, axes=self.mesh.shown_axes)


class Collection(NamedTuple):
    """The rule that makes the result of a call from the values of its ranks.

    Attributes:
        incoming: The collect rule, which joins, lists or reduces the values.
        ranks: The ranks whose values are collected, in order.
        finish: A function from the collected value to the result; None returns the collected value.
    """

    incoming: Incoming | CollectEach
    ranks: tuple[int, ...]
    finish: Callable[[Any], Any] | None = None


NOTHING = Collection(Gather(), ())


@dataclass
class CallRequest:
    """A call to send.

    Attributes:
        method: Name of the method.
        plan: Its arguments, or a function that plans them when the call is sent.
        ranks: The ranks that run it.
        collection: The rule that makes the result from their values.
        owner: The group, which lives as long as the future.
        options: The limits of the call; None uses those of the group.
        keeps_rows: Whether the rows of the result stay where they are made until they are read.
        parents: The futures of the missing rows that it takes; the call is sent when they are there.
        asks_for: The name by which workers know it, if that differs from the method's.
        is_for_all: Whether the death of a rank that does not run the call fails it, as others may wait for that rank.
        beside: Keyword arguments that are not the method's, but the library's.
        is_cleanup: Whether it frees resources of earlier calls, so that it is not cancelled with them.
        is_at_once: Whether it is sent before calls that wait for their rows: a worker makes it, or none waited as its
            arguments were planned, which are neither copies nor have claims on rows.
    """

    method: str
    plan: CallPlan | Callable[[], CallPlan]
    ranks: tuple[int, ...]
    collection: Collection = NOTHING
    owner: object = None
    options: Mapping[str, Any] | None = None
    keeps_rows: bool = False
    parents: Sequence[Any] = ()
    asks_for: str = ""
    is_for_all: bool = True
    is_cleanup: bool = False
    beside: Sequence[tuple[str, Any]] = ()
    is_at_once: bool = False


def encode_argument(value: Any, name: str, method: str) -> Payload:
    """Encode a single argument of a method of the group itself.

    Raises:
        ArgumentError: ``value`` cannot be pickled.
    """
    try:
        return encode(value)
    except BaseException as error:  # the user's objects may raise anything when they are pickled
        raise unpicklable(error, method, [(f"argument {name!r} of {method}", value)]) from error


def encode_group(group: ArgumentGroup, method: str) -> Payload:
    """Encode the arguments of a group.

    Raises:
        ArgumentError: One of them cannot be pickled; the message names it.
    """
    try:
        return encode(group.items)
    except BaseException as error:  # the user's objects may raise anything when they are pickled
        named = zip(group.names, group.items, strict=False)
        values = [(f"argument {name!r} of {method}", value) for name, (_, value) in named]
        raise unpicklable(error, method, values) from error


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
        raise unpicklable(error, name, [*named, (f"class {cls.__name__}", cls)]) from error


def unpicklable(error: BaseException, method: str, named: Sequence[tuple[str, Any]]) -> ArgumentError:
    """The error that names the value that cannot be pickled; raises ``error`` again if a signal's handler raised it."""
    reraise_if_from_signal(error)
    for name, value in named:
        try:
            encode(value)
        except BaseException as why:
            reraise_if_from_signal(why)
            return ArgumentError(f"{name} ({type(value).__name__}) cannot be pickled: {summary_of(why)}")
    return ArgumentError(f"the arguments of {method} cannot be pickled together: {summary_of(error)}")
