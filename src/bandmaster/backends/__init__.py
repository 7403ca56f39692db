"""The registry of backends, and the backends that come with bandmaster.

`get_backend` returns a backend by name, and `register_backend` adds one. `bandmaster.contract` defines what a backend
must provide; `bandmaster.testing.simulated_hosts` is the smallest one whose ranks are on other hosts.
"""

from __future__ import annotations

import contextlib
import select
import sys
import threading
from collections.abc import Callable
from typing import cast

from bandmaster.contract import Backend
from bandmaster.errors import UsageError, hide_library_frames

__all__ = ["get_backend", "register_backend"]

_BUILT_IN = ("local", "inprocess", "ray")
_factories: dict[str, Callable[[], Backend]] = {}
_backends: dict[str, Backend] = {}
_making = threading.RLock()  # one backend at a time; re-entrant, as a factory may ask for another backend


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Register a backend, so that ``ResourcePool([4], backend=name)`` reserves slots on it.

    Args:
        name: Name of the backend, which no other backend may have.
        factory: Returns the backend. It is called once, without arguments, when the first pool asks for the backend.

    Raises:
        UsageError: The name is taken or is not a non-empty string, or the factory is not callable.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"the name of a backend must be a non-empty string, got {name!r}")
    if not callable(factory):
        raise UsageError(
            f"the factory of backend {name!r} must be a function without arguments that returns it, got {factory!r}"
        )
    if name in _BUILT_IN or name in _factories:
        raise UsageError(f"a backend called {name!r} already exists; register this one under another name")
    _factories[name] = factory


def get_backend(name: str) -> Backend:
    """Return the backend called ``name``: the same object on every call and in every thread.

    Raises:
        UsageError: No backend has that name, a package that the backend needs is not installed, or the backend needs
            Linux and this is another system.
    """
    if not isinstance(name, str):
        raise UsageError(f"backend must be the name of a backend, such as 'local', got {name!r}")
    if name not in _backends:
        with _making:
            if name not in _backends:
                _backends[name] = _made(name)
                hide_library_frames()  # of the modules that this has loaded
    return _backends[name]


def _made(name: str) -> Backend:
    with contextlib.suppress(ModuleNotFoundError):  # the room `output` may be removed
        import bandmaster.output.screen  # noqa: F401  # shows the starts that take long
    if name in ("local", "ray") and not hasattr(select, "epoll"):
        raise UsageError(
            f"backend {name!r} needs Linux, where its workers share memory and are waited for, and this system is "
            f"{sys.platform}; use backend='inprocess' here, which runs all ranks in this process"
        )
    if name == "inprocess":
        from bandmaster.backends.inprocess import InProcessBackend

        return InProcessBackend()
    if name == "local":
        from bandmaster.backends.local import LocalBackend

        return LocalBackend()
    if name == "ray":
        try:
            from bandmaster.backends.ray.backend import RayBackend
        except ImportError as error:
            raise UsageError(
                f"backend 'ray' needs Ray, which cannot be imported ({error}): pip install 'bandmaster[ray]'"
            ) from error
        from bandmaster.backends.local import LocalBackend

        return RayBackend(cast(LocalBackend, get_backend("local")))
    if name in _factories:
        return _factories[name]()
    *known, last = map(repr, (*_BUILT_IN, *_factories))
    raise UsageError(f"no backend is called {name!r}; expected {', '.join(known)} or {last}")
