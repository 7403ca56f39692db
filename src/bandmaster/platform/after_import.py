"""Calls a function once a module has been imported, by whoever imports it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any


class AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported: at once if that has happened already.

    Args:
        module: Full name of the module.
        function: Called without arguments, in the thread that imports the module.
    """

    def __init__(self, module: str, function: Callable[[], object]) -> None:
        self._module, self._function = module, function
        if module in sys.modules:
            function()
        else:
            sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Do not call the function any more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of the module, with a loader that calls the function; None for other modules."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThenCall(spec.loader, self._function)
        return spec


class _LoaderThenCall(Loader):
    def __init__(self, loader: Loader, function: Callable[[], object]) -> None:
        self._loader, self._function = loader, function

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._function()
