"""Checkpoints by torch's distributed checkpoint (DCP): saved by all ranks, resumed on any mesh."""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandmaster import UsageError
from bandmaster.plan.numbers import as_whole

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.nn import Module
    from torch.optim import Optimizer


def save(path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, **more: Any) -> None:
    """Save a model, its optimizer and more, each rank its own shards.

    Collective, if ``torch.distributed`` is initialised: all ranks call it. If not, a process saves by itself, and needs
    a folder of its own. Parameters that are not a ``DTensor`` are saved once, on the assumption that they are equal on
    all ranks.

    Args:
        path: A folder that all ranks can reach, and all ranks that will load it. A checkpoint in it is overwritten,
            and cannot be loaded until the new one is complete.
        model: The model; with FSDP2 or tensor parallelism, its parameters are ``DTensor``.
        optimizer: Its optimizer.
        **more: Tensors, dicts of tensors, or values that can be pickled, such as ``step=100``. Of a name that several
            ranks save, the value of rank 0 is written, except that each rank writes its part of a ``DTensor``.

    Raises:
        RuntimeError: It could not be written.

    Source: ``torch.distributed.checkpoint``.
    """
    from torch.distributed import checkpoint, is_initialized

    with _silent_about_one_process(), _failing_as_error(f"the checkpoint {path} could not be written"):
        state = _state(model, optimizer, _whole(more))
        checkpoint.save(state, checkpoint_id=path, planner=_planner(path), no_dist=not is_initialized())


def load(
    path: str | os.PathLike[str], model: Module, optimizer: Optimizer | None = None, **more: Any
) -> dict[str, Any]:
    """Load a checkpoint of `save` onto any mesh: each rank reads the parts that its shards need.

    Collective, if ``torch.distributed`` is initialised: all ranks call it.

    Args:
        path: The folder.
        model: The model, already sharded; its parameters are overwritten.
        optimizer: Its optimizer, if one was saved; its parameter groups may differ from those of the saved one. Each
            gets the settings, such as the learning rate, of its first parameter.
        **more: Further values to load, by name; each is None, or a value of the type to load, such as ``seen={}``. A
            dict or list of tensors has those that are to be loaded, in their shapes.

    Returns:
        The loaded values of ``more``.

    Raises:
        UsageError: A dict or list that was saved with tensors in it is to be loaded into an empty one.
        RuntimeError: It could not be read.

    Source: ``torch.distributed.checkpoint``.
    """
    from torch.distributed import checkpoint, is_initialized
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    before = {} if optimizer is None else dict(optimizer.state)
    try:
        with _silent_about_one_process(), _failing_as_error(f"the checkpoint {path} could not be read"):
            saved = _saved_in(path)
            if optimizer is not None:
                _make_room(model, optimizer, saved)
            state = _state(model, optimizer, _to_fill(more, saved))
            checkpoint.load(state, checkpoint_id=path, no_dist=not is_initialized())
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            with _as_it_is(optimizer):
                set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_by_parameter())
    except BaseException:
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(before)
        raise
    loaded: dict[str, Any] = state["more"]
    return {name: value[0] if _is_whole(value, more[name]) else value for name, value in loaded.items()}


