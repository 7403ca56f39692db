"""Calls a function once a module has been imported, by whoever imports it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
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
        """The spec of the module, whose loader calls the function; None for other modules."""
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_then_call(module: ModuleType) -> None:
                run(module)
                self._function()

            spec.loader.exec_module = run_then_call  # type: ignore[method-assign]  # of this one loader
        return spec
