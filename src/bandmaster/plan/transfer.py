"""Transfer protocols as data: how one call's arguments go out and how its results come back. Pure.

Outgoing, per argument: `Split`, `Broadcast`, `PerRank`. Coming back: `Concat`, `Gather`, `Reduce`, `Only`.
A `TransferProtocol` is one of each, or several on the way back for a method that returns a tuple. `Dispatch` holds the
six of HybridFlow; any other is a value a user writes::

    TransferProtocol(Split("dp", "tp"), Concat("dp", "tp"))
    TransferProtocol(Split("dp"), (Concat("dp"), Reduce("mean", weights="rows")))

All of them are frozen, comparable and printed as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from bandmaster.errors import ProtocolError

__all__ = [
    "Broadcast",
    "Concat",
    "Custom",
    "Dispatch",
    "Execute",
    "Gather",
    "Incoming",
    "Only",
    "Outgoing",
    "PerRank",
    "Reduce",
    "Split",
    "TransferProtocol",
    "collect_all_to_all",
]


def _set(value: object, **fields: object) -> None:
    for name, item in fields.items():
        object.__setattr__(value, name, item)


def _axis_names(owner: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    for index, axis in enumerate(axes):
        if not isinstance(axis, str):
            raise ProtocolError(f"{owner} takes names of axes, not {axis!r}")
        if axis in axes[:index]:
            raise ProtocolError(f"{owner} names axis {axis!r} twice")
    return axes


def _written(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    return f"{name}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


@dataclass(frozen=True, init=False, repr=False)
class Split:
    """Rows are cut over the product of ``axes``; ranks with equal coordinates on them get the same rows.

    Rows that do not divide are normal: the first parts get one more (10 rows over 4 are 3, 3, 2, 2).

    Args:
        *axes: Names of mesh axes, the slowest first; at least one.
        pad: Repeat rows from the start until all parts are equal. The copies are cut from the result again,
            which needs a `Concat` on the way back and one result row for each row. Whatever else comes back beside it,
            in a tuple, is what the ranks made of rows and copies together.
    """

    axes: tuple[str, ...]
    pad: bool

    def __init__(self, *axes: str, pad: bool = False) -> None:
        if not axes:
            raise ProtocolError('Split needs an axis to cut over, for example Split("dp")')
        _set(self, axes=_axis_names("Split", axes), pad=bool(pad))

    def __repr__(self) -> str:
        return _written("Split", self.axes, {"pad": True} if self.pad else {})


@dataclass(frozen=True)
class Broadcast:
    """Every rank gets the same value."""


@dataclass(frozen=True)
class PerRank:
    """The caller gives a sequence with one value per rank; rank r gets item r."""


Outgoing = Split | Broadcast | PerRank


@dataclass(frozen=True, init=False, repr=False)
class _Selection:
    """Ranks chosen by mesh axes: one per coordinate of ``axes``, the rest fixed by ``at``, 0 where it is silent."""

    axes: tuple[str, ...]
    at: tuple[tuple[str, int], ...]

    def __init__(self, *axes: str, **at: int) -> None:
        name = type(self).__name__
        for axis, index in at.items():
            if isinstance(index, bool) or not isinstance(index, int):
                raise ProtocolError(f"{name}({axis}={index!r}): a coordinate is an integer, for example {axis}=0")
            if axis in axes:
                raise ProtocolError(f"{name} both joins over axis {axis!r} and fixes {axis}={index}; drop one of them")
        _set(self, axes=_axis_names(name, axes), at=tuple(sorted(at.items())))

    def __repr__(self) -> str:
        return _written(type(self).__name__, self.axes, dict(self.at))


class Concat(_Selection):
    """Rows of several ranks joined into one batch, in axis order.

    Args:
        *axes: The axes to join over, the slowest first; at least one.
        **at: Coordinates of the ranks to take on other axes; 0 where nothing is said, -1 is the last.

    A method that returns None on all those ranks gives None. What is joined belongs to the caller alone: a tensor is
    detached, whether or not those of the ranks require grad. (`Gather` and `Only` give the tensors of the ranks, as
    leaves that require grad if they did there.)
    """

    def __init__(self, *axes: str, **at: int) -> None:
        if not axes:
            raise ProtocolError('Concat needs an axis to join over, for example Concat("dp")')
        super().__init__(*axes, **at)


class Gather(_Selection):
    """A list of values: one per coordinate of ``axes``, or, without axes, of every rank at ``at``, in rank order."""


class Only(_Selection):
    """The value of the one rank at ``at``, 0 on every axis that is not named."""

    def __init__(self, **at: int) -> None:
        super().__init__(**at)


@dataclass(frozen=True, init=False, repr=False)
class Reduce(_Selection):
    """The values that `Gather` would list, made into one.

    Args:
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``, elementwise over numbers, arrays and tensors, and inside
            dicts; tensors in the result are detached. Or a function from the list of values to the result.
        *axes: As in `Gather`.
        weights: ``"rows"`` weighs a mean by the number of rows that each rank was sent, padding not counted; ranks
            without rows are left out, or, if no rank has any, all count alike. None counts all ranks alike.
        **at: As in `Gather`.

    Raises:
        ProtocolError: An operation or weights that do not exist, or weights of anything but a mean.

    Example:
        Three rows over two ranks are two and one, so that the mean over rows is not the mean of the ranks' means:

        >>> import bandmaster as bm
        >>> class Judge(bm.Worker):
        ...     @bm.register(TransferProtocol(Split("dp"), Reduce("mean", "dp", weights="rows")))
        ...     def score(self, rows): return {"score": sum(rows) / len(rows)}
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     bm.WorkerGroup(pool, Judge).score([1, 2, 6])
        {'score': 3.0}
    """

    op: str | Callable[[list[Any]], Any]
    weights: str | None

    def __init__(self, op: str | Callable[[list[Any]], Any], *axes: str, weights: str | None = None, **at: int) -> None:
        if not callable(op) and op not in ("sum", "mean", "min", "max"):
            raise ProtocolError(f"Reduce does not know {op!r}; use 'sum', 'mean', 'min', 'max' or a function")
        if weights not in (None, "rows"):
            raise ProtocolError(f"Reduce weighs by 'rows' or, with None, not at all, but not by {weights!r}")
        if weights is not None and op != "mean":
            raise ProtocolError(f"Reduce weighs a 'mean', but not {op!r}; drop weights={weights!r}")
        super().__init__(*axes, **at)
        _set(self, op=op, weights=weights)

    def __repr__(self) -> str:
        weights = {} if self.weights is None else {"weights": self.weights}
        return _written("Reduce", (self.op, *self.axes), {**weights, **dict(self.at)})


Incoming = Concat | Gather | Reduce | Only
OutgoingT = TypeVar("OutgoingT", bound=Outgoing, covariant=True)
IncomingT = TypeVar("IncomingT", bound="Incoming | tuple[Incoming, ...]", covariant=True)


@dataclass(frozen=True)
class TransferProtocol(Generic[OutgoingT, IncomingT]):
    """How a call's arguments go out and its results come back.

    Args:
        outgoing: What happens to arguments without a rule of their own. Under a `Split`, batches are split and
            everything else is broadcast beside them; a call whose arguments hold no batch is refused.
        incoming: What the caller gets. A tuple of collects is for a method that returns a tuple with one value for each
            of them, on every rank that any of them takes; the caller gets a tuple with what each made of its values.

    Raises:
        ProtocolError: What is no transfer; or padding without a `Concat`, which alone can tell rows from padding. In a
            tuple, the others get what the ranks made of their rows and the padding together.

    Example:
        >>> import bandmaster as bm
        >>> class Trainer(bm.Worker):
        ...     @bm.register(TransferProtocol(Split("dp"), (Concat("dp"), Reduce("mean", "dp", weights="rows"))))
        ...     def step(self, rows):
        ...         return [2 * row for row in rows], {"loss": sum(rows) / len(rows)}
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     bm.WorkerGroup(pool, Trainer).step([1, 2, 6])
        ([2, 4, 12], {'loss': 3.0})
    """

    outgoing: OutgoingT
    incoming: IncomingT

    def __post_init__(self) -> None:
        if not isinstance(self.outgoing, Outgoing):
            raise ProtocolError(f"{self.outgoing!r} does not say how arguments go out; use Split, Broadcast or PerRank")
        if not self.collects or not all(isinstance(collect, Incoming) for collect in self.collects):
            raise ProtocolError(
                f"{self.incoming!r} does not say what comes back; use Concat, Gather, Reduce or Only, or several "
                "of them in a tuple"
            )
        check_padding(self.outgoing, self)

    @property
    def collects(self) -> tuple[Incoming, ...]:
        """What makes the caller's value, or each item of the caller's tuple."""
        return self.incoming if isinstance(self.incoming, tuple) else (self.incoming,)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes that it names, each once."""
        split = self.outgoing.axes if isinstance(self.outgoing, Split) else ()
        collected = [axis for collect in self.collects for axis in (*collect.axes, *dict(collect.at))]
        return tuple(dict.fromkeys((*split, *collected)))