class Checkpoints:
    """The checkpoints of a run, in one folder: saved while training goes on, and all but the last few removed.

    ::

        def __init__(self, folder):
            ...
            self.checkpoints = rl.Checkpoints(folder, keep=2)
            self.step = self.checkpoints.load(self.model, self.optimizer, step=0)["step"]

        def save(self):
            self.checkpoints.save(self.step, self.model, self.optimizer, step=self.step)

    Each is a folder of its own that `load` of this module reads as well. One that a run has not completed, as it ended
    before, is not loaded, and is removed with those before it. A run that goes back to an older one goes on from there:
    those with larger numbers are of the run that it has left, and are the first to be removed.

    Args:
        folder: A folder that all ranks can reach; it is made if need be.
        keep: How many complete checkpoints stay, from 1 on. While the next one is written there is one more.

    Raises:
        UsageError: ``keep`` is no whole number of 1 or more.

    Source: ``torch.distributed.checkpoint.async_save``.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        n_kept = as_whole(keep, 1)
        if n_kept is None:
            raise UsageError(f"keep must be a whole number of 1 or more, got {keep!r}; pass how many are to stay")
        self.folder, self._keep = Path(folder), n_kept
        self._group: Any = None  # the ranks, for the thread that writes, which must not meet collectives of training
        self._writing: tuple[int, Any] | None = None  # a number, and a future
        self._goes_on_from: int | None = None  # the number of the last one that this run has loaded or completed

    def save(self, number: int, model: Module, optimizer: Optimizer | None = None, **more: Any) -> None:
        """Copy the state to the memory of the host, and write it while training goes on.

        Collective, if ``torch.distributed`` is initialised. It waits for the checkpoint before this one first.

        Args:
            number: Number of the checkpoint from 0 on, for example the step; one of the same number is overwritten.
            model: As that of `rl.save`.
            optimizer: As that of `rl.save`.
            **more: As those of `rl.save`.

        Raises:
            UsageError: ``number`` is no whole number of 0 or more; or as by `rl.save`.
            RuntimeError: This checkpoint cannot be begun, or the one before could not be written.
        """
        from torch import distributed
        from torch.distributed import checkpoint

        if as_whole(number, 0) is None:
            raise UsageError(f"number must be a whole number of 0 or more, got {number!r}; pass the step, as an int")
        self.wait()
        path, is_alone = self._path(number), not distributed.is_initialized()
        if self._group is None and not is_alone:
            self._group = distributed.new_group(backend="gloo")
        if is_alone:
            warnings.filterwarnings("ignore", _ONE_PROCESS)  # for good, as the thread warns
        state = _state(model, optimizer, _whole(more))
        failed = [self._begun(number) if self._is_first() else ""]
        if self._group is not None:
            distributed.broadcast_object_list(failed, 0, self._group)
        if failed[0]:
            raise RuntimeError(f"a checkpoint in {self.folder} could not be written: {failed[0]}")
        writing = checkpoint.async_save(
            state, checkpoint_id=path, planner=_planner(path), process_group=self._group, no_dist=is_alone
        )
        self._writing = number, writing

    def wait(self) -> None:
        """Wait until the last checkpoint is written, and remove those that are too many. Call it before the run ends.

        Collective, if ``torch.distributed`` is initialised.

        Raises:
            RuntimeError: It could not be written.
        """
        if self._writing is None:
            return
        number, writing = self._writing
        try:
            with _failing_as_error(f"a checkpoint in {self.folder} could not be written"):
                writing.result()
        finally:
            if writing.done():  # else Ctrl-C has ended the wait
                self._writing = None
        self._goes_on_from = number
        self._remove()

    def numbers(self) -> list[int]:
        """The numbers of the complete checkpoints, in ascending order."""
        return sorted(number for number, path in self._all().items() if (path / _WRITTEN_LAST).exists())

    def load(
        self, model: Module, optimizer: Optimizer | None = None, number: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """Load a checkpoint, by default the complete one that was saved last, on any mesh.

        Collective, if ``torch.distributed`` is initialised.

        Args:
            model: As that of `rl.load`.
            optimizer: As that of `rl.load`.
            **more: As those of `rl.load`.
            number: Number of the checkpoint, from which the run goes on; `rl.load` reads one without that.

        Returns:
            The loaded values of ``more``; those that were given, if there is no complete checkpoint.

        Raises:
            UsageError: There is no complete checkpoint of this number; or as by `rl.load`.
        """
        self.wait()
        numbers = self.numbers()
        if number is not None and number not in numbers:
            known = ", ".join(map(str, numbers)) or "none"
            raise UsageError(f"{self.folder} has no complete checkpoint {number}; there are {known}")
        if not numbers:
            return more
        chosen = self._order()[-1] if number is None else number
        loaded = load(self._path(chosen), model, optimizer, **more)
        self._goes_on_from = chosen
        return loaded

    def _path(self, number: int) -> Path:
        return self.folder / f"{_NAME}{number}"

    def _all(self) -> dict[int, Path]:
        """The folders by number, also of those that are not complete."""
        found = {path.name.removeprefix(_NAME): path for path in self.folder.glob(f"{_NAME}*")}
        return {int(name): path for name, path in found.items() if name.isdigit()}

    def _is_first(self) -> bool:
        """Whether this is the rank that changes the folder for all."""
        from torch import distributed

        return self._group is None or distributed.get_rank() == 0

    def _begun(self, number: int) -> str:
        """Note that a checkpoint is about to be written, and is not complete any more; returns why not, or ""."""
        new = self.folder / f"{_LAST}.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _uncomplete(self._path(number))
            own = number if self._goes_on_from is None else min(number, self._goes_on_from)
            new.write_text(f"{own} {number}")
            new.replace(self.folder / _LAST)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _order(self) -> list[int]:
        """The numbers of the complete checkpoints: those that a run has left as it went back, then its own."""
        try:
            found = [int(number) for number in (self.folder / _LAST).read_text().split()]
            own, last = found[0], found[-1]  # an earlier version wrote one number
        except (FileNotFoundError, ValueError, IndexError):  # or the machine lost its power
            return self.numbers()
        return sorted(self.numbers(), key=lambda number: (number == last, number <= own, number))

    def _remove(self) -> None:
        """Remove the checkpoints that are too many; all ranks find the same ones afterwards."""
        from torch import distributed

        if self._is_first():
            complete = self._order()
            for number, path in self._all().items():
                if number not in complete[-self._keep :] and (number < complete[-1] or number in complete):
                    with suppress(OSError):  # as of the others below
                        _uncomplete(path)
                    shutil.rmtree(path, ignore_errors=True)
        if self._group is not None:
            distributed.barrier(self._group)


_NAME = "checkpoint-"
_WRITTEN_LAST = ".metadata"  # of a folder of DCP
_LAST = ".last"  # two numbers: those up to the first are this run's; the second was saved last, or is about to be
_STATE = "optimizer.state."  # before the name of a weight
_ONE_PROCESS = "torch.distributed is disabled, unavailable or uninitialized"  # a warning, of what is intended


@contextmanager
def _silent_about_one_process() -> Iterator[None]:
    """Suppress torch's warning that a single process saves and loads, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ONE_PROCESS)
        yield


