"""The names of verl's single controller that a client uses, read from its source.

    python tests/verl/clients/names.py FOLDER [FOLDER ...]

Prints, for the sources in the folders together, the rows of `matrix.json` that they use, those of them that bandmaster
lacks, and the members of the client's own single controller that its other code uses though no row has them. Nothing of
the client is imported.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MATRIX = Path(__file__).parent / "matrix.json"
GROUPS = ("RayWorkerGroup", "NVMegatronRayWorkerGroup", "ray_worker_group_cls")  # all are called as RayWorkerGroup


class Use(NamedTuple):
    """What a client uses.

    Attributes:
        kind: ``import``, ``mode``, ``member``, ``keyword``, ``environment`` or ``actor``.
        name: ``module:name``, ``Class.name``, ``callable(keyword=)``, or the name of a variable or an actor.
    """

    kind: str
    name: str


def uses(folders, rows):
    """The rows of the matrix that the sources in the folders use, as a set of `Use`."""
    members = {}
    for row in rows:
        if row["kind"] == "member":
            members.setdefault(row["name"].rpartition(".")[2], []).append((row["name"], re.compile(row["on"])))
    known = {Use(row["kind"], row["name"]) for row in rows}
    return {use for _, tree in _sources(folders) for node in ast.walk(tree) for use in _in(node, members)} & known


def imports(folders):
    """All ``module:name`` that the sources import from the single controller, those that no row has too."""
    return {use.name for _, tree in _sources(folders) for node in ast.walk(tree) for use in _imported(node)}


def unknown(folders, rows):
    """Members of the client's own single controller that no row has, with the lines that seem to use them."""
    known = {row["name"].rpartition(".")[2] for row in rows if row["kind"] == "member"}
    own = {}
    for path in _files(folders, inside=True):
        for node in ast.walk(_parsed(path) or ast.Module([], [])):
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name[:2] != "__":
                        own[member.name] = f"{node.name}.{member.name}"
    found = {}
    for path, tree in _sources(folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in own.keys() - known:
                on = ast.unparse(node.value)
                if re.search(r"(wg|worker_group|workers?(\[.*\])?|pool|manager)$", on):
                    found.setdefault(own[node.attr], f"{path}:{node.lineno}: {on}.{node.attr}")
    return found


def _files(folders, inside) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            is_own = "single_controller" in path.relative_to(folder).parts[:-1] and "tests" not in path.parts
            if is_own == inside:
                yield path


def _parsed(path):
    try:
        return ast.parse(path.read_text(errors="replace"))
    except (SyntaxError, ValueError):
        return None  # a file of another language level, or no Python


def _sources(folders):
    """The trees of the files that are about verl."""
    for path in _files(folders, inside=False):
        if "verl" in path.parts or "verl" in path.read_text(errors="replace"):
            tree = _parsed(path)
            if tree is not None:
                yield path, tree


def _imported(node):
    if isinstance(node, ast.ImportFrom) and re.fullmatch(r"verl\.single_controller(\..*)?", node.module or ""):
        module = node.module.removeprefix("verl.single_controller").strip(".")
        yield from (Use("import", f"{module}:{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith("verl.single_controller"):
                yield Use("import", alias.name.removeprefix("verl.single_controller").strip(".") + ":")


def _in(node, members):
    yield from _imported(node)
    if isinstance(node, ast.Attribute):
        on = ast.unparse(node.value) if node.attr in members or node.attr.isupper() else ""
        if on in ("Dispatch", "Execute"):
            yield Use("mode", f"{on}.{node.attr}")
        yield from (Use("member", name) for name, pattern in members.get(node.attr, ()) if pattern.search(on))
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        called = "RayWorkerGroup" if called in GROUPS else called
        yield from (Use("keyword", f"{called}({keyword.arg}=)") for keyword in node.keywords if keyword.arg)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "wg_kwargs":
        if isinstance(node.slice, ast.Constant):
            yield Use("keyword", f"RayWorkerGroup({node.slice.value}=)")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield Use("environment", node.value)
        for suffix in ("_register_center", "WorkerDict"):
            if node.value.startswith(suffix) or (suffix in node.value and "_0:" in node.value):
                yield Use("actor", suffix)


def read():
    """The matrix: the clients, and a row for each name."""
    return json.loads(MATRIX.read_text())


def main(folders):
    rows = read()["rows"]
    missing = [folder for folder in folders if not Path(folder).is_dir()]
    if missing or not folders:
        sys.exit(f"{__doc__}\nno such folder: {', '.join(missing)}" if missing else __doc__)
    used = uses(folders, rows)
    lacks = {Use(row["kind"], row["name"]): row["unsupported"] for row in rows if row["unsupported"]}
    new = sorted(imports(folders) - {row["name"] for row in rows if row["kind"] == "import"})
    print(f"{len(used)} of the {len(rows)} names in the matrix are used")
    for use in sorted(used & lacks.keys()):
        print(f"  not supported: {use.kind} {use.name}: {lacks[use]}")
    for name in new:
        print(f"  not in the matrix: import {name}")
    for name, where in sorted(unknown(folders, rows).items()):
        print(f"  not in the matrix: {name}, which {where} seems to use")


if __name__ == "__main__":
    main(sys.argv[1:])
