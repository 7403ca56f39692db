"""Calls of any method of the workers, registered or not, by its name: on all ranks, or on rank 0 alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.calls.future import Future
from bandmaster.calls.request import CallRequest, Collection
from bandmaster.calls.submission import Submitter
from bandmaster.errors import ArgumentError, suggestion
from bandmaster.plan.arguments import BoundArgument, CallPlan, everywhere, scatter
from bandmaster.plan.binding import bind, signature_without_self
from bandmaster.plan.transfer import Gather, Only
from bandmaster.worker import Worker


class ByName:
    """The part of a group that calls methods by their names. The group sets the attributes that are declared here."""

    _cls: type[Worker]
    _submitter: Submitter

    def execute_all_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a method, registered or not, on every rank, and wait for all results.

        When every argument is a list of world_size values, rank r gets the r-th value of each list; otherwise every
        rank gets the arguments unchanged.

        Args:
            method_name: Name of the method.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            One value per rank, in rank order.

        Raises:
            ArgumentError: The class has no such method, or the arguments do not match its signature.
            RemoteError: The method raised on at least one rank.
            CollectError: A returned value cannot be pickled or unpickled.
            WorkerDied, CallTimeout: In the cases of a registered method.
        """
        values: list[Any] = self._on_all(method_name, self._plan_for_all(method_name, args, kwargs))
        return values

    def execute_all_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Non-blocking `execute_all_sync`. Returns one `Future` per rank."""
        plan = self._plan_for_all(method_name, args, kwargs)
        return self._submitter.submit_for_each(CallRequest(method_name, plan, self._submitter.ranks, owner=self))

    def execute_rank_zero_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method, registered or not, on rank 0, wait for it, and return its value.

        Raises:
            ArgumentError: The class has no such method, or the arguments do not match its signature.
            RemoteError: The method raised.
        """
        plan = self._same(method_name, args, kwargs, 1)
        return self._submitter.call(CallRequest(method_name, plan, (0,), Collection(Only(), (0,)), self))

    def execute_rank_zero_async(self, method_name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Non-blocking `execute_rank_zero_sync`. Returns a `Future`."""
        plan = self._same(method_name, args, kwargs, 1)
        future: Future[Any] = self._submitter.submit_for_each(CallRequest(method_name, plan, (0,), owner=self))[0]
        return future

    execute_all = execute_all_async
    execute_rank_zero = execute_rank_zero_async

    def _plan_for_all(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallPlan:
        arguments, n_ranks = self._bind(method, args, kwargs), len(self._submitter.ranks)
        if arguments and all(isinstance(each.value, list) and len(each.value) == n_ranks for each in arguments):
            return CallPlan(tuple(scatter(arguments, n_ranks, self._submitter.label(method))))
        return CallPlan((everywhere(arguments, n_ranks),))

    def _same(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], n_ranks: int) -> CallPlan:
        """A plan that broadcasts the arguments to ranks 0 … n_ranks-1."""
        return CallPlan((everywhere(self._bind(method, args, kwargs), n_ranks),))

    def _on_all(self, method: str, plan: CallPlan) -> Any:
        """Run a planned call on every rank, and return the values in rank order."""
        ranks = self._submitter.ranks
        return self._submitter.call(CallRequest(method, plan, ranks, Collection(Gather(), ranks), self))

    def _bind(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[BoundArgument]:
        if not (isinstance(method, str) and callable(getattr(self._cls, method, None))):
            if isinstance(method, str) and hasattr(self._cls, method):
                kind = type(getattr(self._cls, method)).__name__
                raise ArgumentError(
                    f"{self._submitter.label(method)} is a {kind}, not a method; add a method that returns it"
                )
            hint = suggestion(str(method), dir(self._cls))
            raise ArgumentError(f"{self._cls.__name__} has no method {method!r}{hint}")
        return bind(self._submitter.label(method), signature_without_self(self._cls, method), args, kwargs)
