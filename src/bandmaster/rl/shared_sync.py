"""`SharedSync`: has a group read the weights of another one where they lie; see `bandmaster.rl.lent_weights`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from secrets import randbits
from typing import Any

from bandmaster import UsageError
from bandmaster.rl.engine_weights.peers import values_of
from bandmaster.rl.engine_weights.sync import check_in_flight, is_death, plan_into_engines
from bandmaster.rl.engine_weights.target import PauseMode
from bandmaster.rl.group_sync import compared, layout_of, refuse_in_flight, refuse_overlap, replicas_in
from bandmaster.rl.layout import Box
from bandmaster.rl.lent_weights import LentWeights, lenders
from bandmaster.rl.resharding import Resharding, reshard


class SharedSync:
    """Has a group read weights where they lie, without a copy; see `WeightSync`."""

    plan: Resharding

    def __init__(
        self,
        source: Any,
        target: Any,
        from_ranks: Iterable[int] | None,
        to_ranks: Iterable[int] | None,
        is_compared: bool,
        is_engine: bool,
    ) -> None:
        self._source, self._target, self._is_engine = source, target, is_engine
        self._one_at_a_time = threading.Lock()
        given = layout_of(source, from_ranks)
        wanted: Sequence[Mapping[str, Box]]
        if is_engine:
            said, read = target.expected_weights.all().result(), target.engine_memory.all().result()
            self.plan = plan_into_engines(given, said, target.name)
            wanted = [self.plan.target.boxes[0]] * len(said)
        else:
            read, layout = target.weights_memory(), layout_of(target, to_ranks, receives=True)
            if source is target:
                refuse_overlap(given, layout, source.name)
            self.plan = reshard(given, layout)
            wanted = layout.boxes
        lend = source.weights_memory()
        self._lenders = lenders(given, lend, wanted, read, (source.name, target.name))
        asked_for = [(name, not prod(shape)) for name, (shape, _) in self.plan.target.tensors.items()]
        self._names = [
            [name for name, is_empty in asked_for if is_empty or name in boxes] if rank in self._lenders else []
            for rank, boxes in enumerate(given.boxes)
        ]
        self._are_apart = [
            any(
                rank == lender and read[reader].place != lend[rank].place for reader, lender in enumerate(self._lenders)
            )
            for rank in range(given.n_ranks)
        ]
        self._replicas = replicas_in(self.plan) if is_compared else None

    def run(self, version: Any, in_flight: PauseMode | None) -> None:
        """Have the target use the weights, and wait until it does."""
        if self._is_engine:
            check_in_flight(in_flight)
        else:
            refuse_in_flight(in_flight)
        with self._one_at_a_time:
            sync = randbits(63)
            for error in self._ask("takes_weights", lambda _: ()) if self._is_engine else ():
                raise error  # before an engine is touched, as none keeps a copy
            try:
                replicas = compared(self._source, self._replicas)
                specs = self.plan.target.tensors
                lent = self._source.lend_weights(self._names, self._are_apart, specs, sync, *replicas)
                try:
                    died = self._use(lent, version, in_flight or "keep")
                except BaseException:
                    self._tell("revert_weights", sync)  # after which no replica reads any more
                    raise
            except BaseException:
                with contextlib.suppress(Exception):
                    self._source.end_loan(sync)
                raise
            try:
                self._source.end_loan(sync)
            except BaseException:
                self._tell("revert_weights", sync)  # as the source may have died while it was read
                raise
            self._tell("confirm_weights", sync)
            if died is not None:
                raise died

    def submit(self, version: Any, in_flight: PauseMode | None) -> Any:
        """Refuse: the source would go on, and change the weights while they are read."""
        raise UsageError(
            "an rl.WeightSync with share=True reads the weights of the source where they lie, so the source has to "
            "wait for it: call sync(version) instead of submit, or make it without share=True"
        )

    def _use(self, lent: Sequence[LentWeights], version: Any, mode: PauseMode) -> BaseException | None:
        """Have all replicas or ranks read what is lent, and wait until none reads any more.

        Returns:
            The death of a replica, which leaves the others with the new weights.
        """
        read = [None if rank is None else lent[rank] for rank in self._lenders]
        if self._is_engine:
            errors = self._ask("use_lent_weights", lambda replica: (read[replica], version, mode))
            for error in errors:
                if not is_death(error):
                    raise error
            return next(iter(errors), None)
        copied = self._target.copy_weights.submit(read, version)
        try:
            copied.result()
        except BaseException:
            copied.exception()  # also if the wait was interrupted
            raise
        return None

    def _tell(self, method: str, sync: int) -> None:
        """Tell all replicas of an engine how the sync has ended; one that has died has no weights to go back to."""
        if self._is_engine:
            with contextlib.suppress(Exception):  # the group may be closed
                self._ask(method, lambda _: (sync,))

    def _ask(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> list[BaseException]:
        """Send a request to each replica, and wait. Returns the errors."""
        request, replicas = getattr(self._target, method), range(len(self._lenders))
        _, errors = values_of({replica: request.options(replica=replica)(*arguments(replica)) for replica in replicas})
        return [*errors.values()]
