"""Modules that are imported when a test first uses them: each process collects all tests, but runs a part of them."""

import importlib


class Later:
    """Stands for a module, in files whose tests alone use one that takes seconds of processor time to import.

    Args:
        name: Its name.
    """

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith(("_", "pytest")):  # which pickle and pytest look for in anything
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
