"""Weights of replicas that were replaced: they come from the other replicas, from worker to worker, by requests.

::

    PeerWeights    restores a replica of a group whose weights come otherwise than by `WeightSync`
    EngineSync     the same, and brings the weights of a training group to all replicas
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bandmaster import RemoteError, UsageError, WorkerDied
from bandmaster.rl.engine_weights.packing import Piece
from bandmaster.rl.layout import Box, Spec, in_buckets

BUCKET_NBYTES = 64 << 20
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
        lock: Held during a sync, and while a replica is replaced.
        on_engine_death: Called with the number of a replica whose engine has died and with the error, though its worker
            lives, if replicas that died are left out.
        has_healed: Notified when replicas were replaced, or could not be.
        n_healed: How often it was notified.
        heals_succeed: Whether the last replacement has succeeded.
    """

    def __init__(self, target: Any, n_replicas: int, bucket_nbytes: int = BUCKET_NBYTES) -> None:
        self.target, self.n_replicas, self._bucket_nbytes = target, n_replicas, bucket_nbytes
        self.lock = threading.Lock()
        self.has_healed = threading.Condition()
        self.n_healed, self.heals_succeed = 0, True
        self.on_engine_death: Callable[[int, BaseException], None] = lambda replica, error: None

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
        for peer in range(self.n_replicas):
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
    """Gives a replica the weights of the others, whoever has brought them to these."""

    def present(self) -> Held | None:
        """Return the weights that a replica was given last; None before the first sync."""
        found = self._found()
        return None if found is None else Held(found.sync, found.version)

    def restore(self, replica: int) -> str:
        """Bring the weights that the others have to a replica that was replaced; see `Restores.restore`."""
        found = self._found()
        if found is None:
            raise UsageError(f"no replica of {self.target.name} has weights; bring new ones to all of them")
        place = self.restore_from_peer(replica, Held(found.sync, found.version), found.specs)
        if not place:
            raise UsageError(f"no other replica of {self.target.name} could give its weights; bring new ones to all")
        return place

    def level(self) -> None:
        """Bring the weights that were given last to replicas that have others."""
        with self.lock:
            said, _ = self.ask("held_weights", range(self.n_replicas), lambda _: ())
            last = max((one.sync for one in said.values() if one is not None), default=None)
            for replica in [r for r, one in said.items() if (None if one is None else one.sync) != last]:
                self.restore(replica)

    def _found(self) -> Any:
        """The `HeldWeights` of the replicas that have been given weights last."""
        said, _ = self.ask("held_weights", range(self.n_replicas), lambda _: ())
        return max((one for one in said.values() if one is not None), key=lambda one: one.sync, default=None)


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
