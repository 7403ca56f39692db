"""Connects a worker to the cluster of its controller when the worker uses Ray. This module imports no Ray itself."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import sys
from typing import Any

from bandmaster.codec import add_reducer
from bandmaster.platform.after_import import AfterImport
from bandmaster.platform.settings import controllers_ray

SETUP_HOOK = "worker_process_setup_hook"  # of a ``runtime_env``: the name of a function that each worker calls first

_COLLECTIVE = "ray.util.collective.collective"


def connect_when_used() -> None:
    """Have Ray, once it is imported here, connect as a part of the controller's program.

    Ray connects a process that has not called `ray.init` when it uses Ray first: to the cluster that ``RAY_ADDRESS``
    names. The namespace, in which named actors are found, and the ``runtime_env`` of tasks and actors would be those of
    another program; ``BANDMASTER_RAY`` has those of the controller. If it is not set, this does nothing.
    """
    said = controllers_ray()
    if said is not None:
        defaults = json.loads(said)
        hook = defaults.pop("hook")
        AfterImport("ray", functools.partial(_set_defaults, defaults))
        AfterImport(_COLLECTIVE, _allow_collectives)
        if hook is not None:
            module, _, function = hook.rpartition(".")
            getattr(importlib.import_module(module), function)()


def is_name(hook: Any) -> bool:
    """Whether a hook is the full name of a function, rather than a function that Ray has stored."""
    return isinstance(hook, str) and "." in hook and all(part.isidentifier() for part in hook.split("."))


def _set_defaults(said: dict[str, Any]) -> None:
    ray = sys.modules["ray"]
    connect = ray.init
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}  # the controller shows what tasks write

    @functools.wraps(connect)
    def init(address: str | None = None, **options: Any) -> Any:
        defaults = {**said, **quiet} if address in (None, "auto", os.environ.get("RAY_ADDRESS")) else {}
        return connect(address, **{**defaults, **options})

    ray.init = init  # type: ignore[attr-defined]  # `ray` itself calls it when it is used first
    teach_codec()


def _allow_collectives() -> None:
    """Have Ray's collectives take this process for an actor, outside of which they refuse to work."""
    sys.modules[_COLLECTIVE]._check_inside_actor = _connected  # type: ignore[attr-defined]


def _connected() -> Any:
    """Ray, to which this process is connected now."""
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init()
    return ray


def teach_codec() -> None:
    """Have ObjectRefs and actor handles in arguments and results keep what other processes need to use them."""
    ray = sys.modules["ray"]
    for kind in (ray.ObjectRef, ray.actor.ActorHandle):
        add_reducer(kind, _reduce)


def _reduce(value: Any) -> tuple[object, ...]:
    return _revived, (sys.modules["ray"].cloudpickle.dumps(value),)


def _revived(pickled: bytes) -> Any:
    return _connected().cloudpickle.loads(pickled)
