"""The checkpoint of vLLM's model: its folder, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bandmaster.rl.engine_weights.checkpoint import checkpoint_files
from bandmaster.rl.engine_weights.staged import StagedWeights
from bandmaster.rl.layout import Spec

FIRST = 0  # the number of the sync of weights that no sync has brought


def model_folder(config: Any) -> Path | None:
    """The folder with the files of a model, which vLLM has downloaded; None if it is not known.

    Args:
        config: vLLM's ``ModelConfig``.
    """
    path = Path(config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, ValueError):
        return None


def checkpoint_weights(folder: Path, specs: Mapping[str, Spec]) -> StagedWeights:
    """Read tensors from the safetensors files of a folder.

    Args:
        folder: The folder.
        specs: The tensors, by name; values are cast to the dtypes.
    """
    from safetensors import safe_open

    weights = StagedWeights(FIRST, specs)
    for file in checkpoint_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                weights[name].copy_(opened.get_tensor(name))
    return weights
