"""`EngineSync`: brings the weights of a group to the replicas of an engine, by requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from secrets import randbits
from typing import Any, NamedTuple

from bandmaster import LayoutError, RemoteError, UsageError, WorkerDied
from bandmaster.rl.engine_weights.checkpoint import FLOATS
from bandmaster.rl.engine_weights.packing import Piece
from bandmaster.rl.engine_weights.peers import Asked, Held, Restores, values_of, whole_box
from bandmaster.rl.engine_weights.target import EngineDied, Expected, NoBase, PauseMode
from bandmaster.rl.group_sync import N_BUCKETS, compared, layout_of, replicas_in
from bandmaster.rl.layout import Layout, Spec
from bandmaster.rl.resharding import Resharding, reshard

HEAL_S = 600.0  # for the replacement of a replica, when all have died
NOTICE_S = 2.0  # in which a death is noticed, after a replacement that has failed
IN_FLIGHT = ("keep", "wait", "abort")


class Begun(NamedTuple):
    """A sync whose weights the source has begun to send.

    Attributes:
        sync: Identifies it.
        rows: The rows of all buckets, if they were submitted at once; else they are made when they are needed.
    """

    sync: int
    rows: Sequence[Any] | None


class SyncFuture(concurrent.futures.Future[None]):
    """The end of a sync, which can be awaited."""

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.wrap_future(self).__await__()


class NoneLeft(Exception):
    """All replicas have died.

    Attributes:
        error: That of one of them.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Lost(NamedTuple):
    """A sync that found no replica.

    Attributes:
        error: The death of one of them; None if the only one is being replaced.
        n_healed: `Restores.n_healed` before.
    """

    error: BaseException | None
    n_healed: int


