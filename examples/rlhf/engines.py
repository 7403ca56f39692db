"""The policy in an inference engine, beside the actor that is trained: `rl.VLLM`, or the toy engine.

The replicas answer as `Actor.generate` does, and get the actor's weights by `rl.WeightSync`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import addition
import sampling
import torch
from options import Options, option
from small_model import write_model
from toy_engine import ToyEngine
from transformers import AutoConfig
from workers import N_TOKENS, Rows

import bandmaster as bm
from bandmaster import Dispatch, register, rl

__all__ = ["ENGINES", "EngineOptions", "engine_class", "model_of", "replicas", "vllm_options"]


@dataclass
class EngineOptions(Options):
    """The options of programs whose answers may come from an engine."""

    engine: str = option("", "what answers: vllm or toy, in processes of its own; by default the actor itself")
    replicas: int = option(1, "replicas of the engine", least=1)


class Answers(rl.Engine):
    """An engine that takes and returns rows as the actor does."""

    tokenizer: addition.Tokenizer

    @register(Dispatch.THREE_D_ALL_MICRO_DP)
    async def generate(self, prompts: Rows, temperature: float = 1.0) -> Rows:
        """Answer prompts; see `Actor.generate`."""
        end, pad = self.tokenizer.end, self.tokenizer.pad
        found = await super().generate(
            prompts, rl.Sampling(max_tokens=N_TOKENS, temperature=temperature, stop_token_ids=[end])
        )
        answers = torch.from_numpy(rl.padded(found["answer"], N_TOKENS, pad))
        return {
            "tokens": torch.cat([prompts["prompt"], answers], dim=1),
            "mask": sampling.mask_of(answers, end),
            "log_probs": torch.from_numpy(rl.padded(found["log_probs"], N_TOKENS)),
            "n_tokens": torch.from_numpy(found["n_tokens"]),
        }


class ToyAnswers(Answers, ToyEngine):
    """The toy engine."""


class VLLMAnswers(Answers, rl.VLLM):
    """vLLM.

    Args:
        model: A model's hub name or local path.
        seed: As of `rl.VLLM`.
        **options: As of `rl.VLLM`.
    """

    def __init__(self, model: str, seed: int = 0, **options: Any) -> None:
        super().__init__(model, seed=seed, **{**vllm_options(model, self.device), **options})
        self.tokenizer = addition.Tokenizer(model)


ENGINES = {"toy": ToyAnswers, "vllm": VLLMAnswers}


def engine_class(known: Mapping[str, type[rl.Engine]], name: str) -> type[rl.Engine]:
    """The engine of a name. Raises SystemExit if there is none."""
    if name not in known:
        raise SystemExit(f"--engine takes {' or '.join(known)}, got {name!r}")
    return known[name]


def vllm_options(model: str, device: str) -> dict[str, Any]:
    """Options with which vLLM computes in the dtype of the trainer, and takes little memory of a CPU's host."""
    dtype = str(AutoConfig.from_pretrained(model).dtype).removeprefix("torch.")
    small = {"enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 1 << 27} if device == "cpu" else {}
    return {"dtype": dtype, **small}


@contextmanager
def model_of(options: EngineOptions) -> Iterator[str | None]:
    """The model's hub name or path; None for the tiny Llama, which is written to a folder if an engine has to load it.

    Raises:
        SystemExit: There is no such engine.
    """
    if options.engine:
        engine_class(ENGINES, options.engine)
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        is_written = options.engine and not options.model
        yield write_model(Path(folder), options.seed) if is_written else options.model or None


@contextmanager
def replicas(options: EngineOptions, model: str | None) -> Iterator[Any]:
    """The replicas of an engine; None without one."""
    if not options.engine:
        yield None
        return
    with options.pool(options.replicas) as pool:
        mesh = bm.Mesh(dp=options.replicas, tp=1)
        yield bm.WorkerGroup(pool, engine_class(ENGINES, options.engine), model, options.seed, mesh=mesh)
