"""`ActorLaunch` and `ActorRequest`: a launch and a request with the additions that Ray actors need. Imports no Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bandmaster.contract import Launch
from bandmaster.plan.placement import Request
from bandmaster.worker import Worker

__all__ = ["ACTORS", "ActorLaunch", "ActorRequest"]

ACTORS = "ray-actors"  # the backend of pools whose slots are bundles of placement groups that others can use


@dataclass(frozen=True)
class ActorLaunch(Launch):
    """The launch of a group whose workers are Ray actors.

    Attributes:
        worker_class: The worker class, of which the actors' own class has the public methods.
        uses_gpu: Whether every slot has a GPU.
        bundle: The resources of a slot, by name.
        is_detached: Whether the actors outlive their controller. Otherwise they end with the group, or with the last
            of their handles if the user has any.
        is_again: Whether actors of the same names may have ended just before.
    """

    worker_class: type = Worker
    uses_gpu: bool = False
    bundle: dict[str, float] = field(default_factory=dict)
    is_detached: bool = False
    is_again: bool = False

    @classmethod
    def of(cls, launch: Launch, **more: Any) -> ActorLaunch:
        """Make an `ActorLaunch` of a launch and the values of its additional fields."""
        return cls(**vars(launch), **more)


@dataclass(frozen=True)
class ActorRequest(Request):
    """The slots of a `RayResourcePool`.

    Attributes:
        is_detached: Whether the placement groups stay when the pool is closed or its process ends.
    """

    is_detached: bool = False
