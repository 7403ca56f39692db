"""Reads the verl that a program imports, which may be a fork: its version, and what its own worker classes add.

A fork's ``verl/single_controller`` is not imported, because bandmaster's takes its place. What the fork has added to
the worker classes there would be missing; `take_over` finds it in the fork's source and adds it to bandmaster's.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["WORKER_MODULES", "Installed", "has_no_context_parallelism", "installed", "take_over"]

WORKER_MODULES = {".base.worker": "Worker", ".base.megatron.worker": "MegatronWorker"}  # under verl.single_controller

# Names of verl's own worker classes that have another form here: attributes that the group sets, and steps by which
# verl's own controller sets up a worker.
REPLACED = {
    "rank",
    "world_size",
    "_configure_before_init",
    "_configure_with_meta",
    "_configure_with_store",
    "_setup_env_cuda_visible_devices",
    "_get_pid",
}


class Installed(NamedTuple):
    """The verl that ``import verl`` finds.

    Attributes:
        version: Its version; None if it has none.
        folder: The folder of its package.
    """

    version: str | None
    folder: Path


def installed() -> Installed | None:
    """The verl that ``import verl`` finds, which is not imported; None if there is none."""
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)  # an editable package has its own
    found = (find_spec("verl", None) for find_spec in finders if find_spec is not None)
    spec = next(filter(None, found), None)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Installed(version_of(Path(folders[0])), Path(folders[0])) if folders else None


def version_of(folder: Path) -> str | None:
    """The version of verl in a folder: by its file ``version/version``, its ``__version__``, or its distribution."""
    recorded = folder / "version" / "version"
    if recorded.is_file():
        return recorded.read_text().strip()
    source = folder / "__init__.py"
    text = source.read_text() if source.is_file() else ""
    written = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, re.M)
    if written is not None:
        return written[1]
    try:
        distribution = importlib.metadata.distribution("verl")
    except importlib.metadata.PackageNotFoundError:
        return None
    is_this_one = Path(str(distribution.locate_file("verl"))).resolve() == folder.resolve()
    return distribution.version if is_this_one else None


def take_over(ours: ModuleType, name: str, folder: Path) -> list[str]:
    """Add to bandmaster's worker class what the fork's class of the same name has beyond it.

    The fork's module is executed, under another name, only if there is something to add.

    Args:
        ours: bandmaster's module, such as ``bandmaster.single_controller.base.worker``.
        name: Its name in `WORKER_MODULES`.
        folder: The folder of the fork's package ``verl``.

    Returns:
        A line for each name that was added or cannot be.
    """
    path = folder.joinpath("single_controller", *name.strip(".").split(".")).with_suffix(".py")
    our_class = getattr(ours, WORKER_MODULES[name])
    known = _members_in(path, our_class.__name__)
    missing = [each for each, has_value in known.items() if has_value and _is_missing(our_class, each)]
    if not missing:
        return []
    try:
        theirs = getattr(_executed(path, name), our_class.__name__)
        members = {each: inspect.getattr_static(theirs, each) for each in missing if hasattr(theirs, each)}
    except Exception as error:  # the module needs something that is not installed, or that bandmaster does not have
        return [f"{our_class.__name__}.{each} not, because of {type(error).__name__}: {error}" for each in missing]
    return [_added(our_class, each, member) for each, member in members.items()]


def has_no_context_parallelism(folder: Path) -> bool:
    """Whether the verl in a folder is one whose Megatron workers have no rank of context parallelism, before 0.4."""
    path = folder / "single_controller" / "base" / "worker.py"
    fields = _members_in(path, "DistRankInfo")
    return "pp_rank" in fields and "cp_rank" not in fields


def _is_missing(cls: type, name: str) -> bool:
    return not (name.startswith("__") or name in REPLACED or hasattr(cls, name))


def _members_in(path: Path, class_name: str) -> dict[str, bool]:
    """The members of a class in a file of source, each with whether it has a value or is only annotated.

    Members of its base classes in the same file are among them; private names have the name of their class in front.
    """
    body = ast.parse(path.read_text()).body if path.is_file() else []
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    found: dict[str, bool] = {}
    names = [class_name]
    for name in names:
        if node := classes.pop(name, None):
            names += [base.id for base in node.bases if isinstance(base, ast.Name)]
            for each, has_value in _bound_in(node):
                is_private = each.startswith("__") and not each.endswith("__")
                found.setdefault(f"_{name.lstrip('_')}{each}" if is_private else each, has_value)
    return found


def _bound_in(node: ast.AST, has_value: bool = True) -> Iterator[tuple[str, bool]]:
    """The names that the body of a class binds, also under ``if`` and ``try``, each with whether it has a value."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, True
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, has_value
        elif not isinstance(child, ast.comprehension):  # its names are its own
            yield from _bound_in(child, not isinstance(child, ast.AnnAssign) or child.value is not None)


def _executed(path: Path, name: str) -> ModuleType:
    """The fork's module, whose imports of ``verl.single_controller``, relative ones too, are bandmaster's."""
    package = "verl.single_controller" + name.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(f"{package}._of_the_fork", path)
    assert spec is not None and spec.loader is not None, "the file is there and is Python source"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _added(cls: type, name: str, member: Any) -> str:
    """Add a member to a class. Returns the line that says so, or why it was not added."""
    if "__class__" in _free_variables(member):
        return f"{cls.__name__}.{name} not, because it calls super()"
    setattr(cls, name, member)
    return f"{cls.__name__}.{name}"


def _free_variables(member: Any) -> tuple[str, ...]:
    function = getattr(member, "__func__", getattr(member, "fget", member))
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    return code.co_freevars if code is not None else ()
