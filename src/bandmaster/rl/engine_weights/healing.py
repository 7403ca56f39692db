"""`Healing`: replaces replicas of an engine that have died, and gives them the weights that the others have.

A thread of its own does that for each death: the thread in which callbacks of deaths run has other work, without which
no rows would come from the peers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence

from bandmaster import ClosedError, RemoteError, UsageError, WorkerDied
from bandmaster.rl.engine_weights.peers import Restores
from bandmaster.rl.engine_weights.target import Asleep, AwaitWeights

LOG = logging.getLogger("bandmaster.rl")
N_TRIES = 3
LOOK_S = 0.1  # polling interval for a death whose replacement has not begun, or a replica that is asleep


class Healing:
    """Watches a group of engines, and replaces replicas that die.

    Args:
        sync: Brings the weights.
    """

    def __init__(self, sync: Restores) -> None:
        self._sync, self._group = sync, sync.target
        self._error: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        self._group.on_death(lambda death: self._begin(sorted(death.failures), death.failures[death.rank].summary))
        sync.on_engine_death = lambda replica, error: self._begin([replica], str(error.__cause__))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no replica is being replaced, or known to have died. Returns False if the time is over before.

        Raises:
            BandmasterError: A replica could not be replaced.
        """
        begun = time.monotonic()
        while self._awaits_replacement() or self._sync.n_healing:
            left_s = LOOK_S if timeout is None else min(LOOK_S, begun + timeout - time.monotonic())
            if left_s <= 0:
                return False
            with self._sync.has_healed:
                self._sync.has_healed.wait(left_s)
        if self._error is not None:
            raise self._error
        return True

    def _awaits_replacement(self) -> bool:
        """Whether a rank is known to have died, which is replaced as soon as the callbacks of its death run."""
        with contextlib.suppress(ClosedError):
            return self._error is None and not self._group.healthy and bool(self._group.workers)
        return False

    def _begin(self, ranks: Sequence[int], why: str) -> None:
        with self._sync.has_healed:
            self._sync.n_healing += 1
            self._sync.has_healed.notify_all()
        threading.Thread(target=self._heal, args=(ranks, why), name="bandmaster-healing", daemon=True).start()

    def _heal(self, ranks: Sequence[int], why: str) -> None:
        begun = time.monotonic()
        which = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self._group.name} died"
        try:
            with self._one_at_a_time:
                told = self._replace(ranks[0])
        except ClosedError:
            return
        except Exception as error:
            self._error = error
            LOG.error("%s, and could not be replaced: %s", which, error)
        else:
            self._error = None
            LOG.warning("%s, and was replaced in %.1f s%s: %s", which, time.monotonic() - begun, told, why)
        finally:
            with self._sync.has_healed:
                self._sync.n_healing -= 1
                self._sync.n_healed += 1
                self._sync.heals_succeed = self._error is None
                self._sync.has_healed.notify_all()

    def _replace(self, rank: int) -> str:
        """Replace what has died. Returns which weights it has, for the log."""
        sync, group = self._sync, self._group
        with sync.lock:
            held = sync.present()
        state = None if held is None else AwaitWeights(held.version)
        for n_left in reversed(range(N_TRIES)):
            try:
                # the ranks of a replica have one process group for good; and a restart takes the weights of the peers
                if group.world_size > sync.n_replicas or (n_left == 0 and sync.has_source):
                    with sync.lock:
                        group.restart(state)
                    return self._restored(range(sync.n_replicas))
                with sync.without(rank):  # other replicas get new weights meanwhile
                    group.replace(rank, state)
                return self._restored([rank])
            except ClosedError:
                raise
            except (WorkerDied, UsageError):  # another replica has died meanwhile, or the new one
                if n_left == 0:
                    raise
        raise AssertionError("the last try returns or raises")

    def _restored(self, replicas: Sequence[int]) -> str:
        """Bring the last weights to replicas, once they are awake. Returns which these are, for the log."""
        while True:
            try:
                with self._sync.lock:
                    held = self._sync.present()
                    places = [] if held is None else [self._sync.restore(replica) for replica in replicas]
                return "" if held is None else f", with version {held.version} of the weights from {places[0]}"
            except RemoteError as error:
                if not isinstance(error.__cause__, Asleep):
                    raise
            time.sleep(LOOK_S)  # a trainer has the device
