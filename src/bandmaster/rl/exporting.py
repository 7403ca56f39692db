"""Models in the format of Hugging Face, written by all ranks of a group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandmaster import UsageError
from bandmaster.rl.local_tensors import tensors_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FILE_NBYTES = 5_000_000_000
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def export(
    folder: str | os.PathLike[str],
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    file_nbytes: int = FILE_NBYTES,
) -> None:
    """Write a model as `from_pretrained` of `transformers`, and vLLM, load it, whatever its layout.

    Collective, if ``torch.distributed`` is initialised: all ranks call it. The files are shared out among the ranks. A
    rank has one whole tensor on its device at a time, and those of one file in the memory of its host; the controller
    has nothing. The configuration and the index are written last, so that a folder with them is complete.

    Args:
        folder: A folder that all ranks can reach; it is made if need be, and a model in it is overwritten.
        model: A model of `transformers`; with FSDP2 or tensor parallelism, its parameters are ``DTensor``.
        tokenizer: What else the folder has to have: anything with ``save_pretrained``.
        dtype: The dtype of tensors of floating-point numbers in the files; by default each keeps its own.
        file_nbytes: What a file has at most, unless one tensor has more.

    Raises:
        UsageError: The model has no configuration of `transformers`, or ``file_nbytes`` is less than 1.

    Source: the folder is that of ``PreTrainedModel.save_pretrained``.
    """
    from torch import distributed

    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        raise UsageError(
            f"the model to export must be one of transformers, which has a config, got {type(model).__name__}; "
            "rl.save writes any model as a checkpoint"
        )
    if file_nbytes < 1:
        raise UsageError(f"file_nbytes must be at least 1, got {file_nbytes}")
    ranks = _Ranks()
    path = Path(folder)
    if ranks.rank == 0:
        _clear(path)
    ranks.meet()
    tensors = tensors_of(model)
    sizes = {name: tensor.numel() * _element_nbytes(tensor, dtype) for name, tensor in tensors.items()}
    written = _write_files(path, model, tensors, dtype, files_of(sizes, file_nbytes), ranks)
    gathered: list[Any] = [written]
    if ranks.world_size > 1:
        gathered = [None] * ranks.world_size
        distributed.all_gather_object(gathered, written)
    if ranks.rank == 0:
        _complete(path, model, tokenizer, dtype, gathered)
    ranks.meet()


def files_of(sizes: Mapping[str, int], file_nbytes: int) -> list[list[str]]:
    """The names of the tensors of each file, in their order.

    Example:
        >>> files_of({"a": 4, "b": 3, "c": 9, "d": 1}, 8)
        [['a', 'b'], ['c'], ['d']]
    """
    files: list[list[str]] = []
    room = 0
    for name, nbytes in sizes.items():
        if not files or nbytes > room:
            files.append([])
            room = file_nbytes
        files[-1].append(name)
        room -= nbytes
    return files


class _Ranks:
    """The ranks that export together; a single one without ``torch.distributed``."""

    def __init__(self) -> None:
        from torch import distributed

        is_several = distributed.is_initialized()
        self.rank = distributed.get_rank() if is_several else 0
        self.world_size = distributed.get_world_size() if is_several else 1

    def meet(self) -> None:
        """Wait for all ranks."""
        from torch import distributed

        if self.world_size > 1:
            distributed.barrier()


def _clear(path: Path) -> None:
    """Remove the files of a model that is overwritten, the index first."""
    path.mkdir(parents=True, exist_ok=True)
    for name in (INDEX, "config.json"):
        (path / name).unlink(missing_ok=True)
    for file in path.glob("model*.safetensors"):
        file.unlink()


def _element_nbytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return int(kept.itemsize)


def _write_files(
    path: Path,
    model: Any,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    files: list[list[str]],
    ranks: _Ranks,
) -> dict[str, tuple[str, int]]:
    """Write this rank's files. Returns the file and the bytes of each tensor in them, by its name there."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, tuple[str, int]] = {}
    for number, names in enumerate(files):
        is_own = number % ranks.world_size == ranks.rank
        kept = dict(_whole(tensors, names, dtype, is_own))
        if not is_own:
            continue
        kept = revert_weight_conversion(model, kept)
        kept = {name: tensor.contiguous() for name, tensor in kept.items()}
        file = ONE_FILE if len(files) == 1 else f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        save_file(kept, path / file, metadata={"format": "pt"})
        found.update((name, (file, tensor.nbytes)) for name, tensor in kept.items())
    return found


def _whole(
    tensors: Mapping[str, Tensor], names: Iterable[str], dtype: torch.dtype | None, is_own: bool
) -> Iterable[tuple[str, Tensor]]:
    """Yield whole tensors in the memory of the host, if this rank writes them. Collective: all ranks gather them."""
    for name in names:
        tensor: Any = tensors[name].detach()
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if is_own:
            wanted = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            yield name, whole.to("cpu", wanted, copy=True)


def _complete(
    path: Path, model: Any, tokenizer: Any, dtype: torch.dtype | None, gathered: list[dict[str, tuple[str, int]]]
) -> None:
    """Write what is there once: the tokenizer, the index, the configuration."""
    from copy import deepcopy

    for part in (tokenizer, getattr(model, "generation_config", None)):
        if part is not None:
            part.save_pretrained(path)
    found = {name: place for part in gathered for name, place in part.items()}
    if len({file for file, _ in found.values()}) > 1:
        total = sum(nbytes for _, nbytes in found.values())
        files = {name: file for name, (file, _) in sorted(found.items())}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = deepcopy(model.config)
    if dtype is not None:
        config.dtype = dtype
    if not getattr(config, "architectures", None):
        config.architectures = [_plain_class(model).__name__]
    config.save_pretrained(path)


def _plain_class(model: Any) -> type:
    """The class of a model as `transformers` has it; `fully_shard` gives it one of its own."""
    return next(cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers."))