@contextmanager
def _failing_as_error(what: str) -> Iterator[None]:
    """Raise RuntimeError for what torch raises if a rank has failed, a BaseException that names no reason."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())
        said = "; ".join(f"rank {rank}: {type(why).__name__}: {why}" for rank, (why, _) in failures)
        raise RuntimeError(f"{what}: {said}") from error


def _is_container(value: object) -> bool:
    return isinstance(value, (Mapping, list))


def _whole(more: dict[str, Any]) -> dict[str, Any]:
    """Further values in a form in which DCP saves each whole: of dicts it would load the keys alone that it is given.

    Dicts of tensors stay as they are, as a tensor may have parts on several ranks.
    """
    formed = {
        name: (value,) if _is_whole(value) or (_is_container(value) and not _has_tensors(value)) else value
        for name, value in more.items()
    }
    for name, value in formed.items():
        _refuse_left_out(f"more.{name}", value)
    return formed


def _is_whole(value: object, wanted: object = None) -> bool:
    """Whether a value has the form of `_whole`, or of a tuple that was saved as it is and wanted as a tuple."""
    if not isinstance(value, tuple) or len(value) != 1:
        return False
    return _is_whole(value[0]) or (_is_container(value[0]) and not isinstance(wanted, tuple))


def _to_fill(more: dict[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Further values in the form in which DCP fills each with what a checkpoint has by its name."""
    import torch

    filled = dict(more)
    for name, value in more.items():
        found: Any = saved.get(f"more.{name}")
        if parts := [key for key in saved if key.startswith(f"more.{name}.")]:
            _refuse_left_out(f"more.{name}", value, parts)
        elif _is_container(value) and found is not None:
            filled[name] = (value,)
        elif value is None and hasattr(found, "size"):  # a tensor
            filled[name] = torch.empty(found.size, dtype=found.properties.dtype)
    return filled


