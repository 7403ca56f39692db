"""Transfer protocols as data: rules that distribute the arguments of a call and combine its results. Pure.

Dispatch rules, one per argument: `Split`, `Broadcast`, `PerRank`. Collect rules: `Concat`, `Gather`, `Reduce`, `Only`.
The dispatch rule of a request is `Route`. A `TransferProtocol` has one dispatch rule and one collect rule, or a tuple
of collect rules for a method that returns a tuple. `Dispatch` holds the six protocols of HybridFlow and that of
requests. Users write other protocols as values::

    TransferProtocol(Split("dp", "tp"), Concat("dp", "tp"))
    TransferProtocol(Split("dp"), (Concat("dp"), Reduce("mean", weights="rows")))

Rules and protocols are frozen and comparable; the repr of a rule is the expression that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from bandmaster.errors import ProtocolError
from bandmaster.plan.numbers import as_whole


def _set(value: object, **fields: object) -> None:
    for name, item in fields.items():
        object.__setattr__(value, name, item)


def _axis_names(owner: str, axes: tuple[str, ...], needs_one: bool = True) -> tuple[str, ...]:
    if needs_one and not axes:
        raise ProtocolError(f'{owner} requires at least one axis, for example {owner}("dp")')
    for index, axis in enumerate(axes):
        if not isinstance(axis, str):
            raise ProtocolError(f"the axes of {owner} must be strings, got {axis!r}")
        if axis in axes[:index]:
            raise ProtocolError(f"{owner} names axis {axis!r} twice")
    return axes


def _written(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    return f"{name}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


@dataclass(frozen=True, init=False, repr=False)
class Split:
    """Splits the rows of a batch over the product of ``axes``.

    Ranks with equal coordinates on ``axes`` receive the same rows. If the rows do not divide evenly, the first parts
    have one row more (10 rows over 4 parts are 3, 3, 2, 2).

    Args:
        *axes: Names of mesh axes, the slowest first; at least one.
        pad: Add the first rows that a part lacks until all parts have equal row counts. `Concat` removes the copies
            from the result, which requires one result row for each row. Other collect rules in a tuple combine the
            values computed from rows and copies together.
        balance: Name of a column of the batch, or of another argument with one number per row, that gives the cost of
            each row. Parts then have the same sizes as without it, but about equal costs; within a part rows keep
            their order. `Concat` puts the rows of the result back into the order of the batch, which requires one
            result row for each row.

    Raises:
        ProtocolError: There is no axis, an axis is not a string or is named twice, or ``balance`` is not a string.

    Example:
        >>> import bandmaster as bm
        >>> class Trainer(bm.Worker):
        ...     @bm.register(bm.TransferProtocol(Split("dp", balance="n_tokens"), bm.Gather()))
        ...     def tokens(self, rows): return sum(rows["n_tokens"])
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     bm.WorkerGroup(pool, Trainer).tokens({"n_tokens": [900, 800, 100, 200]})
        [1000, 1000]
    """

    axes: tuple[str, ...]
    pad: bool
    balance: str | None

    def __init__(self, *axes: str, pad: bool = False, balance: str | None = None) -> None:
        if balance is not None and not (isinstance(balance, str) and balance):
            raise ProtocolError(f"balance of Split must be the name of a column or of an argument, got {balance!r}")
        _set(self, axes=_axis_names("Split", axes), pad=bool(pad), balance=balance)

    def __repr__(self) -> str:
        options = {"pad": self.pad, "balance": self.balance}
        return _written("Split", self.axes, {name: value for name, value in options.items() if value})


@dataclass(frozen=True)
class Broadcast:
    """Sends the same value to every rank."""


@dataclass(frozen=True)
class PerRank:
    """Sends item r of the argument, a sequence with one value per rank, to rank r."""


@dataclass(frozen=True, init=False, repr=False)
class Route:
    """Sends a request to one replica, which is chosen when it is sent: the one with the fewest open requests.

    The ranks with equal coordinates on ``axes`` are a replica; all of them get the request, and `Only` says which of
    them returns the value.

    Args:
        *axes: Names of mesh axes; at least one.

    Raises:
        ProtocolError: There is no axis, or an axis is not a string or is named twice.

    Example:
        >>> import bandmaster as bm
        >>> class Rollout(bm.Worker):
        ...     @bm.register(bm.TransferProtocol(Route("dp"), bm.Only()), concurrency=64)
        ...     async def chat(self, prompt): return prompt[::-1]
        >>> with bm.ResourcePool([2], backend="inprocess") as pool:
        ...     bm.WorkerGroup(pool, Rollout).chat("abc").result()
        'cba'
    """

    axes: tuple[str, ...]

    def __init__(self, *axes: str) -> None:
        _set(self, axes=_axis_names("Route", axes))

    def __repr__(self) -> str:
        return _written("Route", self.axes, {})


Outgoing = Split | Broadcast | PerRank


@dataclass(frozen=True, init=False, repr=False)
class _Selection:
    """Ranks selected by mesh axes: one per coordinate of ``axes``; axes that ``at`` does not name are fixed at 0."""

    axes: tuple[str, ...]
    at: tuple[tuple[str, int], ...]
    _needs_axis = False

    def __init__(self, /, *axes: str, **at: int) -> None:
        name = type(self).__name__
        axes = _axis_names(name, axes, self._needs_axis)
        for axis, index in at.items():
            if (whole := as_whole(index)) is None:
                raise ProtocolError(f"the coordinate {axis} of {name} must be an integer, got {index!r}")
            if axis in axes:
                raise ProtocolError(
                    f"{name} joins over axis {axis!r} and also fixes {axis}={index}; remove one of them"
                )
            at[axis] = whole
        _set(self, axes=axes, at=tuple(sorted(at.items())))

    def __repr__(self) -> str:
        return _written(type(self).__name__, self.axes, dict(self.at))


class Concat(_Selection):
    """Concatenates the rows of the selected ranks into one batch, in axis order.

    If the method returns None on all selected ranks, the result is None. The caller owns the result; its tensors are
    detached even if the tensors of the ranks require grad. (`Gather` and `Only` return the tensors of the ranks as
    leaves, which require grad if they do on the rank.)

    Args:
        *axes: The axes to join over, the slowest first; at least one.
        **at: Coordinates of the selected ranks on other axes; 0 by default, -1 is the last.

    Raises:
        ProtocolError: There is no axis, an axis is not a string, is named twice or is also fixed by ``at``, or a
            coordinate is not an integer.
    """

    _needs_axis = True


class Gather(_Selection):
    """Lists the values of the selected ranks.

    Args:
        *axes: One value for each coordinate of these axes, the first slowest; other axes are fixed at 0 unless ``at``
            names them. Without axes, one value for every rank at the coordinates in ``at``, in rank order.
        **at: Coordinates by axis name; -1 is the last.
    """


class Only(_Selection):
    """Returns the value of one rank.

    Args:
        **at: Coordinates of the rank by axis name, -1 for the last; 0 on every other axis.
    """

    def __init__(self, /, **at: int) -> None:
        super().__init__(**at)


@dataclass(frozen=True, init=False, repr=False)
class Reduce(_Selection):
    """Reduces the values that `Gather` would list to one value.

    Args:
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``, elementwise over numbers, or arrays and tensors of one shape,
            and inside dicts; tensors in the result are detached. Or a function from the list of values to the result.
        *axes: One value is taken per coordinate of these axes; without axes, one per rank at ``at``.
        weights: ``"rows"`` weights a mean by the number of rows that each rank received, without padding. Ranks
            without rows are left out; if no rank has rows, all ranks have equal weights. None gives all ranks equal
            weights.
        **at: Coordinates of the selected ranks on other axes; 0 by default, -1 is the last.

    Raises:
        ProtocolError: The operation or the weights are unknown, weights are given for an operation other than the
            mean, or axes or coordinates are invalid.

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
            raise ProtocolError(
                f"the operation of Reduce must be 'sum', 'mean', 'min', 'max' or a function, got {op!r}"
            )
        if weights not in (None, "rows"):
            raise ProtocolError(f"weights of Reduce must be 'rows' or None, got {weights!r}")
        if weights is not None and op != "mean":
            raise ProtocolError(f"Reduce supports weights only for 'mean', got {op!r}; remove weights={weights!r}")
        super().__init__(*axes, **at)
        _set(self, op=op, weights=weights)

    def __repr__(self) -> str:
        weights = {} if self.weights is None else {"weights": self.weights}
        return _written("Reduce", (self.op, *self.axes), {**weights, **dict(self.at)})


