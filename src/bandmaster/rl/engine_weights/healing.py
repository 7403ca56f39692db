"""`Healing`: replaces replicas of an engine that have died, and gives them the weights that the others have.

A thread of its own does that for each death: the thread in which callbacks of deaths run has other work, without which
no rows would come from the peers.
"""

from __future__ import annotations

import logging
import threading
import time

from bandmaster import BandmasterError, ClosedError, UsageError, WorkerDied
from bandmaster.rl.engine_weights.sync import EngineSync
from bandmaster.rl.engine_weights.target import AwaitWeights

LOG = logging.getLogger("bandmaster.rl")
N_TRIES = 3


class Healing:
    """Watches a group of engines, and replaces replicas that die.

    Args:
        sync: Brings the weights.
    """

    def __init__(self, sync: EngineSync) -> None:
        self._sync, self._group = sync, sync.target
        self._is_whole = threading.Event()
        self._is_whole.set()
        self._error: BaseException | None = None
        self._group.on_death(self._begin)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no replica is being replaced. Returns False if the time is over before.

        Raises:
            BandmasterError: A replica could not be replaced.
        """
        is_whole = self._is_whole.wait(timeout)
        if is_whole and self._error is not None:
            raise self._error
        return is_whole

    def _begin(self, death: WorkerDied) -> None:
        self._is_whole.clear()
        threading.Thread(target=self._heal, args=(death,), name="bandmaster-healing", daemon=True).start()

    def _heal(self, death: WorkerDied) -> None:
        begun = time.monotonic()
        try:
            with self._sync.lock:
                told = self._replace(death)
        except ClosedError:
            return
        except BandmasterError as error:
            self._error = error
            LOG.error("%s of %s has died, and could not be replaced: %s", _ranks(death), self._group.name, error)
        else:
            self._error = None
            LOG.warning(
                "%s of %s has died and was replaced in %.1f s%s: %s",
                _ranks(death),
                self._group.name,
                time.monotonic() - begun,
                told,
                death.failures[death.rank].summary,
            )
        finally:
            self._is_whole.set()

    def _replace(self, death: WorkerDied) -> str:
        """Replace what has died. Returns which weights it has, for the log."""
        held = self._sync.held
        state = None if held is None else AwaitWeights(held.version)
        spans_ranks = self._group.world_size > self._sync.n_replicas
        for n_left in reversed(range(N_TRIES)):
            try:
                if spans_ranks or n_left == 0:  # the ranks of a replica have one process group for good
                    self._group.restart(state)
                    replicas = list(range(self._sync.n_replicas))
                else:
                    self._group.replace(death.rank, state)
                    replicas = [death.rank]
                froms = [] if held is None else [self._sync.restore(replica) for replica in replicas]
            except ClosedError:
                raise
            except (WorkerDied, UsageError):  # another replica has died meanwhile, or the new one
                if n_left == 0:
                    raise
            else:
                return "" if held is None else f", with version {held.version} of the weights from {froms[0]}"
        raise AssertionError("the last try returns or raises")


def _ranks(death: WorkerDied) -> str:
    ranks = sorted(death.failures)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
