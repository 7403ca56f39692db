"""verl's ``register``, its dispatch modes and their functions.

A dispatch function ``f(group, *args, **kwargs)`` returns ``(args, kwargs)`` with a list of one value per rank for each
argument; a collect function ``g(group, outputs)`` makes the result from the list of all ranks' values.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from bandmaster.errors import ArgumentError, ProtocolError
from bandmaster.plan import transfer
from bandmaster.plan.transfer import collect_all_to_all
from bandmaster.single_controller.base.batches import chunk, join, resolved, teach_codec

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "MAGIC_ATTR",
    "PADDING_KEY",
    "PROTOCOLS",
    "Dispatch",
    "Execute",
    "collect_all_to_all",
    "collect_dp_compute",
    "collect_dp_compute_data_proto",
    "collect_lazy_compute_data_proto",
    "collect_nd_compute",
    "collect_nd_compute_dataproto",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_dp_compute_data_proto_with_func",
    "dispatch_lazy_compute_data_proto",
    "dispatch_nd_compute",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "dummy_direct_rollout_call",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

MAGIC_ATTR = "attrs_3141562937"  # of a registered function: a dict with dispatch_mode, execute_mode and blocking
PADDING_KEY = "_padding_size_key_x123d"  # among the keywords that a dispatch function returns: rows of padding

Functions = Mapping[str, Callable[..., Any]]


class _Members(type):
    """The class of enumerations that may be extended."""

    members: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.members.values())

    def __len__(cls) -> int:
        return len(cls.members)

    def __contains__(cls, item: object) -> bool:
        return item in (cls.members if isinstance(item, str) else cls.members.values())

    def __getitem__(cls, name: str) -> Any:
        return cls.members[name]


class _Extensible(metaclass=_Members):
    """A member of an enumeration that may be extended. It is unpickled by its name.

    Attributes:
        name: The member's name.
        value: Its number.
    """

    members: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def __init_subclass__(cls) -> None:
        cls.members = {}

    @classmethod
    def register(cls, name: str) -> Any:
        """Add a member, whose name is in capitals.

        Raises:
            ProtocolError: There is a member of this name.
        """
        if name.upper() in cls.members:
            raise ProtocolError(f"{cls.__name__} has a member {name.upper()!r} already; choose another name")
        return cls.named(name.upper())

    @classmethod
    def named(cls, name: str) -> Any:
        """The member of a name; it is added if there is none, as in a process that did not register it."""
        if name not in cls.members:
            cls.members[name] = cls(name, len(cls.members))
            setattr(cls, name, cls.members[name])
        return cls.members[name]

    @classmethod
    def remove(cls, name: str) -> Any:
        """Remove a member and return it."""
        delattr(cls, name.upper())
        return cls.members.pop(name.upper())

    @classmethod
    def from_name(cls, name: str) -> Any:
        """The member of a name in any case; None if there is none."""
        return cls.members.get(name.upper())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).named, (self.name,)


class Dispatch(_Extensible):
    """Dispatch modes, which distribute arguments and combine results: verl's modes and HybridFlow's six."""

    RANK_ZERO: Dispatch
    ONE_TO_ALL: Dispatch
    ALL_TO_ALL: Dispatch
    DP_COMPUTE: Dispatch
    DP_COMPUTE_PROTO: Dispatch
    DP_COMPUTE_PROTO_WITH_FUNC: Dispatch
    DP_COMPUTE_METRIC: Dispatch
    DIRECT_ROLLOUT_METHOD: Dispatch
    MEGATRON_COMPUTE: Dispatch
    MEGATRON_COMPUTE_PROTO: Dispatch
    MEGATRON_PP_AS_DP: Dispatch
    MEGATRON_PP_AS_DP_PROTO: Dispatch
    MEGATRON_PP_ONLY: Dispatch
    DP_PROTO: Dispatch
    THREE_D_PROTO: Dispatch
    THREE_D_ALL_MICRO_DP: Dispatch
    THREE_D_PP_ONLY: Dispatch


class Execute(_Extensible):
    """The ranks that run a method."""

    ALL: Execute
    RANK_ZERO: Execute


for _enumeration in (Dispatch, Execute):
    for _name in _enumeration.__annotations__:
        _enumeration.register(_name)

_OURS = ("DP_PROTO", "THREE_D_PROTO", "THREE_D_ALL_MICRO_DP", "THREE_D_PP_ONLY")
PROTOCOLS = {Dispatch[name]: transfer.Dispatch[name].value for name in _OURS}  # these need no functions


# --- dispatch and collect functions ---


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Give every argument to every rank."""
    n = worker_group.world_size
    return tuple([[value] * n for value in args]), {key: [value] * n for key, value in kwargs.items()}


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments unchanged; each is already a list of one value per rank."""
    return args, kwargs


def dummy_direct_rollout_call(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse the call.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "a method registered with DIRECT_ROLLOUT_METHOD cannot be called on the group; call it on an actor handle of "
        "worker_group.workers"
    )


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Give each rank its own value of every argument, which must be a list or tuple with one value per rank.

    Raises:
        ArgumentError: An argument is not a list or tuple with one value per rank.
    """
    n = worker_group.world_size
    for name, value in [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]:
        if not isinstance(value, list | tuple) or len(value) != n:
            got = f"{len(value)} values" if isinstance(value, list | tuple) else type(value).__name__
            raise ArgumentError(f"DP_COMPUTE needs a list of {n} values, one per rank, for {name}; got {got}")
    return tuple(map(list, args)), {key: list(value) for key, value in kwargs.items()}