Incoming = Concat | Gather | Reduce | Only
OutgoingT = TypeVar("OutgoingT", bound="Outgoing | Route", covariant=True)
IncomingT = TypeVar("IncomingT", bound="Incoming | tuple[Incoming, ...]", covariant=True)


@dataclass(frozen=True)
class TransferProtocol(Generic[OutgoingT, IncomingT]):
    """A dispatch rule and collect rules, which distribute the arguments of a call and combine its results.

    Args:
        outgoing: The dispatch rule for arguments without a rule of their own. Under a `Split`, batches are split and
            other values are broadcast; a call without a batch raises `BatchError`.
        incoming: The collect rule, or a tuple of collect rules. A tuple is for a method that returns, on every rank
            that any of the rules selects, a tuple with one value per rule; the caller receives a tuple with one
            result per rule.

    Raises:
        ProtocolError: A rule has the wrong type; or ``outgoing`` pads and there is no `Concat`, the only rule that
            removes padding. Beside a `Concat`, other rules of a tuple combine the values computed from rows and padding
            together.

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
        if not isinstance(self.outgoing, Outgoing | Route):
            raise ProtocolError(f"outgoing must be a Split, Broadcast, PerRank or Route, got {self.outgoing!r}")
        if not self.collects or not all(isinstance(collect, Incoming) for collect in self.collects):
            raise ProtocolError(
                f"incoming must be a Concat, Gather, Reduce or Only, or a tuple of them, got {self.incoming!r}"
            )
        if isinstance(self.outgoing, Route):
            self._check_route(self.outgoing)
        else:
            check_padding(self.outgoing, self)

    def _check_route(self, route: Route) -> None:
        if not isinstance(self.incoming, Only):
            raise ProtocolError(
                f"a request has the value of one rank of its replica, so that {route!r} collects with Only(), got "
                f"{self.incoming!r}"
            )
        fixed = [axis for axis, _ in self.incoming.at if axis in route.axes]
        if fixed:
            raise ProtocolError(f"{route!r} chooses the coordinate on {fixed[0]!r}; remove {fixed[0]}= from Only")

    @property
    def collects(self) -> tuple[Incoming, ...]:
        """The collect rules as a tuple, also if there is only one."""
        return self.incoming if isinstance(self.incoming, tuple) else (self.incoming,)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes that the rules name, without duplicates, those of the dispatch rule first."""
        split = self.outgoing.axes if isinstance(self.outgoing, Split | Route) else ()
        collected = [axis for collect in self.collects for axis in (*collect.axes, *dict(collect.at))]
        return tuple(dict.fromkeys((*split, *collected)))


