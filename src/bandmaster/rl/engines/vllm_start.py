"""Starts vLLM in a worker: its environment, the place of the rank in its replica, and the engine."""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bandmaster import Mesh, UsageError, Worker
from bandmaster.rl.engines.vllm_plugin import PARENT, WEIGHTS
from bandmaster.rl.meshes import start_torch_distributed

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no more processes than an engine needs, and none for one of several ranks
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all replicas of a host bind their threads to the same cores
    "VLLM_LOGGING_LEVEL": "WARNING",  # vLLM says much as it starts, and each rank would
    "VLLM_NO_USAGE_STATS": "1",  # nothing is sent elsewhere
}
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_NAME = "bandmaster_shared_memory_name"  # in vLLM's additional_config
OF_THE_MESH = ("tensor_parallel_size", "distributed_executor_backend")


class Replica(NamedTuple):
    """The place of a rank in the replica whose engine it is, or is a part of.

    Attributes:
        number: The number of the replica, from 0.
        n_ranks: The ranks of a replica.
        ranks: Those of this one.
    """

    number: int
    n_ranks: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, worker: Worker) -> Replica:
        """The replica of a worker: the ranks that differ from it only along ``tp``, or ``gen_tp`` of a refined mesh.

        Raises:
            UsageError: The ranks of a replica do not follow each other.
        """
        if (axis := axis_of_ranks(worker.mesh)) is None:
            return cls(worker.rank, 1, (worker.rank,))
        groups = [tuple(ranks) for ranks in worker.mesh.groups(axis)]
        number = next(number for number, ranks in enumerate(groups) if worker.rank in ranks)
        ranks = groups[number]
        if ranks != tuple(range(ranks[0], ranks[0] + len(ranks))):
            raise UsageError(
                f"the ranks {list(ranks)} of a replica along {axis} do not follow each other, as vLLM needs; put "
                f"{axis} last, as in Mesh(dp=..., {axis}={len(ranks)})"
            )
        return cls(number, len(ranks), ranks)


def axis_of_ranks(mesh: Mesh) -> str | None:
    """The axis along which several ranks make up one replica; None if each rank is a replica."""
    axis = "gen_tp" if "gen_tp" in mesh.axis_names else "tp"
    return axis if axis in mesh.axis_names and mesh.axis_size(axis) > 1 else None


def async_llm(options: dict[str, Any], tool_parser: str | None) -> Any:
    """The engine of a replica that is one rank: vLLM's ``AsyncLLM``, whose model runs in a child process.

    Raises:
        UsageError: vLLM has no such parser.
    """
    _prepare()
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    made = AsyncEngineArgs(**_with_weights(options))  # which loads vLLM's plugins, that may have parsers
    _check_parsers(tool_parser, None if made.reasoning_parser_plugin else made.reasoning_parser)
    engine = AsyncLLM.from_engine_args(made)
    gc.collect()
    gc.freeze()  # else collections among all that vLLM imports hold up its requests, for 0.4 s at a time
    return engine


def _check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Check the names of parsers, before the engine loads a model, which takes minutes."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    of_tools, of_reasoning = ToolParserManager.list_registered(), ReasoningParserManager.list_registered()
    for option, name, known in (
        ("tool_parser", tool_parser, of_tools),
        ("reasoning_parser", reasoning_parser or None, of_reasoning),
    ):
        if name is not None and name not in known:
            raise UsageError(f"vLLM has no {option} {name!r}; it has {', '.join(known)}")


def llm_of_ranks(worker: Worker, replica: Replica, options: dict[str, Any]) -> Any:
    """The engine of one of the ranks of a replica, which work together. Collective.

    Raises:
        UsageError: An option contradicts the mesh.
    """
    for name in OF_THE_MESH:
        if name in options:
            raise UsageError(f"{name} follows from the {replica.n_ranks} ranks of a replica along tp; leave it out")
    _prepare()
    start_torch_distributed(worker)
    name = ""
    if worker.device == "cpu":
        name = _agreed_name()
        more = {**options.get("additional_config", {}), SHARED_MEMORY_NAME: name}
        options = {**options, "worker_cls": "bandmaster.rl.engines.vllm_cpu.NamedCPUWorker", "additional_config": more}
    from vllm import LLM

    options = _with_weights(options)
    try:
        return LLM(**options, tensor_parallel_size=replica.n_ranks, distributed_executor_backend="external_launcher")
    finally:
        if name:
            _unlink_shared_memory(name, replica.ranks)


def _with_weights(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the way in which weights come, unless they say another one."""
    from vllm.config import WeightTransferConfig

    return {"weight_transfer_config": WeightTransferConfig(backend=WEIGHTS), **options}


def _prepare() -> None:
    """Set the environment, before vLLM is imported.

    Raises:
        ImportError: vLLM is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[PARENT] = str(os.getpid())
    try:
        import vllm.version  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "rl.VLLM needs vLLM, which the worker cannot import: pip install 'bandmaster[vllm]'; for CPUs, see "
            "docs/engines.md"
        ) from error


def _agreed_name() -> str:
    """A name that all ranks of the group have, and no other group. Collective."""
    import torch.distributed as dist

    agreed = [f"bandmaster-{secrets.token_hex(8)}"]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def _unlink_shared_memory(name: str, ranks: Sequence[int]) -> None:
    """Remove the files of a replica's shared memory. All of its ranks have mapped them by now, and use them on."""
    group = f"[{'-'.join(map(str, ranks))}]"
    for file in SHARED_MEMORY.iterdir():
        if file.name.startswith(name) and group in file.name:
            file.unlink(missing_ok=True)  # the other ranks do the same
