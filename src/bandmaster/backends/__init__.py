"""Where workers run: the registry of backends, and the backends that come with bandmaster.

`get_backend` finds a backend by its name, and `register_backend` adds one. `bandmaster.contract` says what a backend
is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bandmaster.contract import Backend
from bandmaster.errors import UsageError

__all__ = ["get_backend", "register_backend"]

_BUILT_IN = ("local", "inprocess", "ray")
_factories: dict[str, Callable[[], Backend]] = {}
_backends: dict[str, Backend] = {}
_making = threading.RLock()  # one backend at a time; a factory may ask for another one


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Make a backend known: ``ResourcePool([4], backend=name)`` takes places on it from here on.

    Args:
        name: One that no backend has.
        factory: Makes the backend: called once, without arguments, when the first pool asks for it.

    Raises:
        UsageError: The name is taken or is no text, or the factory cannot be called.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a backend's name is a text, not {name!r}")
    if not callable(factory):
        raise UsageError(f"backend {name!r} takes a function without arguments that makes it, not {factory!r}")
    if name in _BUILT_IN or name in _factories:
        raise UsageError(f"there is a backend called {name!r} already; register this one under another name")
    _factories[name] = factory


def get_backend(name: str) -> Backend:
    """The backend called ``name``, the same object every time and in every thread.

    Raises:
        UsageError: There is none of that name, or what it needs is not installed.
    """
    if not isinstance(name, str):
        raise UsageError(f"backend= takes the name of one, such as 'local', not {name!r}")
    if name not in _backends:
        with _making:
            if name not in _backends:
                _backends[name] = _made(name)
    return _backends[name]


def _made(name: str) -> Backend:
    if name == "inprocess":
        from bandmaster.backends.inprocess import InProcessBackend

        return InProcessBackend()
    if name == "local":
        from bandmaster.backends.local import LocalBackend

        return LocalBackend()
    if name == "ray":
        try:
            from bandmaster.backends.ray import RayBackend
        except ImportError as error:
            raise UsageError(f"backend 'ray' needs Ray ({error}): pip install 'bandmaster[ray]'") from error
        return RayBackend()
    if name in _factories:
        return _factories[name]()
    *known, last = map(repr, (*_BUILT_IN, *_factories))
    raise UsageError(f"no backend is called {name!r}; there are {', '.join(known)} and {last}")
