"""The request for a call: its method, arguments, ranks and limits, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from bandmaster.calls.options import CallOptions, default_options
from bandmaster.errors import CollectError
from bandmaster.plan.arguments import CallPlan
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import CollectEach
from bandmaster.plan.transfer import Gather, Incoming


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
    options: CallOptions | None = None
    defaults: Mapping[str, float | None] = MappingProxyType({})

    def limits(self) -> CallOptions:
        """The time limits of the call: its own, else those of its group, else those of the library."""
        if self.options is not None:
            return self.options
        options = default_options()
        return options.but(self.defaults) if self.defaults else options

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
        is_cleanup: Whether it frees resources of earlier calls, so that it is not cancelled with them.
    """

    method: str
    plan: CallPlan | Callable[[], CallPlan]
    ranks: tuple[int, ...]
    collection: Collection = NOTHING
    owner: object = None
    options: CallOptions | None = None
    keeps_rows: bool = False
    parents: Sequence[Any] = ()
    asks_for: str = ""
    is_for_all: bool = True
    is_cleanup: bool = False