def check_padding(outgoing: Outgoing, protocol: TransferProtocol[Any, Any]) -> None:
    """Refuse padding that nothing takes out of the rows again."""
    is_padded = isinstance(outgoing, Split) and outgoing.pad
    if is_padded and not any(isinstance(collect, Concat) for collect in protocol.collects):
        raise ProtocolError(
            f"{outgoing!r} pads, but {protocol.incoming!r} cannot take the padding out again; collect with Concat, or "
            "leave pad out: uneven parts are fine"
        )


def check_weights(protocol: TransferProtocol[Any, Any], rules: Sequence[Outgoing], method: str) -> None:
    """Refuse a mean weighted by rows where the rules of the arguments do not say which rows."""
    weighted = [collect for collect in protocol.collects if isinstance(collect, Reduce) and collect.weights]
    splits = sorted({repr(rule) for rule in (protocol.outgoing, *rules) if isinstance(rule, Split)})
    if weighted and len(splits) != 1:
        raise ProtocolError(
            f"{method} collects by {weighted[0]!r}, which weighs by the rows of one Split, but its arguments have "
            f"{' and '.join(splits) or 'none'}; split all batches alike, or drop the weights"
        )


class Dispatch(Enum):
    """The six transfer protocols of HybridFlow (arXiv 2409.19256, table 3), by the paper's names.

    ``Dispatch.THREE_D_PROTO`` is ``"3D_PROTO"``, and so on: both can be given to `register`. The axes that they name
    count as size 1 where a group's mesh does not have them, so that ``"3D_PROTO"`` works on ``Mesh(dp=8)``.
    """

    ONE_TO_ALL = TransferProtocol(Broadcast(), Gather())
    THREE_D_PROTO = TransferProtocol(Split("dp"), Concat("dp", pp=-1, tp=0))
    THREE_D_ALL_MICRO_DP = TransferProtocol(Split("dp", "micro_dp"), Concat("dp", "micro_dp", gen_pp=0, gen_tp=0))
    THREE_D_PP_ONLY = TransferProtocol(Broadcast(), Gather("pp", dp=0, tp=0))
    DP_PROTO = TransferProtocol(Split("dp"), Concat("dp"))
    ALL_TO_ALL = TransferProtocol(PerRank(), Gather())

    @property
    def paper_name(self) -> str:
        """The name in the paper's table, such as ``"3D_PROTO"``."""
        return self.name.replace("THREE_D", "3D")

    @classmethod
    def named(cls, name: str) -> Dispatch:
        """The member called ``name`` in either spelling.

        Raises:
            ProtocolError: No protocol has that name; the known ones are listed.
        """
        for member in cls:
            if name in (member.name, member.paper_name):
                return member
        known = ", ".join(member.paper_name for member in cls)
        raise ProtocolError(f"no transfer protocol is called {name!r}; there are {known}, or give a TransferProtocol")


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"  # rank 0 gets the arguments as they are; its plain value comes back


