"""Plans the arguments of a call: the receivers of each argument, and the parts of batches. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from bandmaster.errors import ArgumentError, BatchError
from bandmaster.plan.batch import KNOWN, Batch, as_batch, describe, has_columns
from bandmaster.plan.columns import as_array
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.rows import CollectEach, Cut, RealRows, cut_rows
from bandmaster.plan.transfer import Broadcast, Concat, Incoming, Only, Outgoing, PerRank, Split


class BoundArgument(NamedTuple):
    """One argument of a call, bound to a parameter of the method.

    Attributes:
        key: Position or keyword of the argument in the call that the worker makes.
        name: The parameter that it binds to; ``"args"`` for every item of ``*args``.
        value: The caller's value, shared and never changed.
    """

    key: int | str
    name: str
    value: Any


class ArgumentGroup(NamedTuple):
    """Arguments with the same receivers; the controller encodes them once, together.

    Attributes:
        items: One ``(position or keyword, value)`` per argument.
        names: The parameters of the arguments, in order; may be longer than ``items``.
        ranks: The ranks that receive the arguments.
    """

    items: tuple[tuple[int | str, Any], ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]

    def beside(self, items: Sequence[tuple[str, Any]]) -> ArgumentGroup:
        """The group with further keyword arguments."""
        names = (*self.names[: len(self.items)], *[name for name, _ in items])
        return ArgumentGroup((*self.items, *items), names, self.ranks) if items else self


class CallPlan(NamedTuple):
    """All arguments of a call, grouped by receivers and ready to be encoded.

    Attributes:
        groups: The argument groups; a rank receives every group whose ``ranks`` contain it.
        real_rows: The row counts per rank of the batches that are split, those of the padded split if the arguments
            are split in several ways. None if no argument is split.
    """

    groups: tuple[ArgumentGroup, ...]
    real_rows: RealRows | None = None


@lru_cache(maxsize=1024)
def alike(
    ranks: tuple[int, ...], receivers: tuple[tuple[int, ...], ...], collected: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], bool], ...]:
    """Partition ranks into sets whose tickets are identical.

    Args:
        ranks: The ranks that run the method.
        receivers: Item i lists the ranks that receive argument group i.
        collected: The ranks whose values are collected.

    Returns:
        For each set ``(ranks, indices of the argument groups that they receive, whether they are collected)``.
    """
    numbers_of = groups_by_rank(ranks, receivers)
    same: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    wanted = set(collected)
    for rank, numbers in numbers_of.items():
        same.setdefault((numbers, rank in wanted), []).append(rank)
    return tuple((tuple(members), numbers, is_collected) for (numbers, is_collected), members in same.items())


def groups_by_rank(ranks: Sequence[int], receivers: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """For each rank the indices of the argument groups that it receives, of which item i goes to ``receivers[i]``."""
    numbers_of: dict[int, tuple[int, ...]] = dict.fromkeys(ranks, ())
    for number, members in enumerate(receivers):
        for rank in members:
            numbers_of[rank] += (number,)
    return numbers_of


class Share(NamedTuple):
    """Ranks that act together, one of which returns the value of the share.

    Attributes:
        rank: The rank that returns the value.
        ranks: All ranks of the share, that rank first.
    """

    rank: int
    ranks: tuple[int, ...]


def shares(ranks: Sequence[int], receivers: Sequence[Sequence[int]], collected: Sequence[int]) -> tuple[Share, ...]:
    """One share for each collected rank.

    A rank that is not collected belongs to the first collected rank that receives the same arguments, else to the first
    collected rank of all.

    Args:
        ranks: The ranks that run the method.
        receivers: Item i lists the ranks that receive argument group i.
        collected: The ranks that return values; at least one.

    Example:
        >>> shares([0, 1, 2, 3], [[0, 1], [2, 3]], [0, 2])
        (Share(rank=0, ranks=(0, 1)), Share(rank=2, ranks=(2, 3)))
    """
    received = groups_by_rank(ranks, receivers)
    leaders: dict[tuple[int, ...], int] = {}
    for rank in collected:
        leaders.setdefault(received[rank], rank)
    found = {rank: [rank] for rank in collected}
    for rank in ranks:
        if rank not in found:
            found[leaders.get(received[rank], collected[0])].append(rank)
    return tuple([Share(rank, tuple(members)) for rank, members in found.items()])


def of_one_rank(incoming: Incoming | CollectEach, rank: int) -> Incoming | CollectEach:
    """The collect for the value of a single rank: it removes padding, and neither joins nor lists."""
    if isinstance(incoming, Concat):
        return incoming
    if isinstance(incoming, CollectEach):
        items = [each if isinstance(each, Concat) else Only() for each, _ in incoming.collects]
        return CollectEach(tuple([(each, (rank,)) for each in items]))
    return Only()


def plan_call(
    arguments: Sequence[BoundArgument], outgoing: Outgoing, rules: Mapping[str, Outgoing], mesh: Mesh, method: str
) -> CallPlan:
    """Decide which ranks receive each argument, and split the batches among them.

    Args:
        arguments: The bound arguments of the call.
        outgoing: The dispatch rule for arguments that ``rules`` does not name.
        rules: Dispatch rules by parameter name.
        mesh: The mesh of the worker group.
        method: ``"Class.method"``, for messages.

    Raises:
        ArgumentError: A `PerRank` argument is not a sequence with one value per rank.
        BatchError: A batch cannot be split as requested, or ``outgoing`` is a `Split` and no argument is a batch.
        MeshError: A rule names an axis that ``mesh`` does not have and that does not count as size 1.
    """
    groups: list[ArgumentGroup] = []
    real_rows = None
    for rule, members in by_dispatch_rule(arguments, outgoing, rules, method).items():
        if isinstance(rule, Broadcast):
            groups.append(everywhere([argument for argument, _ in members], mesh.size))
        elif isinstance(rule, PerRank):
            groups += scatter([argument for argument, _ in members], mesh.size, method)
        else:
            split = SplitArguments(members, arguments, method)
            cut = cut_rows(mesh, rule, split.n_rows, split.costs(rule))
            groups += split.groups(cut)
            if real_rows is None or rule.pad:
                real_rows = cut.real_rows
    return CallPlan(tuple(groups), real_rows)


def by_dispatch_rule(
    arguments: Sequence[BoundArgument], outgoing: Outgoing, rules: Mapping[str, Outgoing], method: str
) -> dict[Outgoing, list[tuple[BoundArgument, Batch | None]]]:
    """Sort arguments by dispatch rule. Under a `Split`, values that are not batches are broadcast unless declared.

    Returns:
        The arguments by rule, each with its value as a batch if the rule is a `Split` and the value is one.

    Raises:
        BatchError: An argument is half a batch, or ``outgoing`` is a `Split` and no argument is a batch.
    """
    by_rule: dict[Outgoing, list[tuple[BoundArgument, Batch | None]]] = {}
    for argument in arguments:
        own = declared(argument, rules) if rules else None
        rule, batch = own or outgoing, None
        if isinstance(rule, Split):
            batch = batch_of(argument, method)
            if batch is None and own is None:
                rule = Broadcast()
        by_rule.setdefault(rule, []).append((argument, batch))
    if isinstance(outgoing, Split) and all(isinstance(rule, Broadcast) for rule in by_rule):
        _check_declared(arguments, outgoing, rules, method)
    return by_rule


def everywhere(arguments: Sequence[BoundArgument], n_ranks: int) -> ArgumentGroup:
    """One argument group that sends all arguments to ranks 0 … n_ranks-1."""
    return to_ranks(arguments, first_ranks(n_ranks))


def to_ranks(arguments: Sequence[BoundArgument], ranks: tuple[int, ...]) -> ArgumentGroup:
    """One argument group that sends all arguments to some ranks."""
    items = tuple([(argument.key, argument.value) for argument in arguments])
    return ArgumentGroup(items, tuple([argument.name for argument in arguments]), ranks)


@lru_cache(maxsize=64)
def first_ranks(n: int) -> tuple[int, ...]:
    """The tuple ``(0, …, n-1)``, cached because every broadcast uses it."""
    return tuple(range(n))


def scatter(arguments: Sequence[BoundArgument], world_size: int, method: str) -> Iterable[ArgumentGroup]:
    """Argument groups that send item r of every argument to rank r.

    Ranks whose items are the identical objects share one group, so that each distinct value is encoded once.

    Raises:
        ArgumentError: A value is not a sequence, or its length is not ``world_size``.
    """
    for argument in arguments:
        if not isinstance(argument.value, Sequence) or isinstance(argument.value, str | bytes):
            raise ArgumentError(
                f"argument {argument.name!r} of {method} must be a sequence with one value per rank, "
                f"got {type(argument.value).__name__}; for {world_size} ranks pass a list of {world_size} values"
            )
        if len(argument.value) != world_size:
            raise ArgumentError(
                f"argument {argument.name!r} of {method} has {len(argument.value)} values for {world_size} ranks; "
                "pass one value per rank"
            )
    # Each item is read once and stored: a sequence such as range makes a new object, with another id, at each access.
    columns = [[argument.value[rank] for rank in range(world_size)] for argument in arguments]
    same: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        same.setdefault(tuple(id(column[rank]) for column in columns), []).append(rank)
    return _groups(arguments, [[column[ranks[0]] for column in columns] for ranks in same.values()], same.values())


def _groups(
    arguments: Sequence[BoundArgument], rows: Iterable[Sequence[Any]], receivers: Iterable[Sequence[int]]
) -> list[ArgumentGroup]:
    """One argument group per item of ``rows`` (a value for each argument), sent to the matching ``receivers``."""
    keys, names = [argument.key for argument in arguments], tuple([argument.name for argument in arguments])
    return [
        ArgumentGroup(tuple(zip(keys, values, strict=True)), names, tuple(ranks))
        for values, ranks in zip(rows, receivers, strict=True)
    ]


def declared(argument: BoundArgument, rules: Mapping[str, Outgoing]) -> Outgoing | None:
    """The rule for an argument, by the name of its parameter or its keyword; None if there is none."""
    rule = rules.get(argument.name)
    return rules.get(argument.key) if rule is None and isinstance(argument.key, str) else rule


def _check_declared(
    arguments: Sequence[BoundArgument], split: Split, rules: Mapping[str, Outgoing], method: str
) -> None:
    """Raise BatchError for a splitting protocol without a batch to split, unless every argument has a rule."""
    found = [argument for argument in arguments if declared(argument, rules) is None]
    if found:
        types = ", ".join(f"{argument.name!r} is {describe(argument.value)}" for argument in found)
        advice = ", ".join(dict.fromkeys(f"{argument.name!r}: Broadcast()" for argument in found))
        raise BatchError(
            f"{method} splits batches by {split!r}, but no argument is a batch: {types}. Every rank would receive the "
            f"same arguments and return the same rows. Pass a batch ({KNOWN}), make its type a batch type with "
            f"register_batch_type, declare arguments={{{advice}}}, or register the method with ONE_TO_ALL"
        )


def batch_of(argument: BoundArgument, method: str) -> Batch | None:
    """The value of an argument as a batch; None if it is none. Raises BatchError in the cases of `as_batch`."""
    try:
        return as_batch(argument.value)
    except BatchError as error:
        keep = (
            "; keep only batches of equal length in it, or broadcast all of it with "
            f"register(..., arguments={{{argument.name!r}: Broadcast()}})"
        )
        advice = keep if has_columns(argument.value) else ""  # a future of rows has none of the caller's values
        raise BatchError(f"argument {argument.name!r} of {method}: {error}{advice}") from None


class SplitArguments:
    """The arguments of a call that are split alike.

    Attributes:
        batches: The arguments, each with its value as a batch.
        n_rows: Their row count.

    Args:
        members: The arguments, each with its value as a batch; None if it is not one.
        arguments: All arguments of the call.
        method: ``"Class.method"``, for messages.

    Raises:
        BatchError: An argument is not a batch, or the row counts differ.
    """

    def __init__(
        self,
        members: Sequence[tuple[BoundArgument, Batch | None]],
        arguments: Sequence[BoundArgument],
        method: str,
    ) -> None:
        self.batches: list[tuple[BoundArgument, Batch]] = []
        self._arguments, self._method = arguments, method
        for argument, batch in members:
            name = argument.name
            if batch is None:
                raise BatchError(
                    f"argument {name!r} of {method} cannot be split: {type(argument.value).__name__} has no rows; "
                    f"pass a batch, or declare arguments={{{name!r}: Broadcast()}}"
                )
            self.batches.append((argument, batch))
            first, n_rows = self.batches[0][0].name, self.batches[0][1].n_rows
            if batch.n_rows != n_rows:
                raise BatchError(
                    f"{method} got batches of unequal row counts: {first!r} has {n_rows}, {name!r} has "
                    f"{batch.n_rows}; make them equal, or declare arguments={{{name!r}: Broadcast()}}"
                )
        self.n_rows = n_rows

    def column(self, name: str, why: str) -> Any:
        """A column of the batches, or else an argument of that name.

        Args:
            name: The name.
            why: The reason why the column is needed, for the message.

        Raises:
            BatchError: There is neither such a column nor such an argument.
        """
        named = (batch.column(name) for _, batch in self.batches)
        found = next((column for column in named if column is not None), None)
        if found is None:
            found = next((argument.value for argument in self._arguments if argument.name == name), None)
        if found is None:
            names = ", ".join(repr(argument.name) for argument, _ in self.batches)
            raise BatchError(
                f"{why}, but neither a column of {names} nor an argument is called {name!r}; add one with a value for "
                "each row"
            )
        return found

    def costs(self, split: Split) -> np.ndarray[Any, Any] | None:
        """The cost of each row for a split that balances.

        Returns:
            float64 (rows,); None if the split does not balance.

        Raises:
            BatchError: There is no such column or argument, or it is not one number of 0 or more for each row.
        """
        if split.balance is None:
            return None
        why, n_rows = f"{self._method} is split by {split!r}", self.n_rows
        costs = as_array(self.column(split.balance, why)).reshape(-1)
        is_number = costs.dtype.kind in "biuf" or not len(costs)
        if not is_number or len(costs) != n_rows or not (costs >= 0).all():
            raise BatchError(
                f"{why}, but {split.balance!r} is not one number of 0 or more for each of {n_rows} rows: it has "
                f"{len(costs)} values of dtype {costs.dtype}"
            )
        return costs.astype(np.float64)  # can be negated and added up without an overflow

    def groups(self, cut: Cut) -> list[ArgumentGroup]:
        """An argument group per part of a split; rows that lie elsewhere have groups of their own, to be shared."""
        apart: dict[bool, list[tuple[BoundArgument, list[Any]]]] = {}
        for argument, batch in self.batches:
            apart.setdefault(batch.is_elsewhere, []).append((argument, self._parts(argument, batch, cut)))
        groups: list[ArgumentGroup] = []
        for is_elsewhere in sorted(apart):
            arguments, parts = zip(*apart[is_elsewhere], strict=True)
            groups += _groups(arguments, zip(*parts, strict=True), cut.receivers)
        return groups

    def _parts(self, argument: BoundArgument, batch: Batch, cut: Cut) -> list[Any]:
        """The argument's value for each part of a split."""
        try:
            return [batch.sent(numbers) for numbers in cut.numbers]
        except BatchError as error:
            raise BatchError(
                f"argument {argument.name!r} of {self._method}: {error}; pass another type of batch, define how to "
                f"split this one with register_batch_type, or declare arguments={{{argument.name!r}: Broadcast()}}"
            ) from error
