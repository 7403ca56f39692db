"""The rooms of the package: which may import which. Lazy imports and those for type checkers count as well."""

import ast
from pathlib import Path

import pytest

import bandmaster

ROOT = Path(bandmaster.__file__).parent

# Each room may import the rooms behind it, which all come before it.
ROOMS = {
    "failure": "",
    "errors": "failure",
    "platform": "errors",
    "plan": "errors failure",
    "codec": "",
    "worker": "errors plan",
    "roles": "plan codec worker",
    "contract": "errors failure plan codec worker",
    "transport": "errors failure platform codec contract",
    "worker_process": "errors failure platform plan codec worker roles contract transport",
    "backends": "errors failure platform plan codec worker contract transport worker_process",
    "calls": "errors failure platform plan codec worker contract",
    "lifecycle": "errors failure platform plan codec worker contract calls",
    "pool": "errors platform plan worker contract backends",
    "group": "errors platform plan worker contract backends calls lifecycle pool",
    "registration": "errors plan worker calls group",
    "colocation": "errors plan worker contract calls lifecycle roles pool group",
    "closing": "lifecycle pool",
    "__init__": "errors platform plan worker calls pool group registration colocation closing",
    "rl": "plan __init__",
    "single_controller": "errors failure platform plan codec worker roles contract transport worker_process backends "
    "calls lifecycle pool group",
    "compat": "errors",
    "testing": "errors platform plan codec worker contract transport backends pool group registration",
    "cli": "errors failure platform plan worker transport worker_process backends lifecycle pool group registration "
    "__init__",
    "__main__": "cli",
}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_of(name):
    """The file of the module that an imported name is, or comes from; None if it is not in this package."""
    parts = name.split(".")
    if parts[0] != "bandmaster":
        return None
    for n in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[1:n])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise AssertionError(f"{name} is not in the package")


def room_of(path):
    first, *rest = path.relative_to(ROOT).parts
    return first if rest else path.stem


GRAPH = {path: {module for name in imports_of(path) if (module := module_of(name))} for path in ROOT.rglob("*.py")}


@pytest.mark.parametrize("room", sorted({room_of(path) for path in GRAPH}))
def test_a_room_imports_those_below_it_alone(room):
    above = [name for name in ROOMS[room].split() if list(ROOMS).index(name) >= list(ROOMS).index(room)]
    assert not above, f"the table has {room} import what comes after it"
    for path, imported in GRAPH.items():
        if room_of(path) == room:
            found = {room_of(module) for module in imported} - {room}
            wrong = found.difference(ROOMS[room].split())
            assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_no_module_imports_itself_by_way_of_others():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join(str(p.relative_to(ROOT)) for p in [*path[path.index(module) :], module])
        if module not in done:
            path.append(module)
            for imported in GRAPH[module] - {module}:
                visit(imported)
            path.pop()
            done.add(module)

    for module in GRAPH:
        visit(module)


def test_only_modules_called_ray_import_ray():
    named = {path for path in ROOT.rglob("*.py") for name in imports_of(path) if name.split(".")[0] == "ray"}
    outside = {path.relative_to(ROOT).as_posix() for path in named if "ray" not in path.relative_to(ROOT).as_posix()}
    assert outside == {"compat/verl.py"}, "verl itself runs on Ray, and its workers on every node have to be switched"
