"""`finite`, which makes the methods of a worker class refuse numbers that are not finite."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from bandmaster.errors import UsageError, suggestion
from bandmaster.worker import Worker, registrations

Cls = TypeVar("Cls", bound=type[Worker])


def finite(cls: Cls, methods: Collection[str] | None = None, allow_infinite: bool = False) -> Cls:
    """Make a worker class whose registered methods fail where a value that they get or return is not finite.

    The error of the call names the rank, the method, the column and its first bad row, whereas without it a NaN is
    noticed steps later, in another group. Values are looked at in mappings, lists and tuples, however deep: numbers,
    and arrays and tensors of floating-point numbers. A class that is not passed through this function costs nothing;
    one that is, a pass over its values, for which the host waits if they are on a GPU.

    Args:
        cls: The worker class.
        methods: Names of the methods to check; by default all registered ones but static and class methods.
        allow_infinite: Whether infinite numbers are right, as in masked logits, and NaN alone is wrong.

    Returns:
        A subclass with the same name. Its methods raise `FloatingPointError`.

    Raises:
        UsageError: The class has no such registered method.

    Example:
        >>> import bandmaster as bm
        >>> class Actor(bm.Worker):
        ...     @bm.register(bm.Dispatch.DP_PROTO)
        ...     def log_probs(self, rows):
        ...         return {"log_probs": np.log(rows["p"])}
        >>> with bm.ResourcePool([2], backend="inprocess") as pool, np.errstate(divide="ignore"):
        ...     actor = bm.WorkerGroup(pool, finite(Actor))
        ...     try:
        ...         actor.log_probs({"p": np.array([1.0, 0.5, 0.0, 1.0])})
        ...     except bm.RemoteError as error:
        ...         print(f"rank {error.rank}: {error.__cause__}")
        rank 1: log_probs returns ['log_probs'] with 1 infinite of 2 numbers, the first in row 0
    """
    known = registrations(cls)
    named = known if methods is None else methods
    for name in named:
        if name not in known:
            raise UsageError(f"{cls.__name__} has no registered method {name!r}{suggestion(name, known)}")
    chosen = [name for name in named if not isinstance(inspect.getattr_static(cls, name), (staticmethod, classmethod))]
    members: dict[str, Any] = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {name: _checked(name, getattr(cls, name), allow_infinite) for name in chosen}
    return types.new_class(  # type: ignore[return-value]  # a subclass of cls
        cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(members)
    )


def _checked(name: str, method: Callable[..., Any], allow_infinite: bool) -> Callable[..., Any]:
    """A method that does what another one does, and looks at what goes in and out."""
    signature = inspect.signature(method)

    def look(what: str, value: Any) -> Any:
        _look(f"{name} {what}", value, "", allow_infinite)
        return value

    def look_at_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        bound = signature.bind(*args, **kwargs).arguments
        for parameter, value in list(bound.items())[1:]:  # the first one is the worker
            look(f"gets {parameter}", value)

    if inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def items_of_coroutine(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            look_at_arguments(args, kwargs)
            async for item in method(*args, **kwargs):
                yield look("yields", item)

        return items_of_coroutine
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            look_at_arguments(args, kwargs)
            return look("returns", await method(*args, **kwargs))

        return coroutine
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def items(*args: Any, **kwargs: Any) -> Iterator[Any]:
            look_at_arguments(args, kwargs)
            for item in method(*args, **kwargs):
                yield look("yields", item)

        return items

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        look_at_arguments(args, kwargs)
        return look("returns", method(*args, **kwargs))

    return function


def _look(what: str, value: Any, path: str, allow_infinite: bool) -> None:
    """Look for numbers in a value.

    Raises:
        FloatingPointError: Some are not finite.
    """
    if isinstance(value, float):
        if math.isnan(value) or (math.isinf(value) and not allow_infinite):
            raise FloatingPointError(f"{what}{path and ' ' + path} = {value}")
    elif isinstance(value, Mapping) or _is_tensordict(value):
        for key, part in value.items():
            _look(what, part, f"{path}[{key!r}]", allow_infinite)
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            _look(what, part, f"{path}[{index}]", allow_infinite)
    elif _has_floats(value) and value.is_nested:
        _look(what, value.unbind(), path, allow_infinite)
    elif _has_floats(value) and value.layout is not sys.modules["torch"].strided:
        _look(what, value.to_sparse_coo().coalesce().values(), f"{path}.values()", allow_infinite)
    else:
        if _has_floats(value) and value.itemsize == 1:
            value = value.float()  # torch cannot compare float8
        bad = _bad(value, allow_infinite)
        if bad is not None and bad.any():
            raise FloatingPointError(f"{what}{path and ' ' + path} with {_described(value, bad)}")


def _is_tensordict(value: Any) -> bool:
    """Whether a value is a TensorDict or a tensorclass, which are no mappings."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and bool(tensordict.is_tensor_collection(value))


def _has_floats(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    return is_tensor and (value.is_floating_point() or value.is_complex())


def _bad(value: Any, allow_infinite: bool) -> Any:
    """Find the wrong elements of an array or tensor: one of the same kind, of bools; None for other values."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fc":
        return np.isnan(value) if allow_infinite else ~np.isfinite(value)
    if _has_floats(value):
        torch = sys.modules["torch"]
        return torch.isnan(value) if allow_infinite else ~torch.isfinite(value)
    return None


def _described(value: Any, bad: Any) -> str:
    n_nan, n_bad = int((value != value)[bad].sum()) if bad.ndim else int(value != value), int(bad.sum())
    kinds = {"NaN": n_nan, "infinite": n_bad - n_nan}
    said = " and ".join(f"{n} {kind}" for kind, n in kinds.items() if n)
    n_numbers = int(np.prod(bad.shape))
    row = f", the first in row {int(np.argwhere(np.asarray(bad.tolist()))[0][0])}" if bad.ndim else ""
    return f"{said} of {n_numbers} number{'s' * (n_numbers != 1)}{row}"