def check_padding(outgoing: Outgoing, protocol: TransferProtocol[Any, Any]) -> None:
    """Raise ProtocolError if a dispatch rule pads and no collect rule removes the padding."""
    is_padded = isinstance(outgoing, Split) and outgoing.pad
    if is_padded and not any(isinstance(collect, Concat) for collect in protocol.collects):
        raise ProtocolError(
            f"{outgoing!r} adds padding, but {protocol.incoming!r} cannot remove it; collect with Concat, or remove "
            "pad=True: the rows need not divide evenly"
        )


def check_weights(protocol: TransferProtocol[Any, Any], rules: Sequence[Outgoing], method: str) -> None:
    """Raise ProtocolError for a mean weighted by rows, unless the arguments have exactly one split."""
    weighted = [collect for collect in protocol.collects if isinstance(collect, Reduce) and collect.weights]
    splits = sorted({repr(rule) for rule in (protocol.outgoing, *rules) if isinstance(rule, Split)})
    if weighted and len(splits) != 1:
        raise ProtocolError(
            f"{method} collects with {weighted[0]!r}, which needs exactly one Split to weight by its rows, but its "
            f"arguments have {' and '.join(splits) or 'no Split'}; split batches over the same axes, or omit weights"
        )


class Dispatch(Enum):
    """The six transfer protocols of HybridFlow (arXiv 2409.19256, table 3), by the paper's names, and ``REQUEST``.

    `register` accepts a member or its name in the paper: ``Dispatch.THREE_D_PROTO`` or ``"3D_PROTO"``. An axis of
    these protocols that a mesh does not have counts as size 1, so ``"3D_PROTO"`` works on ``Mesh(dp=8)``.
    """

    ONE_TO_ALL = TransferProtocol(Broadcast(), Gather())
    THREE_D_PROTO = TransferProtocol(Split("dp"), Concat("dp", pp=-1, tp=0))
    THREE_D_ALL_MICRO_DP = TransferProtocol(Split("dp", "micro_dp"), Concat("dp", "micro_dp", gen_pp=0, gen_tp=0))
    THREE_D_PP_ONLY = TransferProtocol(Broadcast(), Gather("pp", dp=0, tp=0))
    DP_PROTO = TransferProtocol(Split("dp"), Concat("dp"))
    ALL_TO_ALL = TransferProtocol(PerRank(), Gather())
    REQUEST = TransferProtocol(Route("dp"), Only(tp=0))

    @property
    def paper_name(self) -> str:
        """The name in the paper's table, such as ``"3D_PROTO"``."""
        return self.name.replace("THREE_D", "3D")

    @classmethod
    def named(cls, name: str) -> Dispatch:
        """The member with a name, either the Python name or the name in the paper.

        Raises:
            ProtocolError: No protocol has the name; the message lists the known names.
        """
        for member in cls:
            if name in (member.name, member.paper_name):
                return member
        known = ", ".join(member.paper_name for member in cls)
        raise ProtocolError(f"unknown transfer protocol {name!r}; use one of {known}, or a TransferProtocol")


