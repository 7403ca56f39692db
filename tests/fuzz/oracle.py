"""What must come of each step: plain Python on copies, without processes, and without anything of the library's."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import math
import zlib

import numpy as np
import pandas as pd
import tensordict
import torch

from fuzz.subject import BUMP, CLASSES, METHODS, SHOW, class_code

MODULES = {"np": np, "pd": pd, "torch": torch, "tensordict": tensordict}
SCOPE = {**MODULES, "zlib": zlib, "collections": collections, "dataclasses": dataclasses, "__name__": "fuzz_oracle"}
exec("\n".join(text.split("bm.")[0] for text in CLASSES.values()), SCOPE)  # nothing is registered
exec(BUMP, SCOPE)
exec(SHOW, SCOPE)
exec(class_code(METHODS, is_registered=False), SCOPE)
show, bump = SCOPE["show"], SCOPE["bump"]


class Invalid(Exception):
    """A step that has no meaning in this program: something that it takes is not there, or does not fit."""


class Expected(Exception):
    """The error that must come.

    Args:
        error: The name of its class among the library's.
        ranks: Of which it names one: the first, unless they fail at the same time.
        says: What its message has in it: a text, or several.
    """

    def __init__(self, error, ranks=(), says=""):
        super().__init__(error, ranks, says)
        self.error, self.ranks, self.says = error, ranks, (says,) if isinstance(says, str) else says


def columns_of(value):
    """Its columns by name, where these are values of their own; None for others."""
    if isinstance(value, dict | tensordict.TensorDict):
        return dict(value.items())
    if hasattr(value, "_asdict"):
        return value._asdict()
    return dict(vars(value)) if dataclasses.is_dataclass(value) or type(value).__name__ == "Texts" else None


def with_columns(value, columns):
    """A value of the same type with other columns."""
    if isinstance(value, dict):
        return type(value)(columns)
    if isinstance(value, tensordict.TensorDict):
        return tensordict.TensorDict(columns, batch_size=[len(next(iter(columns.values())))])
    return type(value)(*columns.values())


def n_rows(value):
    columns = columns_of(value)
    return len(value) if columns is None else n_rows(next(iter(columns.values())))


def names_of(value):
    """The names of its columns, if operations of handles know them; else None."""
    return list(value.keys()) if isinstance(value, dict | pd.DataFrame | tensordict.TensorDict) else None


def take(value, numbers):
    """Some rows, as a copy."""
    if (columns := columns_of(value)) is not None:
        return with_columns(value, {name: take(column, numbers) for name, column in columns.items()})
    if isinstance(value, list):
        return [copy.deepcopy(value[i]) for i in numbers]  # one row twice is two objects
    if isinstance(value, torch.Tensor) and value.layout is torch.jagged:
        rows = value.unbind()
        return jagged([rows[i] for i in numbers], value)
    if isinstance(value, torch.Tensor):
        return value.detach().index_select(0, torch.tensor(list(numbers), dtype=torch.int64))
    numbers = np.array(list(numbers), dtype=np.int64)
    return value.iloc[numbers].copy() if hasattr(value, "iloc") else value[numbers].copy()


def joined(parts):
    """The rows of some values with the same columns, one after the other. Those with rows alone decide the dtypes."""
    return concat([part for part in parts if n_rows(part)] or parts)


def concat(parts):
    """The rows of some values with the same columns, one after the other. All of them decide the dtypes."""
    first = parts[0]
    if (columns := columns_of(first)) is not None:
        of_each = [columns_of(part) for part in parts]
        return with_columns(first, {name: concat([each[name] for each in of_each]) for name in columns})
    if isinstance(first, list):
        return [copy.deepcopy(row) for part in parts for row in part]
    if isinstance(first, torch.Tensor) and first.layout is torch.jagged:
        return jagged([row for part in parts for row in part.unbind()], first)
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if hasattr(first, "iloc"):
        return pd.concat(parts)
    is_one = len({part.dtype for part in parts}) == 1
    return np.concatenate(parts, dtype=first.dtype if is_one else None)  # alone, it loses the order of bytes


def jagged(rows, like):
    """A nested tensor of these rows."""
    if not rows:
        return torch.nested.nested_tensor_from_jagged(like.values()[:0], torch.zeros(1, dtype=torch.int64))
    return torch.nested.nested_tensor([row.clone() for row in rows], layout=torch.jagged)


def own(value):
    """A copy in which every number has a place of its own."""
    if (columns := columns_of(value)) is not None:
        return with_columns(value, {name: own(one) for name, one in columns.items()})
    if isinstance(value, list):
        return list(map(own, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def form_of(value):
    """What two values must have in common so that `concat` knows what comes."""
    if (columns := columns_of(value)) is not None:
        return type(value).__name__, *((name, form_of(column)) for name, column in columns.items())
    if isinstance(value, pd.DataFrame):
        return ("frame", repr(value.index.names), *((name, repr(value[name].dtype)) for name in value))
    if isinstance(value, list):
        return "list"
    index = repr(value.index.names) if hasattr(value, "iloc") else None
    is_number = isinstance(value, np.ndarray) and value.dtype.isnative and repr(value.dtype)[6:-1] in NUMBERS
    dtype = "number" if is_number else repr(value.dtype)
    return type(value).__name__, dtype, tuple(value.shape[1:]), index


NUMBERS = ("'int32'", "'int64'", "'float32'", "'float64'", "'uint8'")  # numpy dtypes, of which one is found for all


def shares(n, k):
    """The numbers of the rows of each of k parts: the first ones have one more."""
    sizes = [n // k + (part < n % k) for part in range(k)]
    ends = list(itertools.accumulate(sizes, initial=0))
    return [range(start, stop) for start, stop in itertools.pairwise(ends)]


# Protocols that return rows, and split them, as others do, too.
RETURNS_ROWS = ("DP_PROTO", "3D_PROTO", "3D_ALL_MICRO_DP", "PADDED", "CELLS", "BALANCED")
SPLIT = (*RETURNS_ROWS, "SUM", "BOTH")


class Group:
    """Plain objects in place of workers.

    Args:
        axes: Name and size of each axis; the last one varies fastest.
        is_role: Whether it shares its processes with another.
    """

    def __init__(self, axes, is_role=False):
        self.axes, self.is_role = dict(axes), is_role
        self.size = math.prod(self.axes.values())
        self.objects = [None] * self.size
        self.renew()

    def renew(self, ranks=None):
        """Make the objects of these ranks anew, or all."""
        for rank in range(self.size) if ranks is None else ranks:
            self.objects[rank] = SCOPE["Subject"]()
            self.objects[rank].rank = rank

    def at(self, rank):
        """The coordinates of a rank."""
        found = {}
        for name, size in reversed(self.axes.items()):
            rank, found[name] = divmod(rank, size)
        return found

    def ranks(self, **at):
        """The ranks with these coordinates, -1 being the last; axes that are not there have size 1."""
        wanted = {name: value % self.axes[name] for name, value in at.items() if name in self.axes}
        return [rank for rank in range(self.size) if wanted.items() <= self.at(rank).items()]

    def sources(self, protocol):
        """The ranks whose results are collected, in order."""
        if protocol in ("ONE_TO_ALL", "ALL_TO_ALL"):
            return list(range(self.size))
        if protocol == "3D_PP_ONLY":
            return self.ranks(tp=0, dp=0)
        last = -1 if protocol == "3D_PROTO" else 0
        if protocol == "ONLY":
            return [0]
        if protocol == "CELLS":
            return self.ranks(pp=0)
        others = {name: last if name == "pp" else 0 for name in self.axes if name != "dp"}
        return [self.ranks(dp=dp, **others)[0] for dp in range(self.axes.get("dp", 1))]

    def outcomes(self, method, args):
        """Run a method on each rank: the outcome of each, a value or a ValueError, and the numbers of its rows."""
        protocol = METHODS[method][0]
        dp, tp = self.axes.get("dp", 1), self.axes.get("tp", 1) if protocol == "CELLS" else 1
        parts = shares(n_rows(args[0]), dp * tp) if protocol in SPLIT else None
        outcomes, numbers = [], []
        for rank, one in enumerate(self.objects):
            at = self.at(rank)
            rows = parts[at.get("dp", 0) * tp + at.get("tp", 0) % tp] if parts else None
            if parts:
                given = [value if type(value) is tuple else take(value, rows) for value in args]
            else:
                given = [value[rank] if protocol == "ALL_TO_ALL" else value for value in args]
            try:
                result = getattr(one, method)(*copy.deepcopy(given))
                is_generator = method in ("items", "drip")
                outcomes.append([copy.deepcopy(i) for i in result] if is_generator else copy.deepcopy(result))
            except ValueError as error:
                outcomes.append(error)
            numbers.append(rows)
        return outcomes, numbers

    def call(self, method, args):
        """The result of a call."""
        outcomes, _ = self.outcomes(method, args)
        failed = [rank for rank, one in enumerate(outcomes) if isinstance(one, ValueError)]
        if failed:
            raise Expected("RemoteError", failed)  # the others may have been interrupted before they fail
        protocol = METHODS[method][0]
        collected = [outcomes[rank] for rank in self.sources(protocol)]
        if protocol == "SUM":
            return sum(collected)
        if protocol == "ONLY":
            return collected[0]
        if protocol == "BOTH":
            return joined([rows for rows, _ in collected]), [rank for _, rank in collected]
        return joined(collected) if protocol in RETURNS_ROWS else collected


class Oracle:
    """The names of a program and what they stand for: values, or the error that a handle has in place of one."""

    def __init__(self):
        self.groups, self.values, self.handles = {}, {}, {}
        self.origins = {}  # for a handle made of others: all that it is made of
        self.results = {}  # what reading a handle has returned, which is the caller's own

    def group(self, name):
        return self._found(self.groups, name)

    def value(self, name):
        return self._found(self.values, name)

    def handle(self, name):
        """The rows of a handle.

        Raises:
            Expected: There is an error in their place.
        """
        found = self._found(self.handles, name)
        if isinstance(found, Expected):
            raise found
        return found

    def argument(self, name):
        return own(self.value(name) if name in self.values else self.handle(name))

    def _found(self, known, name):
        if name not in known:
            raise Invalid(name)
        return known[name]