def collect_dp_compute(worker_group: Any, output: Sequence[Any]) -> Sequence[Any]:
    """The list of all ranks' values."""
    assert len(output) == worker_group.world_size, "every rank has a value"
    return output


def dispatch_dp_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split the rows of all arguments over the ranks."""
    parts = chunk(worker_group.world_size, args, kwargs)
    return parts.args, parts.kwargs | ({PADDING_KEY: parts.n_padding} if parts.n_padding else {})


def collect_dp_compute_data_proto(worker_group: Any, output: Sequence[Any]) -> Any:
    """The rows of all ranks, joined."""
    return join(output)


def dispatch_dp_compute_data_proto_with_func(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Give the first argument, a function, to every rank, and split the rows of the others over the ranks.

    Raises:
        ArgumentError: The first argument is not a function.
    """
    if not args or not callable(args[0]):
        raise ArgumentError(f"DP_COMPUTE_PROTO_WITH_FUNC needs a function as first argument, got {args[:1]!r}")
    n, (split, by_name) = worker_group.world_size, dispatch_dp_compute_data_proto(worker_group, *args[1:], **kwargs)
    return [[args[0]] * n, *split], by_name


def dispatch_nd_compute(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Give rank r the part ``dp_rank_mapping[r]`` of every argument, which is a list of ``dp_size`` parts."""

    def placed(parts: Sequence[Any]) -> list[Any]:
        if len(parts) != dp_size:
            raise ArgumentError(f"an argument has {len(parts)} parts for {dp_size} data-parallel ranks")
        return [parts[dp_rank] for dp_rank in dp_rank_mapping]

    return tuple(map(placed, args)), {key: placed(value) for key, value in kwargs.items()}


def collect_nd_compute(collect_mask: Sequence[bool], worker_group: Any, output: Sequence[Any]) -> list[Any]:
    """The values of the ranks that the mask selects."""
    return [value for value, is_collected in zip(output, collect_mask, strict=True) if is_collected]


def dispatch_nd_compute_dataproto(
    dp_rank_mapping: Sequence[int], dp_size: int, worker_group: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Split the rows of all arguments into ``dp_size`` parts, and give rank r the part ``dp_rank_mapping[r]``."""
    parts = chunk(dp_size, args, kwargs)
    placed, by_name = dispatch_nd_compute(dp_rank_mapping, dp_size, worker_group, *parts.args, **parts.kwargs)
    return placed, by_name | ({PADDING_KEY: parts.n_padding} if parts.n_padding else {})


def collect_nd_compute_dataproto(collect_mask: Sequence[bool], worker_group: Any, output: Sequence[Any]) -> Any:
    """The rows of the ranks that the mask selects, joined."""
    return join(collect_nd_compute(collect_mask, worker_group, output))


def dispatch_lazy_compute_data_proto(mesh_name: str, worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split the rows of all arguments over the data-parallel ranks of a mesh that the workers have registered."""
    mapping = worker_group.dispatch_info(mesh_name)
    return dispatch_nd_compute_dataproto(mapping, max(mapping) + 1, worker_group, *args, **kwargs)


def collect_lazy_compute_data_proto(mesh_name: str, worker_group: Any, output: Sequence[Any]) -> Any:
    """Join the rows of the ranks whose values are collected on a mesh that the workers have registered."""
    return collect_nd_compute_dataproto(worker_group.collect_info(mesh_name), worker_group, output)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """The dispatch mode that splits rows over a mesh that the workers have registered.

    Args:
        mesh_name: The name that each worker gives to ``_register_dispatch_collect_info``.
    """
    return {
        "dispatch_fn": functools.partial(dispatch_lazy_compute_data_proto, mesh_name),
        "collect_fn": functools.partial(collect_lazy_compute_data_proto, mesh_name),
    }


# --- Megatron's modes, of verl up to 0.5: the group knows the coordinates of its ranks from the workers ---
#
# mode (the _PROTO ones split rows)   HybridFlow's      dispatch                               collect
# MEGATRON_COMPUTE[_PROTO]            3D_PROTO          part dp of dp                          tp = 0, pp = last, cp = 0
# MEGATRON_PP_AS_DP[_PROTO]           3D_ALL_MICRO_DP   part (cp * dp + dp) * pp + pp of all   tp = 0 (see below)
# MEGATRON_PP_ONLY                    3D_PP_ONLY        everything to all                      tp = 0, dp = 0


def _ranks(worker_group: Any) -> Sequence[Any]:
    """The coordinates of each rank. Raises ProtocolError if the group does not ask its workers for them."""
    if not hasattr(type(worker_group), "megatron_ranks"):
        raise ProtocolError(
            f"{worker_group!r} does not know where Megatron has put its ranks, which the modes MEGATRON_... need; make "
            "it with bandmaster.single_controller.ray.megatron.NVMegatronRayWorkerGroup"
        )
    return worker_group.megatron_ranks  # type: ignore[no-any-return]


def _dp_parts(worker_group: Any) -> list[int]:
    return [int(info.dp_rank) for info in _ranks(worker_group)]


def _pp_as_dp_parts(worker_group: Any) -> list[int]:
    ranks, dp, pp = _ranks(worker_group), worker_group.dp_size, worker_group.pp_size
    return [int((info.cp_rank * dp + info.dp_rank) * pp + info.pp_rank) for info in ranks]


def _last_stages(worker_group: Any) -> list[bool]:
    ranks, last = _ranks(worker_group), worker_group.pp_size - 1
    return [info.tp_rank == 0 and info.pp_rank == last and info.cp_rank == 0 for info in ranks]


def _first_of_tp(worker_group: Any) -> list[bool]:
    is_anywhere = not _stages_share_rows
    return [info.tp_rank == 0 and (is_anywhere or info.pp_rank == 0) for info in _ranks(worker_group)]


_stages_share_rows = False


def let_stages_share_rows() -> None:
    """Collect MEGATRON_PP_AS_DP from pipeline stage 0 alone, as verl before 0.4 does.

    The workers of those versions exchange the rows between the stages, so that every stage returns all of them.
    """
    global _stages_share_rows
    _stages_share_rows = True


def _stages(worker_group: Any) -> list[bool]:
    return [info.tp_rank == 0 and info.dp_rank == 0 for info in _ranks(worker_group)]


def _n_parts(parts: Sequence[int]) -> int:
    return max(parts) + 1


def dispatch_megatron_compute(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Give each rank the part of its data-parallel rank of every argument, which is a list of such parts."""
    parts = _dp_parts(worker_group)
    return dispatch_nd_compute(parts, _n_parts(parts), worker_group, *args, **kwargs)


def collect_megatron_compute(worker_group: Any, output: Sequence[Any]) -> list[Any]:
    """The value of each data-parallel rank, from tensor rank 0 of its last pipeline stage."""
    return collect_nd_compute(_last_stages(worker_group), worker_group, output)


def dispatch_megatron_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split the rows of all arguments over the data-parallel ranks."""
    parts = _dp_parts(worker_group)
    return dispatch_nd_compute_dataproto(parts, _n_parts(parts), worker_group, *args, **kwargs)


def collect_megatron_compute_data_proto(worker_group: Any, output: Sequence[Any]) -> Any:
    """The rows of each data-parallel rank, from tensor rank 0 of its last pipeline stage, joined."""
    return join(collect_megatron_compute(worker_group, output))


def dispatch_megatron_pp_as_dp(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Give each rank its part of every argument, a list of one part per data-parallel rank and pipeline stage."""
    parts = _pp_as_dp_parts(worker_group)
    return dispatch_nd_compute(parts, _n_parts(parts), worker_group, *args, **kwargs)


def collect_megatron_pp_as_dp(worker_group: Any, output: Sequence[Any]) -> list[Any]:
    """The values of tensor rank 0 everywhere, in the order of the ranks."""
    return collect_nd_compute(_first_of_tp(worker_group), worker_group, output)


def dispatch_megatron_pp_as_dp_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Split the rows of all arguments over the data-parallel ranks and, within each, over the pipeline stages."""
    parts = _pp_as_dp_parts(worker_group)
    return dispatch_nd_compute_dataproto(parts, _n_parts(parts), worker_group, *args, **kwargs)


def collect_megatron_pp_as_dp_data_proto(worker_group: Any, output: Sequence[Any]) -> Any:
    """The rows of tensor rank 0 everywhere, joined in the order of the ranks."""
    return join(collect_megatron_pp_as_dp(worker_group, output))


def collect_megatron_pp_only(worker_group: Any, output: Sequence[Any]) -> list[Any]:
    """The value of each pipeline stage, from tensor rank 0 and data-parallel rank 0."""
    return collect_nd_compute(_stages(worker_group), worker_group, output)


_MASKS: dict[Callable[..., Any], Callable[[Any], Sequence[bool]]] = {
    collect_megatron_compute: _last_stages,
    collect_megatron_compute_data_proto: _last_stages,
    collect_megatron_pp_as_dp: _first_of_tp,
    collect_megatron_pp_as_dp_data_proto: _first_of_tp,
    collect_megatron_pp_only: _stages,
}


def collected(collect: Callable[..., Any], worker_group: Any) -> Sequence[bool] | None:
    """For every rank, whether a collect function of this module uses its value; None if it uses all of them."""
    if getattr(collect, "func", None) is collect_lazy_compute_data_proto:
        return worker_group.collect_info(collect.args[0])  # type: ignore[attr-defined,no-any-return]
    return _MASKS[collect](worker_group) if collect in _MASKS else None


def joins_rows(collect: Callable[..., Any]) -> bool:
    """Whether a collect function joins rows, so that the result of a call that does not wait is a future of rows."""
    return getattr(collect, "func", collect) in (
        collect_dp_compute_data_proto,
        collect_lazy_compute_data_proto,
        collect_nd_compute_dataproto,
        collect_megatron_compute_data_proto,
        collect_megatron_pp_as_dp_data_proto,
    )


def _functions(dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> Functions:
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, Functions] = {
    Dispatch.ONE_TO_ALL: _functions(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: _functions(dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: _functions(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: _functions(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _functions(
        dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto
    ),
    Dispatch.DP_COMPUTE_METRIC: _functions(dispatch_dp_compute_data_proto, collect_dp_compute),
    Dispatch.MEGATRON_COMPUTE: _functions(dispatch_megatron_compute, collect_megatron_compute),
    Dispatch.MEGATRON_COMPUTE_PROTO: _functions(
        dispatch_megatron_compute_data_proto, collect_megatron_compute_data_proto
    ),
    Dispatch.MEGATRON_PP_AS_DP: _functions(dispatch_megatron_pp_as_dp, collect_megatron_pp_as_dp),
    Dispatch.MEGATRON_PP_AS_DP_PROTO: _functions(
        dispatch_megatron_pp_as_dp_data_proto, collect_megatron_pp_as_dp_data_proto
    ),
    Dispatch.MEGATRON_PP_ONLY: _functions(dispatch_one_to_all, collect_megatron_pp_only),
    Dispatch.DIRECT_ROLLOUT_METHOD: _functions(dummy_direct_rollout_call, dummy_direct_rollout_call),
}


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> Functions:
    """The functions of a mode, as ``{"dispatch_fn": f, "collect_fn": g}``.

    Raises:
        ProtocolError: The mode has no functions.
    """
    if dispatch_mode not in DISPATCH_MODE_FN_REGISTRY:
        raise ProtocolError(
            f"{dispatch_mode!r} has no dispatch and collect functions; register_dispatch_mode adds some"
        )
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Add a mode. Raises ProtocolError if there is one of this name."""
    DISPATCH_MODE_FN_REGISTRY[Dispatch.register(dispatch_mode_name)] = _functions(dispatch_fn, collect_fn)


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a mode. Raises ProtocolError if it has none."""
    get_predefined_dispatch_fn(dispatch_mode)
    DISPATCH_MODE_FN_REGISTRY[dispatch_mode] = _functions(dispatch_fn, collect_fn)


def get_predefined_execute_fn(execute_mode: Execute) -> dict[str, str]:
    """The name of the group's method that runs a call on these ranks, as ``{"execute_fn_name": name}``."""
    _check_execute_mode(execute_mode)
    return {"execute_fn_name": "execute_all" if execute_mode is Execute.ALL else "execute_rank_zero"}


def _check_dispatch_mode(dispatch_mode: object) -> None:
    if not isinstance(dispatch_mode, Dispatch):
        transfer.as_protocol(dispatch_mode)  # raises


def _check_execute_mode(execute_mode: object) -> None:
    if not isinstance(execute_mode, Execute):
        raise ProtocolError(f"execute_mode must be Execute.ALL or Execute.RANK_ZERO, got {execute_mode!r}")


# --- register ---


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Any = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method of a worker class callable on the whole `RayWorkerGroup`.

    Args:
        dispatch_mode: A member of `Dispatch`, or ``{"dispatch_fn": f, "collect_fn": g}``; or a value that
            `bandmaster.register` takes: a `bandmaster.TransferProtocol`, or the name of one of HybridFlow's
            (``"3D_PROTO"``).
        execute_mode: The ranks that run the method; rank 0 alone gets the arguments unsplit.
        blocking: Whether the group's method waits. If not, it returns a list of ObjectRefs, or a ``DataProtoFuture``
            if the mode joins rows.
        materialize_futures: Ignored: arguments that are a ``DataProtoFuture`` reach the method as their values.

    Raises:
        ProtocolError: A mode is unknown.
    """
    if inspect.isfunction(dispatch_mode):
        raise ProtocolError(f"@register needs parentheses: write @register() above {dispatch_mode.__name__}")
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)
    whole = (Dispatch.ALL_TO_ALL, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO)
    if execute_mode is Execute.RANK_ZERO and dispatch_mode not in whole:
        raise ProtocolError(
            f"Execute.RANK_ZERO gives rank 0 the arguments as they are, but {dispatch_mode!r} distributes them; use "
            "one of the two"
        )
    attributes = {"dispatch_mode": dispatch_mode, "execute_mode": execute_mode, "blocking": blocking}

    def decorator(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def inner(*args: Any, **kwargs: Any) -> Any:
            teach_codec()
            if "verl.protocol" in sys.modules:
                args, kwargs = tuple(map(resolved, args)), {key: resolved(value) for key, value in kwargs.items()}
            return _bridged(func, dispatch_mode, args, kwargs)(*args, **kwargs)

        async def async_inner(*args: Any, **kwargs: Any) -> Any:
            return await inner(*args, **kwargs)

        registered = functools.wraps(func)(async_inner) if inspect.iscoroutinefunction(func) else inner
        setattr(registered, MAGIC_ATTR, attributes)
        return registered

    return decorator


def _bridged(
    func: Callable[..., Any], dispatch_mode: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    """The function itself, or as verl wraps it so that names of rows in its transfer queue arrive as the rows."""
    if any(type(value).__name__ in ("BatchMeta", "KVBatchMeta") for value in (*args, *kwargs.values())):
        from verl.utils.transferqueue_utils import tqbridge  # the package that the value is from

        return tqbridge(dispatch_mode=dispatch_mode)(func)  # type: ignore[no-any-return]
    return func
