"""Workers of a group that was attached to actors which another group has started, perhaps in another process."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from bandmaster.backends.ray_actor import FIRST_NUMBER
from bandmaster.backends.ray_workers import RayWorkers
from bandmaster.contract import Launch
from bandmaster.errors import UsageError

__all__ = ["AttachedWorkers"]


class AttachedWorkers(RayWorkers):
    """Actors that are called by actor tasks alone, between the calls of those who started them, and never ended.

    Args:
        launch: What to call the group and its ranks.
        actors: The actor handle of each rank.

    Raises:
        UsageError: An actor is no worker of bandmaster.
        WorkerDied: An actor has ended.
    """

    def __init__(self, launch: Launch, actors: Sequence[Any]) -> None:
        for actor in actors:
            if not hasattr(actor, "bandmaster_info"):
                raise UsageError(
                    f"{actor!r} is no worker of a bandmaster group, so that no group can be attached to it"
                )
        self._first_number = FIRST_NUMBER + secrets.randbits(40) * (1 << 20)  # of those who have attached to them
        super().__init__(launch, lambda _, rank: actors[rank])

    def _begin(self, ranks: Sequence[int]) -> None:
        self._is_left = True
        self._infos.update(self._begun(ranks))

    def _ask_to_begin(self, rank: int) -> Any:
        return self.actors[rank].bandmaster_info.remote()

    def _submit(self, actor: Any, *arguments: Any) -> Any:
        return actor.bandmaster_call_of_others.remote(*arguments)
