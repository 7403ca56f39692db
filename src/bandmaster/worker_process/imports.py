"""Imports modules in a worker, and says what to do about those that cannot be imported there."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterable, Iterator


def preload(names: Iterable[str]) -> None:
    """Import modules, in order.

    Raises:
        ImportError: One of them could not be imported, whatever it has raised.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise ImportError(
                f"cannot import {name!r}, which preload= of the ResourcePool names, on {os.uname().nodename}: "
                f"{type(error).__name__}: {error}; install it there, or leave it out",
                name=name,
            ) from error


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While the worker class and the arguments of its constructor are loaded: explain why a module is not found.

    Raises:
        ModuleNotFoundError: The module is not there; with what to do about it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}: the worker class or an argument of its constructor needs this module, which the worker on "
            f"{os.uname().nodename} (working directory {os.getcwd()}) cannot import, although the controller can; "
            "install it on that host; or put it into a folder that both hosts have, at the same path, and that is in "
            "the controller's sys.path; or have Ray copy it: ray.init(runtime_env={'working_dir': '.'}) before the "
            "pool is made; see docs/start-up.md",
            name=error.name,
            path=error.path,
        ) from error
