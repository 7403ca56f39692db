"""The rooms of the package: which may import which. Lazy imports and those for type checkers count as well."""

import ast
from pathlib import Path

import pytest

import bandmaster

ROOT = Path(bandmaster.__file__).parent

# Each room may import the rooms behind it, which all come before it.
ROOMS = {
    "host_memory": "",
    "codec": "host_memory",
    "errors": "codec",
    "plan": "errors",
    "worker": "errors plan",
    "contract": "codec errors plan worker",
    "platform": "errors",
    "rows": "codec errors plan contract platform",
    "calls": "codec errors plan worker contract platform rows",
    "flow": "errors plan contract platform rows calls",
    "requests": "codec errors plan contract platform rows calls flow",
    "wire": "codec errors contract platform",
    "debugging": "errors worker platform wire",
    "lifecycle": "codec errors plan worker contract platform calls",
    "output": "errors contract platform lifecycle",
    "hosts": "codec errors plan contract platform rows wire output",
    "roles": "codec plan worker",
    "worker_process": "codec errors plan worker contract platform rows wire roles",
    "answering": "codec errors contract platform wire worker_process",
    "callers": "codec errors plan worker contract platform calls requests wire hosts worker_process answering",
    "backends": "codec errors plan worker contract platform wire debugging output hosts worker_process answering "
    "callers",
    "pool": "errors plan worker contract platform backends",
    "tracing": "codec errors plan contract calls",
    "turns": "errors plan platform calls lifecycle",
    "watching": "errors contract platform calls lifecycle turns",
    "groups": "codec errors plan worker contract platform rows calls flow requests roles callers backends lifecycle "
    "pool tracing turns watching",
    "registration": "errors plan worker calls requests groups",
    "__init__": "errors plan worker platform calls flow requests pool tracing watching groups registration",
    "timeline": "errors __init__",
    "telemetry": "timeline __init__",
    "rl": "host_memory plan __init__",
    "compat": "errors rl __init__",
    "serve": "rl __init__",
    "single_controller": "codec errors plan worker contract platform calls wire debugging output hosts roles "
    "worker_process backends lifecycle pool turns groups",
    "testing": "codec errors plan worker contract platform calls hosts worker_process backends pool groups "
    "registration",
    "cli": "errors plan worker contract platform wire debugging backends lifecycle pool watching groups registration "
    "__init__ testing",
    "__main__": "cli",
}

# The rooms that a plain call passes, with what they are written in. They import no feature.
PATH = [
    "errors",
    "plan",
    "host_memory",
    "codec",
    "worker",
    "roles",
    "contract",
    "wire",
    "worker_process",
    "rows",
    "calls",
    "groups",
]
PATH += ["registration", "__init__"]
PLACES = ["platform", "backends", "hosts", "lifecycle", "pool"]
FEATURES = ["flow", "requests", "answering", "callers", "turns", "tracing", "watching", "output", "debugging"]
BESIDE = ["cli", "__main__", "testing", "single_controller", "compat", "rl", "serve", "timeline", "telemetry"]


def imports_of(what):
    for node in ast.walk(ast.parse(what.read_text()) if isinstance(what, Path) else what):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"a relative import of {node.module}"
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


def imports_as_it_is_loaded(path):
    """The names that a module imports when it is imported itself, and not later or for type checkers alone."""
    body = [node for node in ast.parse(path.read_text()).body if "TYPE_CHECKING" not in ast.unparse(node)[:20]]
    body = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom | ast.If | ast.Try | ast.With)]
    return imports_of(ast.Module(body, []))


def test_the_path_imports_no_feature():
    """The methods of groups that are a feature's own, such as `turn`, import it when they are called."""
    assert sorted([*PATH, *PLACES, *FEATURES, *BESIDE]) == sorted(ROOMS)
    found = set()
    for path in GRAPH:
        modules = [module for name in imports_as_it_is_loaded(path) if (module := module_of(name))]
        found |= {(room_of(path), room_of(module)) for module in modules}
    assert {(room, other) for room, other in found if room in PATH and other in FEATURES} == set()


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
    named = {
        path
        for path in ROOT.rglob("*.py")
        for name in imports_of(ast.parse(path.read_text()))
        if name.split(".")[0] == "ray"
    }
    outside = {path.relative_to(ROOT).as_posix() for path in named if "ray" not in path.relative_to(ROOT).as_posix()}
    assert outside == {"compat/verl.py", "compat/verl_rollout.py"}, "verl itself runs on Ray"
