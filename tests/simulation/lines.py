"""Steps between the lines of the library's functions: they are compiled again, with a call before each statement.

A trace function would do as well, but Python calls it for all functions of a thread, which takes as long as the rest.
"""

from __future__ import annotations

import ast
import builtins
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

STEP = "simulated_line"  # a name that all modules see
# Of keys: how often a dict compares those with equal hashes depends on the hashes, which differ between processes.
OF_KEYS = "__eq__", "__hash__", "_hash", "_key"


class _Stepped(ast.NodeTransformer):
    """Puts a call before each statement of a function."""

    def visit_FunctionDef(self, node: Any) -> Any:
        self.generic_visit(node)
        has_docstring = ast.get_docstring(node, clean=False) is not None
        node.body = [*node.body[:has_docstring], *_stepped(node.body[has_docstring:])]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


def _stepped(body: list[ast.stmt]) -> list[ast.stmt]:
    made: list[ast.stmt] = []
    for statement in body:
        for part in ("body", "orelse", "finalbody"):
            is_own = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if not is_own and (inner := getattr(statement, part, None)):
                setattr(statement, part, _stepped(inner))
        for branch in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
            branch.body = _stepped(branch.body)
        call = ast.Expr(ast.Call(ast.Name(STEP, ast.Load()), [], []))
        made += [ast.fix_missing_locations(ast.copy_location(call, statement)), statement]
    return made


def _codes(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _codes(one)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno


class Lines:
    """The functions of the library, each with the code that has steps between its lines."""

    def __init__(self) -> None:
        ours = [one for one in gc.get_objects() if type(one) is FunctionType]
        ours = [one for one in ours if "/src/bandmaster/" in one.__code__.co_filename]
        files = {one.__code__.co_filename for one in ours}
        found = {_place(code): code for file in files for code in _codes(_compiled(file))}
        both = [(one, one.__code__, found.get(_place(one.__code__))) for one in ours]
        self._functions = [
            (function, plain, stepped)
            for function, plain, stepped in both
            if stepped is not None and stepped.co_freevars == plain.co_freevars and plain.co_name not in OF_KEYS
        ]

    def begin(self, is_hot: Callable[[CodeType], bool], step: Callable[[], None]) -> None:
        """Have some functions call `step` between their lines."""
        setattr(builtins, STEP, step)
        for function, plain, stepped in self._functions:
            if is_hot(plain):
                function.__code__ = stepped

    def end(self) -> None:
        """Have no function do so."""
        for function, plain, _ in self._functions:
            if function.__code__ is not plain:
                function.__code__ = plain


def _compiled(file: str) -> CodeType:
    tree = _Stepped().visit(ast.parse(Path(file).read_text(), file))
    return compile(tree, file, "exec", dont_inherit=True)
