"""Connects a worker to the cluster of its controller when the worker uses Ray. This module imports no Ray itself."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from typing import Any

from bandmaster.platform.after_import import AfterImport

__all__ = ["connect_when_used"]


def connect_when_used() -> None:
    """Have Ray, once it is imported here, connect as a part of the controller's program.

    Ray connects a process that has not called `ray.init` when it uses Ray first: to the cluster that ``RAY_ADDRESS``
    names. The namespace, in which named actors are found, and the ``runtime_env`` of tasks and actors would be those of
    another program; ``BANDMASTER_RAY`` has those of the controller. Reads nothing if that is not set.
    """
    said = os.environ.get("BANDMASTER_RAY")
    if said is not None:
        AfterImport("ray", functools.partial(_set_defaults, json.loads(said)))


def _set_defaults(said: dict[str, Any]) -> None:
    ray = sys.modules["ray"]
    connect = ray.init
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}  # the controller shows what tasks write

    @functools.wraps(connect)
    def init(address: str | None = None, **options: Any) -> Any:
        defaults = {**said, **quiet} if address in (None, "auto", os.environ.get("RAY_ADDRESS")) else {}
        return connect(address, **{**defaults, **options})

    ray.init = init  # type: ignore[attr-defined]  # `ray` itself calls it when it is used first
