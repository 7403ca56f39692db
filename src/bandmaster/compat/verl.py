"""Puts `bandmaster.single_controller` in place of ``verl.single_controller``.

One line before the first import of verl's single controller::

    import bandmaster.compat.verl

or, for a command whose code you cannot change::

    python -m bandmaster.compat.verl -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 ...

Both apply to this process and to every Ray worker of the jobs that it starts with ``ray.init``.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from bandmaster.compat.fork import WORKER_MODULES, has_no_context_parallelism, installed, take_over, version_of
from bandmaster.errors import UsageError

__all__ = ["install"]

THEIRS, OURS = "verl.single_controller", "bandmaster.single_controller"
TRIED = ("0.9.1",)  # versions of verl whose trainers have run on bandmaster
HOOK = "bandmaster.compat.verl.install"
IN_A_WORKER = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"  # Ray sets it in processes that run the hook


class _Finder:
    """An import finder that returns bandmaster's module for the name of verl's; one module has both names."""

    def __init__(self) -> None:
        self.said: Path | None = (
            None  # the folder of the verl whose version was reported; None in a process that is quiet
        )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_theirs = name == THEIRS or name.startswith(THEIRS + ".")
        return ModuleSpec(name, self, is_package=True) if is_theirs else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        ours = OURS + spec.name.removeprefix(THEIRS)
        try:
            module = importlib.import_module(ours)
        except ModuleNotFoundError as error:
            if error.name != ours:
                raise
            raise ModuleNotFoundError(
                f"{spec.name} has no counterpart in {OURS}; the page about verl in bandmaster's documentation lists "
                "the modules and names that it has",
                name=spec.name,
            ) from None
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "the import system has set it"
        name = module.__spec__.name.removeprefix(THEIRS)
        module.__spec__ = module.__spec__.loader_state  # messages and pickles use bandmaster's name
        if not name:
            folder = Path(next(iter(sys.modules["verl"].__path__)))  # the parent package, which is imported by now
            self._check(folder)
            self._adapt(folder)

    def _check(self, folder: Path) -> None:
        """Report the verl that the program has imported, if it is not the one that was reported."""
        if self.said is not None and self.said.resolve() != folder.resolve():
            self.said = folder
            _say(f"the program imports {_described(version_of(folder), folder)}")

    def _adapt(self, folder: Path) -> None:
        """Take over what the fork has added to its worker classes, and its meaning of a mode that has changed."""
        added = [
            line for name in WORKER_MODULES for line in take_over(importlib.import_module(OURS + name), name, folder)
        ]
        if added and self.said is not None:
            _say(f"taken over from {folder}: {', '.join(added)}")
        if has_no_context_parallelism(folder):
            importlib.import_module(OURS + ".base.decorator").let_stages_share_rows()


def install(says_so: bool = False) -> None:
    """Put bandmaster in place of verl's single controller, from now on, here and in the Ray workers of this job.

    Calling it again does nothing.

    Args:
        says_so: Whether to report the replacement on standard error.

    Raises:
        UsageError: verl's own single controller was imported before, or Ray was started before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if THEIRS in sys.modules:
        raise UsageError(f"{THEIRS} was imported before bandmaster.compat.verl; import bandmaster.compat.verl first")
    import ray  # verl needs it as well

    if ray.is_initialized() and IN_A_WORKER not in os.environ:
        raise UsageError("Ray was started before bandmaster.compat.verl was imported; import it before ray.init()")
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    ray.init = _with_hook(ray.init)
    if says_so:
        found = installed()
        finder.said = Path() if found is None else found.folder
        _say(f"{THEIRS} is {OURS}, here and in the Ray workers of this process{_caveat()}")


def _say(what: str) -> None:
    print(f"bandmaster: {what}", file=sys.stderr)


def _caveat() -> str:
    found = installed()
    return "; no verl is on the path" if found is None else f"; this is {_described(*found)}"


def _described(version: str | None, folder: Path) -> str:
    """The version and place of a verl, and a caveat if it is none of `TRIED`."""
    if version in TRIED:
        return f"verl {version} of {folder}"
    number = "a verl without a version" if version is None else f"verl {version}"
    return f"{number} of {folder}; those that have been tried are {', '.join(TRIED)}"


def _with_hook(init: Any) -> Any:
    @functools.wraps(init)
    def init_with_hook(*args: Any, **kwargs: Any) -> Any:
        runtime_env = dict(kwargs.get("runtime_env") or {})
        hook = runtime_env.setdefault("worker_process_setup_hook", HOOK)
        if hook != HOOK:
            raise UsageError(
                f"runtime_env has a worker_process_setup_hook ({hook!r}), where bandmaster.compat.verl puts its own; "
                "call bandmaster.compat.verl.install() in that hook and pass no other"
            )
        return init(*args, **{**kwargs, "runtime_env": runtime_env})

    return init_with_hook


def _run(arguments: Sequence[str]) -> None:
    """Run a module (``-m name``) or a script with the remaining arguments, like the ``python`` command."""
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2):
        sys.exit("usage: python -m bandmaster.compat.verl (-m module | script.py) [arguments]")
    is_module = arguments[0] == "-m"
    target, rest = (arguments[1], arguments[2:]) if is_module else (arguments[0], arguments[1:])
    sys.argv = [target, *rest]
    if not is_module:
        sys.path[0] = os.path.dirname(os.path.abspath(target))
    importlib.import_module("bandmaster.compat.verl").install(says_so=True)
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    _run(sys.argv[1:])
else:
    install(says_so=IN_A_WORKER not in os.environ)