@dataclass(frozen=True)
class Custom:
    """A user's own pair of functions instead of a protocol.

    Attributes:
        dispatch: ``dispatch(group, *args, **kwargs) -> (args, kwargs)``, every one of them a sequence with one
            value per rank. It gets shallow copies of lists, so that the caller's stay as they are.
        collect: ``collect(group, outputs)``, from the list of all ranks' values to what the caller gets.
    """

    dispatch: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    collect: Callable[[Any, list[Any]], Any]

    @classmethod
    def parse(cls, functions: Mapping[str, Any]) -> Custom:
        """From ``{"dispatch_fn": f, "collect_fn": g}``.

        Raises:
            ProtocolError: Other keys, or values that cannot be called.
        """
        if set(functions) != {"dispatch_fn", "collect_fn"}:
            raise ProtocolError(f"a custom protocol has the keys 'dispatch_fn' and 'collect_fn', not {list(functions)}")
        for key, function in functions.items():
            if not callable(function):
                raise ProtocolError(f"{key} of a custom protocol is not callable: {function!r}")
        return cls(functions["dispatch_fn"], functions["collect_fn"])


def collect_all_to_all(worker_group: object, output: list[Any]) -> list[Any]:
    """The collect function that changes nothing: the list of all ranks' values."""
    return output


def as_protocol(dispatch_mode: object) -> TransferProtocol[Any, Any] | Custom:
    """What `register` was given, as a protocol.

    Raises:
        ProtocolError: It is none.
    """
    if isinstance(dispatch_mode, str):
        dispatch_mode = Dispatch.named(dispatch_mode)
    if isinstance(dispatch_mode, Dispatch):
        protocol: TransferProtocol[Any, Any] = dispatch_mode.value
        return protocol
    if isinstance(dispatch_mode, TransferProtocol | Custom):
        return dispatch_mode
    if isinstance(dispatch_mode, Mapping):
        return Custom.parse(dispatch_mode)
    raise ProtocolError(
        f"{dispatch_mode!r} is no transfer protocol; give a Dispatch member, its name, a TransferProtocol, or "
        "{'dispatch_fn': ..., 'collect_fn': ...}"
    )
