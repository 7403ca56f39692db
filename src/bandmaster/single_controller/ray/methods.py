"""A method of a `RayWorkerGroup`: verl's dispatch function, bandmaster's call, verl's collect function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

from bandmaster.calls.future import Future
from bandmaster.calls.request import CallRequest, Collection
from bandmaster.calls.submission import Submitter
from bandmaster.errors import UsageError
from bandmaster.groups.method import GroupMethod
from bandmaster.plan.arguments import CallPlan
from bandmaster.plan.binding import dispatched
from bandmaster.plan.transfer import Custom, Gather
from bandmaster.single_controller.base.batches import resolved, teach_codec, without_padding
from bandmaster.single_controller.base.decorator import PADDING_KEY, collected, joins_rows
from bandmaster.single_controller.base.later import RowsLater

__all__ = ["RayMethod", "func_generator"]


class RayMethod(GroupMethod[..., Any, Any]):
    """A method of a `RayWorkerGroup`."""

    _group: Any  # a RayWorkerGroup

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the method. Without ``blocking``: ObjectRefs, or a ``DataProtoFuture`` if the rows are joined."""
        registration = self._spec.registration
        if registration.is_blocking:
            return self._send(args, kwargs, waits=True)
        protocol = registration.protocol
        if isinstance(protocol, Custom) and joins_rows(protocol.collect):
            return RowsLater.of(self._send(args, kwargs, waits=False))
        name, ranks = self._spec.name, self._spec.ranks
        if isinstance(protocol, Custom):
            plan, _ = self._dispatched(protocol, args, kwargs)
            found = references(self._submitter, self._group, name, plan, ranks, self._options)
            return protocol.collect(self._group, found)
        if not self._spec.is_for_zero:
            return self._send(args, kwargs, waits=False)
        plan = self._group._plan(name, args, kwargs, 1)
        return references(self._submitter, self._group, name, plan, ranks, self._options)[0]

    def stream(self, /, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: verl's collect functions join the values of all ranks.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"{self._spec.label} cannot be streamed from a RayWorkerGroup; use a bandmaster.WorkerGroup")

    def _send(self, args: Sequence[Any], kwargs: Mapping[str, Any], waits: bool) -> Any:
        spec, protocol = self._spec, self._spec.registration.protocol
        args, kwargs = tuple(map(resolved, args)), {key: resolved(value) for key, value in kwargs.items()}
        if not isinstance(protocol, Custom):
            return super()._send(args, kwargs, waits)
        plan, n_padding = self._dispatched(protocol, args, kwargs)
        ranks = self._collected(protocol)
        finish = partial(self._collect, protocol.collect, ranks, n_padding)
        collection = Collection(Gather(), ranks, finish)
        request = CallRequest(spec.name, plan, spec.ranks, collection, self._group, self._options)
        return self._submitter.call(request) if waits else self._submitter.submit(request)

    def _dispatched(self, protocol: Custom, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CallPlan, int]:
        """Run the dispatch function. Returns the plan of the call and the number of rows that are padding."""
        teach_codec()
        placed, named = dispatched(self._spec.label, self._group, protocol, args, kwargs)
        by_name = {name: _listed(value) for name, value in named.items()}
        n_padding = by_name.pop(PADDING_KEY, 0)
        return self._group._plan(self._spec.name, [_listed(value) for value in placed], by_name), n_padding

    def _collected(self, protocol: Custom) -> tuple[int, ...]:
        """The ranks whose values the collect function uses."""
        mask = collected(protocol.collect, self._group)
        return self._spec.ranks if mask is None else tuple(rank for rank, is_used in enumerate(mask) if is_used)

    def _collect(self, collect: Callable[..., Any], ranks: Sequence[int], n_padding: int, values: Sequence[Any]) -> Any:
        outputs = list(values)
        if len(ranks) < self._group.world_size:
            by_rank = dict(zip(ranks, values, strict=True))
            outputs = [by_rank.get(rank) for rank in range(self._group.world_size)]
        joined = collect(self._group, outputs)
        is_by_rank = type(joined) is list and not joins_rows(collect)
        return joined if is_by_rank else without_padding(joined, n_padding)


def func_generator(
    worker_group: Any,
    method_name: str,
    dispatch_fn: Callable[..., Any],
    collect_fn: Callable[..., Any],
    execute_fn: Callable[..., Any],
    blocking: bool,
) -> Callable[..., Any]:
    """A function that distributes its arguments, calls a method by ``execute_fn``, and combines the results.

    Args:
        worker_group: The group, which is the first argument of ``dispatch_fn`` and ``collect_fn``.
        method_name: Name of the method.
        dispatch_fn: Returns ``(args, kwargs)`` with one value per rank.
        collect_fn: Makes the result from the list of all ranks' values.
        execute_fn: A method of the group such as ``execute_all``, which returns ObjectRefs.
        blocking: Whether the function waits for the values. If not, ``collect_fn`` gets the ObjectRefs.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        placed, named = dispatch_fn(worker_group, *args, **kwargs)
        by_name = dict(named)
        n_padding = by_name.pop(PADDING_KEY, 0)
        output = execute_fn(method_name, *placed, **by_name)
        if blocking:
            output = [_awaited(item) for item in output] if isinstance(output, list) else _awaited(output)
        joined = collect_fn(worker_group, output)
        is_by_rank = type(joined) is list and not (blocking and joins_rows(collect_fn))
        return joined if is_by_rank else without_padding(joined, n_padding)

    call.__name__ = call.__qualname__ = method_name
    return call


def _awaited(value: Any) -> Any:
    return value.result() if isinstance(value, Future) else resolved(value)


def references(
    submitter: Submitter,
    owner: object,
    method: str,
    plan: CallPlan,
    ranks: tuple[int, ...],
    options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Send a call. Returns an ObjectRef for each rank, or a future if the ranks are not actors.

    Args:
        submitter: The group's submitter.
        owner: The group, which lives as long as the futures.
        method: Name of the method.
        plan: Its arguments.
        ranks: The ranks that run it.
        options: The options of this call, which a future has, and an ObjectRef has not.
    """
    workers = submitter.workers()
    if not isinstance(workers, Refers):
        return submitter.submit_for_each(CallRequest(method, plan, ranks, owner=owner, options=options))
    if options:
        raise UsageError(
            f"{submitter.label(method)} returns ObjectRefs, to which options() does not apply; use ray.get(refs, "
            "timeout=...) and ray.cancel(ref)"
        )
    submitter.work.wait_until_sent()
    with submitter.gate.admitted(submitter.label(method)):
        found = workers.refer(submitter.encoded(method, plan, ranks))
    return [found[rank] for rank in ranks]


@runtime_checkable
class Refers(Protocol):
    """Workers that are Ray actors."""

    def refer(self, calls: Sequence[Any]) -> dict[int, Any]:
        """Send calls, and return the ObjectRef of each rank's value."""


def _listed(value: Any) -> Any:
    """A list or tuple with the values of its items that are ObjectRefs or futures; other values as they are."""
    return type(value)([resolved(item) for item in value]) if type(value) in (list, tuple) else value
