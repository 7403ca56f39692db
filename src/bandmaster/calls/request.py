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

__all__ = ["NOTHING", "CallRequest", "CallSite", "Collection"]


class CallSite(NamedTuple):
    """The words of messages about a call, and how long it may take.

    Attributes:
        method: ``"Class.method"``.
        mesh: The group's mesh.
        group: The group's name.
        options: How long the call may take; None where nobody said so for this call.
        defaults: The group's own options of calls.
    """

    method: str
    mesh: Mesh
    group: str = ""
    options: CallOptions | None = None
    defaults: Mapping[str, float | None] = MappingProxyType({})

    def limits(self) -> CallOptions:
        """How long the call may take, as the call says, else its group, else the library."""
        if self.options is not None:
            return self.options
        options = default_options()
        return options.but(self.defaults) if self.defaults else options

    def located(self, error: CollectError) -> CollectError:
        """The error with the coordinates of its ranks."""
        where = {rank: self.mesh.coordinates(rank) for rank in error.failures}
        return CollectError(error.method, error.failures, where, axes=self.mesh.shown_axes)


class Collection(NamedTuple):
    """How the values of a call become its result.

    Attributes:
        incoming: How they are joined, listed or reduced.
        ranks: The ranks whose values come back, in order.
        finish: Makes the result of that; by default it is the result.
    """

    incoming: Incoming | CollectEach
    ranks: tuple[int, ...]
    finish: Callable[[Any], Any] | None = None


NOTHING = Collection(Gather(), ())


@dataclass
class CallRequest:
    """A call that is to be sent.

    Attributes:
        method: Name of the method.
        plan: Its arguments, or a function that plans them when the call is sent.
        ranks: The ranks that run it.
        collection: How their values become the result.
        owner: The group, which lives as long as the future.
        options: How long it may take; by default as the group says.
        keeps_rows: Whether the rows of the result stay where they are made until they are read.
        parents: The futures of rows that it takes and that are not there; it is sent when they are.
        asks_for: The name by which workers know it, if that is not the method's.
        is_for_all: Whether the death of a rank that was not asked fails it: those that were may wait for that one.
        is_cleanup: Whether it frees what earlier calls hold, so that it is not cancelled with them.
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