def _refuse_left_out(name: str, value: object, saved: Iterable[str] = ()) -> None:
    """Raise UsageError for values that DCP leaves out without an error, of a value that has tensors.

    Args:
        name: The name of the value in a checkpoint.
        value: The value, to be saved or filled.
        saved: The names that the checkpoint has, if it is to be filled.
    """
    if value is None or (_is_container(value) and not value):
        for found in [one for one in saved if one.startswith(f"{name}.")][:1]:
            raise UsageError(
                f"the checkpoint has {found!r}, but {name!r} is {value!r}; as there are tensors beside it, give what "
                "is to be loaded: a dict or list with the same keys, and tensors of their shapes"
            )
    for key, item in _items(value):
        if isinstance(value, Mapping) and not isinstance(key, str) and not _is_of_tensors(item):
            raise UsageError(
                f"{name!r} has tensors, and under the key {key!r} other values, which would be loaded under "
                f"{str(key)!r}; make the key a text"
            )
        _refuse_left_out(f"{name}.{key}", item, saved)


def _items(value: Any) -> list[tuple[Any, Any]]:
    """The items of a dict or list, each with its key or place; none of another value."""
    return [*(value.items() if isinstance(value, Mapping) else enumerate(value))] if _is_container(value) else []


def _is_of_tensors(value: object) -> bool:
    from torch import Tensor

    return isinstance(value, Tensor) or (
        _is_container(value) and all(_is_of_tensors(item) for _, item in _items(value))
    )


def _has_tensors(value: object) -> bool:
    from torch import Tensor

    items = _items(list(value) if isinstance(value, tuple) else value)
    return isinstance(value, Tensor) or any(_has_tensors(item) for _, item in items)


def _saved_in(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The metadata of what a checkpoint has, by name; none if it cannot be read, as loading it says."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        saved: Mapping[str, Any] = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception:  # of the system, or of a file that is no pickle: an error of one rank would leave others waiting
        return {}
    return saved


def _uncomplete(path: str | os.PathLike[str]) -> None:
    """Have a folder be no complete checkpoint, before its files change."""
    with suppress(FileNotFoundError, NotADirectoryError):
        Path(path, _WRITTEN_LAST).unlink()


def _planner(path: str | os.PathLike[str]) -> Any:
    """A planner of DCP that has rank 0 write what several ranks save of further values, in place of any of them.

    It plans on rank 0, before any rank writes; so it also ends a checkpoint that is overwritten.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    class OfRank0(DefaultSavePlanner):  # type: ignore[misc]  # torch is not typed here
        def create_global_plan(self, all_plans: list[Any]) -> Any:
            _uncomplete(path)
            own = {item.index for item in all_plans[0].items if item.index.fqn.startswith("more.")}
            others = [
                dataclasses.replace(plan, items=[item for item in plan.items if item.index not in own])
                for plan in all_plans[1:]
            ]
            return super().create_global_plan([all_plans[0], *others])

    return OfRank0()


def _state(model: Module, optimizer: Optimizer | None, more: dict[str, Any]) -> dict[str, Any]:
    """The state that DCP saves, or fills."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state = {"model": get_model_state_dict(model), "more": dict(more)}
    if optimizer is not None:
        with _as_it_is(optimizer):
            state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_by_parameter())
    return state


@contextmanager
def _as_it_is(optimizer: Optimizer) -> Iterator[None]:
    """Have torch leave an optimizer alone that has no state: it makes one by a step, unless a weight has a gradient."""
    import torch

    weights = _weights(optimizer)
    if optimizer.state or any(weight.grad is not None for weight in weights):
        yield
        return
    smallest = min(weights, key=torch.Tensor.numel)
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


def _make_room(model: Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Have an optimizer hold a state of the weights for which a checkpoint has one, and of no others."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    weights = _weights(optimizer)
    with _as_it_is(optimizer):
        groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    names = [name for group in groups for name in group["params"]]
    beginnings = {key[:n] for key in saved for n, letter in enumerate(key) if letter == "."}
    have_state = set(weights)
    if len(names) == len(weights):  # but where the first version of FSDP has joined weights
        have_state = {weight for name, weight in zip(names, weights, strict=True) if _STATE + name in beginnings}
    if not all(optimizer.state.get(weight) for weight in have_state):
        gradients = [weight.grad for weight in weights]
        optimizer.state.clear()
        try:
            for weight in weights:
                weight.grad = None  # else torch makes no state
            get_optimizer_state_dict(model, optimizer)
        finally:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
    for weight in weights:
        if weight not in have_state:
            optimizer.state.pop(weight, None)


def _weights(optimizer: Optimizer) -> list[Any]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _by_parameter() -> StateDictOptions:
    """Options that key an optimizer's state by parameter name, as parameter groups may differ between meshes."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)