class Execute(Enum):
    """The ranks that run a method: all, or rank 0 alone."""

    ALL = "all"
    RANK_ZERO = "rank_zero"  # rank 0 receives the arguments unsplit, and the call returns its value


@dataclass(frozen=True)
class Custom:
    """A pair of user functions that replaces a transfer protocol.

    Attributes:
        dispatch: ``dispatch(group, *args, **kwargs)`` returns ``(args, kwargs)``, in which every value is a sequence
            with one value per rank. It receives shallow copies of the caller's lists, so that it may change them.
        collect: ``collect(group, outputs)`` returns the result for the caller; ``outputs`` is the list of the values of
            all ranks, in rank order.
    """

    dispatch: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    collect: Callable[[Any, list[Any]], Any]

    @classmethod
    def parse(cls, functions: Mapping[str, Any]) -> Custom:
        """The pair in ``{"dispatch_fn": f, "collect_fn": g}``.

        Raises:
            ProtocolError: The dict has other keys, or a value is not callable.
        """
        if set(functions) != {"dispatch_fn", "collect_fn"}:
            raise ProtocolError(
                f"a custom protocol must have the keys 'dispatch_fn' and 'collect_fn', got {list(functions)}"
            )
        for key, function in functions.items():
            if not callable(function):
                raise ProtocolError(f"{key} of a custom protocol must be callable, got {function!r}")
        return cls(functions["dispatch_fn"], functions["collect_fn"])


def collect_all_to_all(worker_group: object, output: list[Any]) -> list[Any]:
    """A collect function for custom protocols that returns the list of all ranks' values unchanged."""
    return output


def as_protocol(dispatch_mode: object) -> TransferProtocol[Any, Any] | Custom:
    """The transfer protocol that the ``dispatch_mode`` of `register` stands for.

    Raises:
        ProtocolError: ``dispatch_mode`` is not a `Dispatch` member, a known name, a `TransferProtocol`, a `Custom`, or
            a dict of the two functions of a `Custom`.
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
        "a transfer protocol must be a member of bandmaster.Dispatch, its name, a TransferProtocol, or "
        f"{{'dispatch_fn': ..., 'collect_fn': ...}}, got {dispatch_mode!r}"
    )
