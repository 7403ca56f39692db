"""Weights of replicas that were replaced: they come from the other replicas, from worker to worker, by requests.

::

    PeerWeights    restores a replica of a group whose weights come otherwise than by `WeightSync`
    EngineSync     the same, and brings the weights of a training group to all replicas
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bandmaster import RemoteError, UsageError, WorkerDied
from bandmaster.rl.engine_weights.packing import Piece
from bandmaster.rl.engine_weights.target import HeldWeights
from bandmaster.rl.layout import Box, Spec, in_buckets

BUCKET_NBYTES = 64 << 20
N_TRIES = 3  # to get weights of peers, to which new ones may come meanwhile
LOG = logging.getLogger(__name__)
Rows = Iterable[tuple[Any, Sequence[Sequence[Piece]]]]  # rows of packed pieces, or futures of some, and their pieces
Asked = dict[int, Any]  # futures or values, by replica


class Held(NamedTuple):
    """The weights that replicas have.

    Attributes:
        sync: Identifies the sync that has brought them.
        version: Their version.
    """

    sync: int
    version: Any


class Restores:
    """Gives a replica of an engine that was replaced the weights that the others have.

    Args:
        target: The group of engines.
        n_replicas: The number of its replicas.
        bucket_nbytes: Bytes that a replica gives at a time.

    Attributes:
        has_source: Whether weights can come from elsewhere than from other replicas.
        lock: Held during a sync, and while a replica gets its weights.
        away: The number of the replica that is being replaced, which syncs leave out; None if none is.
        on_engine_death: Called with the number of a replica whose engine has died and with the error, though its worker
            lives, if replicas that died are left out.
        has_healed: Notified when replicas were replaced, or could not be.
        n_healed: How often it was notified.
        n_healing: Replacements that have begun and not ended; changed with `has_healed`.
        heals_succeed: Whether the last replacement has succeeded.
    """

    has_source = True

    def __init__(self, target: Any, n_replicas: int, bucket_nbytes: int = BUCKET_NBYTES) -> None:
        self.target, self.n_replicas, self._bucket_nbytes = target, n_replicas, bucket_nbytes
        self.lock = threading.Lock()
        self.away: int | None = None
        self.has_healed = threading.Condition()
        self.n_healed, self.n_healing, self.heals_succeed = 0, 0, True
        self.on_engine_death: Callable[[int, BaseException], None] = lambda replica, error: None

    @contextlib.contextmanager
    def without(self, replica: int) -> Iterator[None]:
        """Leave a replica out of the syncs that begin within the block, which replaces it."""
        with self.lock:
            self.away = replica
        try:
            yield
        finally:
            self.away = None

    @property
    def reachable(self) -> list[int]:
        """The replicas but for the one that is being replaced."""
        return [replica for replica in range(self.n_replicas) if replica != self.away]

    def present(self) -> Held | None:
        """Return the weights that the replicas have; None before the first sync."""
        raise NotImplementedError

    def restore(self, replica: int) -> str:
        """Bring the weights that the others have to a replica that was replaced. The lock is held.

        Returns:
            The place from which they came.

        Raises:
            UsageError: There are none, or none that could be had.
        """
        raise NotImplementedError

    def restore_from_peer(self, replica: int, held: Held, specs: Mapping[str, Spec]) -> str:
        """Bring weights from the first other replica that has them.

        Args:
            replica: The number of the replica that lacks them.
            held: The weights.
            specs: Their tensors.

        Returns:
            The place from which they came; "" if no replica gave them.
        """
        self.sent("takes_weights", replica).result()  # not as an error of its peers
        for peer in self.reachable:
            if peer != replica:
                with contextlib.suppress(RemoteError, WorkerDied):
                    self.give(replica, held, specs, self._rows_of(peer, held.sync, specs))
                    return f"replica {peer}"
        return ""

    def give(self, replica: int, held: Held, specs: Mapping[str, Spec], rows: Rows) -> None:
        """Bring weights to one replica, and wait until it uses them."""
        place = self.sent("weights_place", replica).result()
        self.sent("begin_weights", replica, held.sync, None, specs, place).result()
        address = ""
        for some, pieces in rows:
            address = self.sent("stage_weights", replica, some, pieces, held.sync).result()
        self.sent("use_weights", replica, *held, "keep", address).result()
        self.quietly("confirm_weights", [replica], held.sync)

    def _rows_of(self, peer: int, sync: int, specs: Mapping[str, Spec]) -> Rows:
        """Yield the rows of a replica, and the pieces in them: each tensor whole."""
        for names in in_buckets(specs, self._bucket_nbytes):
            asked = self.target.give_weights.options(replica=peer).map([names], sync, chunk=1)
            yield asked.future, [[(name, whole_box(specs[name])) for name in names]]

    def sent(self, method: str, replica: int, *arguments: Any) -> Any:
        """Send a request to a replica. Returns its future."""
        return getattr(self.target, method).options(replica=replica)(*arguments)

    def ask(
        self, method: str, replicas: Iterable[int], arguments: Callable[[int], tuple[Any, ...]]
    ) -> tuple[Asked, dict[int, BaseException]]:
        """Send a request to replicas, and wait. Returns their values, and the errors of the others."""
        return values_of({r: self.sent(method, r, *arguments(r)) for r in replicas})

    def quietly(self, method: str, replicas: Iterable[int], sync: int) -> None:
        """Send a request to replicas, and log errors: they have others behind them, or do no harm."""
        with contextlib.suppress(Exception):  # the group may be closed
            for replica, error in self.ask(method, replicas, lambda _: (sync,))[1].items():
                LOG.debug("%s of replica %d of %s: %s", method, replica, self.target.name, error)


class PeerWeights(Restores):
    """Gives a replica the weights of the others, whoever has brought them to these, and may do so at the same time."""

    has_source = False
    _is_synced = False  # whether a replica has had weights

    def present(self) -> Held | None:
        """Return the weights that a replica was given last; None before the first sync.

        Raises:
            UsageError: No replica that is left has them.
        """
        last = self._last(self._said())
        return None if last is None else Held(last.sync, last.version)

    def restore(self, replica: int) -> str:
        """Bring the weights that the others have to a replica that was replaced; see `Restores.restore`."""
        for _ in range(N_TRIES):
            said = self._said()
            last, own = self._last(said), said.get(replica)
            if last is None or (own is not None and own.sync == last.sync):
                return "whoever brings them"
            if place := self.restore_from_peer(replica, Held(last.sync, last.version), last.specs):
                return place
        raise UsageError(f"no other replica of {self.target.name} could give its weights; bring new ones to all")

    def level(self) -> None:
        """Bring the weights that were given last to replicas that have others."""
        with self.lock:
            said = self._said()
            last = self._last(said)
            for replica in [
                r for r, one in said.items() if last is not None and (one is None or one.sync != last.sync)
            ]:
                self.restore(replica)

    def _said(self) -> dict[int, HeldWeights | None]:
        """The weights that each replica says it has."""
        return self.ask("held_weights", self.reachable, lambda _: ())[0]

    def _last(self, said: Mapping[int, HeldWeights | None]) -> HeldWeights | None:
        """The weights that came last."""
        found = max(filter(None, said.values()), key=lambda one: one.sync, default=None)
        self._is_synced = self._is_synced or found is not None
        if found is None and self._is_synced:
            raise UsageError(f"no replica of {self.target.name} that is left has weights; bring new ones to all")
        return found


def values_of(asked: Asked) -> tuple[Asked, dict[int, BaseException]]:
    """Wait for futures. Returns their values, and the errors of the others."""
    values: Asked = {}
    errors: dict[int, BaseException] = {}
    for replica, future in asked.items():
        try:
            values[replica] = future.result()
        except Exception as error:
            errors[replica] = error
    return values, errors


def whole_box(spec: Spec) -> Box:
    """The box of a whole tensor."""
    shape, _ = spec
    return Box((0,) * len(shape), tuple(shape))