class EngineSync(Restores):
    """Brings weights to engines; see `WeightSync`.

    Args:
        source: The group that has the weights.
        target: The group of engines.
        bucket_nbytes: Bytes that a rank sends at a time.
        from_ranks: The ranks of the source that send; None for all.
        is_compared: Whether to compare replicas of the source.
        is_delta: Whether to send changes alone to replicas that have the weights of the sync before.
        is_kept: Whether the source keeps a copy of what it has sent.
        spares_dead: Whether a sync leaves out replicas that have died.

    Attributes:
        plan: The moves from the ranks of the source to a replica.
        sent_nbytes: Bytes that the last sync has sent, each once, however many replicas read them.
        held: The weights that the replicas have; None before the first sync.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        bucket_nbytes: int,
        from_ranks: Iterable[int] | None,
        is_compared: bool,
        is_delta: bool,
        is_kept: bool,
        spares_dead: bool = False,
    ) -> None:
        self.source = source
        self._is_delta, self._is_kept, self._spares_dead = is_delta, is_kept, spares_dead
        given, said = layout_of(source, from_ranks), target.expected_weights.all().result()
        self.plan = plan_into_engines(given, said, target.name)
        self.specs = self.plan.target.tensors
        super().__init__(target, len(said), bucket_nbytes)
        self._buckets = [
            [tuple((m.name, m.box) for m in moves if m.sender == s) for s in range(given.n_ranks)]
            for moves in self.plan.buckets(bucket_nbytes)
        ]
        self._replicas = replicas_in(self.plan) if is_compared else None
        self.sent_nbytes = 0
        self.held: Held | None = None

    def run(self, version: Any, in_flight: PauseMode | None) -> None:
        """Bring the weights of the source to all replicas, and wait until they use them."""
        check_in_flight(in_flight)
        with self.lock:
            begun = self._begin(is_all=False)
            lost = self._tried(begun, version, in_flight or "keep")
        self._try_again(lost, begun, version, in_flight or "keep")

    def submit(self, version: Any, in_flight: PauseMode | None) -> SyncFuture:
        """Send the weights as they are after the calls that were submitted before. Waits for earlier syncs alone."""
        check_in_flight(in_flight)
        future, start = SyncFuture(), SyncFuture()
        future.set_running_or_notify_cancel()
        self.lock.acquire()
        try:
            args = future, start, self._begin(is_all=True), version, in_flight or "keep"
            threading.Thread(
                target=self._finish_in_background, args=args, name="bandmaster-weights", daemon=True
            ).start()
        except BaseException:
            if start.cancel():  # else Ctrl-C came when the thread had begun, which has the lock then
                self.lock.release()
            raise
        return future

    def _finish_in_background(
        self, future: SyncFuture, start: SyncFuture, begun: Begun, version: Any, in_flight: PauseMode
    ) -> None:
        if not start.set_running_or_notify_cancel():
            return
        try:
            try:
                lost = self._tried(begun, version, in_flight)
            finally:
                self.lock.release()
            self._try_again(lost, begun, version, in_flight)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def present(self) -> Held | None:
        """Return the weights that the replicas have; None before the first sync."""
        return self.held

    def restore(self, replica: int) -> str:
        """Bring the weights that the others have, or that the source keeps; see `Restores.restore`."""
        if self.held is None:
            raise UsageError("there was no sync yet, so a replica that was replaced has the weights of the others")
        if peer := self.restore_from_peer(replica, self.held, self.specs):
            return peer
        if not self._is_kept:
            raise UsageError(
                f"no other replica of {self.target.name} has the weights of the last sync, and the source keeps no "
                "copy of them; sync again, or let it keep one by rl.WeightSync(..., delta=True) or heals=True"
            )
        sync = self.held.sync
        self.give(
            replica, self.held, self.specs, ((self._pack(bucket, sync, None), bucket) for bucket in self._buckets)
        )
        return self.source.name  # type: ignore[no-any-return]

    # --- steps ---

    def _begin(self, is_all: bool) -> Begun:
        """Have the source keep the weights, or send them, as they are now."""
        self.sent_nbytes = 0
        sync, base = randbits(63), None if self.held is None else self.held.sync
        if self._is_kept:
            n_ranks = self.plan.source.n_ranks
            pieces = [[piece for bucket in self._buckets for piece in bucket[rank]] for rank in range(n_ranks)]
            kept = self.source.snapshot_weights.submit(
                pieces, self.specs, sync, base, *compared(self.source, self._replicas)
            )
            return Begun(sync, [kept])
        if not is_all:
            return Begun(sync, None)
        return Begun(sync, [self._pack(bucket, sync, None, n == 0) for n, bucket in enumerate(self._buckets)])

    def _tried(self, begun: Begun, version: Any, in_flight: PauseMode, is_patient: bool = True) -> Lost | None:
        """Stage the weights on all replicas, and have these use them. The lock is held.

        Args:
            begun: The sync.
            version: The version of the weights.
            in_flight: What becomes of requests that run.
            is_patient: Whether nothing is tried while the only replica is being replaced.

        Returns:
            None if they use them.
        """
        if self._is_kept and begun.rows is not None:
            begun.rows[0].result()
        n_healed = self.n_healed
        if is_patient and not self.reachable:
            return Lost(None, n_healed)
        try:
            self._stage_and_use(begun, version, in_flight)
        except NoneLeft as none:
            return Lost(none.error, n_healed)
        return None

    def _try_again(self, lost: Lost | None, begun: Begun, version: Any, in_flight: PauseMode) -> None:
        """Wait for a replica and try again, while a sync finds none. The lock is free during a wait."""
        while lost is not None:
            is_healed = self._is_healed(beyond=lost.n_healed)
            if lost.error is not None and not is_healed:
                raise lost.error
            with self.lock:
                lost = self._tried(begun, version, in_flight, is_patient=is_healed)

    def _is_healed(self, beyond: int) -> bool:
        """Wait until a replica was replaced, if that is done."""
        if not self._spares_dead:
            return False
        with self.has_healed:
            notice_s = HEAL_S if self.heals_succeed else NOTICE_S
            self.has_healed.wait_for(lambda: self.n_healing or self.n_healed > beyond, notice_s)
            if self.n_healing:
                self.has_healed.wait_for(lambda: self.n_healed > beyond, HEAL_S)
            return self.n_healed > beyond and self.heals_succeed

    def _stage_and_use(self, begun: Begun, version: Any, in_flight: PauseMode) -> None:
        replicas = self.reachable or list(range(self.n_replicas))
        try:
            alive, addresses = self._stage(begun, replicas)
        except BaseException:
            self.quietly("revert_weights", replicas, begun.sync)
            raise
        self._use(alive, begun.sync, version, in_flight, addresses)

    def _stage(self, begun: Begun, alive: list[int]) -> tuple[list[int], Asked]:
        """Stage all buckets. Returns the replicas that have them, and the addresses in their memory."""
        sync, base = begun.sync, self.held.sync if self._is_delta and self.held is not None else None
        places = self.ask("weights_place", alive, lambda _: ())
        alive = self._without_dead(*places)
        values, errors = self.ask("begin_weights", alive, lambda r: (sync, base, self.specs, places[0][r]))
        lacking = [r for r, error in errors.items() if _is(NoBase, error)]
        more, others = self.ask("begin_weights", lacking, lambda r: (sync, None, self.specs, places[0][r]))
        others.update({r: error for r, error in errors.items() if r not in lacking})
        alive = self._without_dead({**values, **more}, others)
        addresses: Asked = {}
        in_transit: list[tuple[Asked, list[Any]]] = []
        for number, bucket in enumerate(self._buckets):
            rows: dict[bool, Any] = {}
            for is_whole in {r in lacking for r in alive}:
                if begun.rows is not None and not self._is_kept:
                    rows[is_whole] = begun.rows[number]
                else:
                    rows[is_whole] = self._pack(bucket, sync, None if is_whole else base, number == 0)
            asked = {r: self.sent("stage_weights", r, rows[r in lacking], bucket, sync) for r in alive}
            in_transit.append((asked, list(rows.values())))
            if len(in_transit) >= N_BUCKETS:
                alive = self._staged(*in_transit.pop(0), alive, addresses)
        for asked, sent in in_transit:
            alive = self._staged(asked, sent, alive, addresses)
        return alive, addresses

    def _staged(self, asked: Asked, sent: Sequence[Any], alive: list[int], addresses: Asked) -> list[int]:
        """Wait until a bucket is staged. Returns the replicas that have it."""
        for rows in sent:
            if (error := rows.exception()) is not None:
                raise error  # not that of a replica, which would be left out
            self.sent_nbytes += rows.nbytes
        values, errors = values_of(asked)
        addresses.update(values)
        found = self._without_dead(values, errors)
        return [r for r in alive if r in found]

    def _use(self, alive: Sequence[int], sync: int, version: Any, in_flight: PauseMode, addresses: Asked) -> None:
        """Have replicas use what they have staged: all of them, or none but those that die meanwhile."""
        errors: dict[int, BaseException] = {}
        try:
            _, errors = self.ask("use_weights", alive, lambda r: (sync, version, in_flight, addresses.get(r, "")))
            failed = [error for error in errors.values() if not isinstance(error, WorkerDied)]
            if failed:
                raise failed[0]
        except BaseException:
            self.quietly("revert_weights", alive, sync)
            raise
        if len(errors) < len(alive):
            self.held = Held(sync, version)
        self.quietly("confirm_weights", [r for r in alive if r not in errors], sync)
        self._without_dead(alive, errors)

    # --- messages ---

    def _pack(self, bucket: Sequence[Sequence[Piece]], sync: int, base: int | None, is_first: bool = False) -> Any:
        if self._is_kept:
            return self.source.pack_snapshot.submit(bucket, sync, base)
        more = compared(self.source, self._replicas) if is_first else []
        return self.source.pack_weights.submit(bucket, self.specs, *more)

    def _without_dead(self, found: Iterable[int], errors: Mapping[int, BaseException]) -> list[int]:
        """The replicas that have answered.

        Raises:
            NoneLeft: All have died, and replicas that died are left out.
            BaseException: Another error of a replica, or any if none is left out.
        """
        for replica, error in errors.items():
            if not (self._spares_dead and is_death(error)):
                raise error
            if not isinstance(error, WorkerDied):
                self.on_engine_death(replica, error)
        left = [r for r in found if r not in errors]
        if not left and errors:
            raise NoneLeft(next(iter(errors.values())))
        return left


def _is(kind: type[BaseException], error: BaseException) -> bool:
    """Whether a replica has raised an error of some kind."""
    return isinstance(error, RemoteError) and isinstance(error.__cause__, kind)


def is_death(error: BaseException) -> bool:
    """Whether a replica has died, or the engine of one whose worker lives."""
    return isinstance(error, WorkerDied) or _is(EngineDied, error)


def check_in_flight(in_flight: str | None) -> None:
    """Raise UsageError unless an engine knows what is to become of requests in flight."""
    if in_flight is not None and in_flight not in IN_FLIGHT:
        raise UsageError(f"in_flight must be one of {', '.join(map(repr, IN_FLIGHT))}, got {in_flight!r}")


def plan_into_engines(given: Layout, said: Sequence[Expected], name: str) -> Resharding:
    """The moves from the ranks of a source to a replica, which gets whole tensors in its own dtypes.

    Args:
        given: The layout of the source.
        said: The tensors that each replica takes.
        name: The name of the engines' group.

    Raises:
        LayoutError: Replicas take different tensors, or some that the source does not have.
    """
    specs = _agreed(said, name) or dict(given.tensors)
    return reshard(_cast(given, specs), Layout(specs, [{one: whole_box(spec) for one, spec in specs.items()}]))


def _agreed(said: Sequence[Expected], name: str) -> dict[str, Spec] | None:
    """The tensors that all replicas take.

    Raises:
        LayoutError: They take different ones.
    """
    first = said[0].specs
    for replica, one in enumerate(said):
        if one.specs != first:
            a, b = first or {}, one.specs or {}
            differ = {name for name in {**a, **b} if a.get(name) != b.get(name)}
            raise LayoutError(
                f"replicas 0 and {replica} of {name} take different weights: {', '.join(sorted(differ)[:5])}; give all "
                "replicas the same model"
            )
    return first


def _cast(given: Layout, wanted: Mapping[str, Spec]) -> Layout:
    """A layout with floating point tensors in the dtypes in which the target wants them."""
    tensors = {}
    for name, (shape, dtype) in given.tensors.items():
        other = wanted.get(name, (shape, dtype))[1]
        tensors[name] = shape, other if dtype in FLOATS and other in FLOATS else dtype
    return Layout(tensors, given.boxes)
