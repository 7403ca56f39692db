"""The arguments of a call: which argument goes to which ranks, and how batches are cut. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from bandmaster.errors import ArgumentError, BatchError
from bandmaster.plan.batch import KNOWN, Batch, as_batch, describe
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import Cut, RealRows, cut_rows
from bandmaster.plan.transfer import Broadcast, Outgoing, PerRank, Split

__all__ = [
    "ArgumentGroup",
    "BoundArgument",
    "CallPlan",
    "alike",
    "everywhere",
    "first_ranks",
    "plan_call",
    "scatter",
]


class BoundArgument(NamedTuple):
    """One argument of a call: its position or keyword, the parameter that it binds to, and the value."""

    key: int | str
    name: str
    value: Any


class ArgumentGroup(NamedTuple):
    """Arguments that go to the same ranks, and so are encoded and written once.

    Attributes:
        items: ``(position or keyword, value)`` of each.
        names: The parameter that each belongs to; there may be more names than items.
        ranks: The ranks that get them.
    """

    items: tuple[tuple[int | str, Any], ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]


class CallPlan(NamedTuple):
    """A call's arguments, ready to be encoded.

    Attributes:
        groups: What goes out; a rank gets all groups that name it.
        real_rows: What each rank gets of the rows that are split; of those that are padded, where there are several
            splits. None where nothing is split.
    """

    groups: tuple[ArgumentGroup, ...]
    real_rows: RealRows | None = None


@lru_cache(maxsize=1024)
def alike(
    ranks: tuple[int, ...], receivers: tuple[tuple[int, ...], ...], collected: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]:
    """Ranks that are asked for the very same: ``(ranks, numbers of their groups, whether they are collected)``.

    Args:
        ranks: Those that are called.
        receivers: The ranks that get group 0, group 1, …
        collected: Those whose values come back.
    """
    numbers_of: dict[int, tuple[int, ...]] = dict.fromkeys(ranks, ())
    for number, members in enumerate(receivers):
        for rank in members:
            numbers_of[rank] += (number,)
    same: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    wanted = set(collected)
    for rank, numbers in numbers_of.items():
        same.setdefault((numbers, rank in wanted), []).append(rank)
    return tuple((tuple(members), numbers, is_collected) for (numbers, is_collected), members in same.items())


def plan_call(
    arguments: Sequence[BoundArgument], outgoing: Outgoing, rules: Mapping[str, Outgoing], mesh: Mesh, method: str
) -> CallPlan:
    """Decide which argument goes where.

    Args:
        arguments: The call's arguments.
        outgoing: The rule for arguments that ``rules`` does not name.
        rules: Outgoing transfers by parameter name.
        mesh: The group's.
        method: ``"Class.method"``, for messages.

    Raises:
        ArgumentError: A `PerRank` argument that is no sequence of one value per rank.
        BatchError: A batch that cannot be split as asked, or no batch at all where ``outgoing`` splits.
        MeshError: An axis that ``mesh`` does not have and that does not count as size 1.
    """
    batches: dict[int | str, Batch | None] = {}  # by position or keyword, of arguments that may be split
    by_rule: dict[Outgoing, list[BoundArgument]] = {}
    for argument in arguments:
        rule = _declared(argument, rules)
        if rule is None or isinstance(rule, Split):
            if isinstance(rule or outgoing, Split):
                batches[argument.key] = _batch_of(argument, method)
            if rule is None:
                rule = Broadcast() if isinstance(outgoing, Split) and batches[argument.key] is None else outgoing
        by_rule.setdefault(rule, []).append(argument)
    if isinstance(outgoing, Split) and not any(isinstance(rule, Split | PerRank) for rule in by_rule):
        _check_declared(arguments, outgoing, rules, method)
    groups: list[ArgumentGroup] = []
    real_rows = None
    for rule, members in by_rule.items():
        if isinstance(rule, Broadcast):
            groups.append(everywhere(members, mesh.size))
        elif isinstance(rule, PerRank):
            groups += scatter(members, mesh.size, method)
        else:
            found = [batches[argument.key] for argument in members]
            cut = cut_rows(mesh, rule, _common_rows(members, found, method))
            columns = [_parts(argument, batch, cut, method) for argument, batch in zip(members, found, strict=True)]
            groups += _groups(members, zip(*columns, strict=True), cut.receivers)
            if real_rows is None or rule.pad:
                real_rows = cut.real_rows
    return CallPlan(tuple(groups), real_rows)


def everywhere(arguments: Sequence[BoundArgument], n_ranks: int) -> ArgumentGroup:
    """The same values for the ranks 0 … n_ranks-1."""
    items = tuple([(argument.key, argument.value) for argument in arguments])
    return ArgumentGroup(items, tuple([argument.name for argument in arguments]), first_ranks(n_ranks))


@lru_cache(maxsize=64)
def first_ranks(n: int) -> tuple[int, ...]:
    """0 … n-1."""
    return tuple(range(n))


def scatter(arguments: Sequence[BoundArgument], world_size: int, method: str) -> Iterable[ArgumentGroup]:
    """One value per rank; ranks that are given the very same objects share a group.

    Raises:
        ArgumentError: A value that is no sequence, or has another length than ``world_size``.
    """
    for argument in arguments:
        if not isinstance(argument.value, Sequence) or isinstance(argument.value, str | bytes):
            raise ArgumentError(
                f"argument {argument.name!r} of {method} takes a sequence with one value per rank, "
                f"not {type(argument.value).__name__}; for {world_size} ranks give a list of {world_size} values"
            )
        if len(argument.value) != world_size:
            raise ArgumentError(
                f"argument {argument.name!r} of {method} has {len(argument.value)} values for {world_size} ranks; "
                "give one value per rank"
            )
    columns = [
        [argument.value[rank] for rank in range(world_size)] for argument in arguments
    ]  # kept: a range makes them anew
    same: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        same.setdefault(tuple(id(column[rank]) for column in columns), []).append(rank)
    return _groups(arguments, [[column[ranks[0]] for column in columns] for ranks in same.values()], same.values())


def _groups(
    arguments: Sequence[BoundArgument], rows: Iterable[Sequence[Any]], receivers: Iterable[Sequence[int]]
) -> list[ArgumentGroup]:
    """A group of each row, which has a value in place of that of each argument, for its receivers."""
    keys, names = [argument.key for argument in arguments], tuple([argument.name for argument in arguments])
    return [
        ArgumentGroup(tuple(zip(keys, values, strict=True)), names, tuple(ranks))
        for values, ranks in zip(rows, receivers, strict=True)
    ]


def _declared(argument: BoundArgument, rules: Mapping[str, Outgoing]) -> Outgoing | None:
    rule = rules.get(argument.name)
    return rules.get(argument.key) if rule is None and isinstance(argument.key, str) else rule


def _check_declared(
    arguments: Sequence[BoundArgument], split: Split, rules: Mapping[str, Outgoing], method: str
) -> None:
    """Refuse a call whose arguments all go to every rank, unless each of them is declared to."""
    found = [argument for argument in arguments if _declared(argument, rules) is None]
    if found:
        types = ", ".join(f"{argument.name!r} is {describe(argument.value)}" for argument in found)
        declared = ", ".join(dict.fromkeys(f"{argument.name!r}: Broadcast()" for argument in found))
        raise BatchError(
            f"{method} splits batches by {split!r}, but got none: {types}. Every rank would get the same and return "
            f"the same rows. Give a batch ({KNOWN}), make its type one with register_batch_type, declare "
            f"arguments={{{declared}}}, or register the method with ONE_TO_ALL"
        )


def _batch_of(argument: BoundArgument, method: str) -> Batch | None:
    try:
        return as_batch(argument.value)
    except BatchError as error:
        raise BatchError(
            f"argument {argument.name!r} of {method}: {error}; keep only batches of equal length in it, or declare the "
            f"whole with register(..., arguments={{{argument.name!r}: Broadcast()}})"
        ) from None


def _common_rows(arguments: Sequence[BoundArgument], batches: Sequence[Batch | None], method: str) -> int:
    """The row count of arguments that are split alike."""
    counts: dict[str, int] = {}
    for (_, name, value), batch in zip(arguments, batches, strict=True):
        if batch is None:
            raise BatchError(
                f"argument {name!r} of {method} is to be split, but {type(value).__name__} has no rows; "
                f"give a batch, or declare arguments={{{name!r}: Broadcast()}}"
            )
        counts[name] = batch.n_rows
        first = next(iter(counts))
        if batch.n_rows != counts[first]:
            raise BatchError(
                f"{method} got batches of unequal row counts: {first!r} has {counts[first]}, {name!r} has "
                f"{batch.n_rows}; make them equal, or declare arguments={{{name!r}: Broadcast()}}"
            )
    return next(iter(counts.values()))


def _parts(argument: BoundArgument, batch: Batch | None, cut: Cut, method: str) -> list[Any]:
    """The rows of each part, with padding where the split pads."""
    assert batch is not None, "its rows were counted"
    size, name = cut.real_rows.padded_to, argument.name
    try:
        if size is None:
            return [batch.cut(start, stop) for start, stop in cut.ranges]
        return [batch.padded(start, stop, size) for start, stop in cut.ranges]
    except BatchError as error:
        raise BatchError(
            f"argument {name!r} of {method}: {error}; give another type of batch, say with register_batch_type "
            f"how its rows are cut, or declare arguments={{{name!r}: Broadcast()}}"
        ) from error
