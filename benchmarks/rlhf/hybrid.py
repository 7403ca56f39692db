"""What do weights cost on their way to vLLM, if it shares the trainer's ranks, and if it has ranks of its own?

Two ranks train a Llama of 26 million parameters in float32, cut over tp, and two replicas of vLLM take its weights in
float32 after each step: in the processes of the trainer, with turns around both (`bandmaster.colocate`), or beside it.
After each sync the greedy answers have to be those of the trainer's weights: their first tokens, on a GPU, where vLLM
multiplies less exactly. Medians of all steps but the first.
With --gpu, one rank of each is on one GPU, the model has 400 million parameters, and each step brings the weights
twice: by way of the host, and by ``share=True``.

    PYTHONPATH=src .vllm/bin/python benchmarks/rlhf/hybrid.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "rlhf"))

import models
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bandmaster as bm
from bandmaster import Dispatch, register, rl

PROMPTS, GREEDY = [[5, 6, 7], [14, 8, 9]], rl.Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


class Trainer(rl.HoldsWeights):
    """A model whose weights change."""

    def __init__(self, path: str) -> None:
        if self.device == "cpu":
            torch.set_num_threads(1)
        self.model = models.parallel(models.language_model(path, 0).to(self.device), self, "tp")

    @register(Dispatch.ONE_TO_ALL)
    def step(self, number: int) -> None:
        """Change all weights, alike on ranks that have the same part."""
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.mul_(1 + 0.01 * number)

    @register(Dispatch.ONE_TO_ALL)
    def greedy(self, prompt: list[int], n_tokens: int) -> list[int]:
        """The most probable tokens."""
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(n_tokens):
                tokens.append(int(self.model(torch.tensor([tokens], device=self.device)).logits[0, -1].argmax()))
        return tokens[len(prompt) :]


class Rollout(rl.VLLM):
    """An engine of the trainer's dtype, with little memory."""

    def __init__(self, path: str) -> None:
        small = {"enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 27}
        super().__init__(
            path, dtype="float32", skip_tokenizer_init=True, enable_sleep_mode=self.device != "cpu", **small
        )


class Sharing(Rollout):
    """An engine that sleeps in the turns of the trainer."""

    async def on_yield(self) -> None:
        await self.sleep()

    async def on_resume(self) -> None:
        await self.wake()


PARTS = "to the trainer", "to both", "sync", "sync, shared", "to the engine"
TRAIN, ANSWER = bm.Mesh(dp=1, tp=2), bm.Mesh(dp=2, tp=1)


@contextmanager
def placed(way: str, path: str, has_gpu: bool) -> Iterator[tuple[Any, Any]]:
    """The trainer and the engine, on the same ranks or apart."""
    train, answer = (bm.Mesh(dp=1, tp=1),) * 2 if has_gpu else (TRAIN, ANSWER)
    with ExitStack() as stack:
        pool = stack.enter_context(bm.ResourcePool([train.size], use_gpu=has_gpu))
        if way == "together":
            meshes = {"actor": train, "rollout": answer}
            both = bm.colocate(pool, meshes=meshes, actor=(Trainer, path), rollout=(Sharing, path))
            yield both.actor, both.rollout
        else:
            other = pool if has_gpu else stack.enter_context(bm.ResourcePool([answer.size]))
            yield bm.WorkerGroup(pool, Trainer, path, mesh=train), bm.WorkerGroup(other, Rollout, path, mesh=answer)


def measure(way: str, path: str, steps: int, has_gpu: bool) -> dict[str, list[float]]:
    """Seconds of each part of each step."""
    found: dict[str, list[float]] = {name: [] for name in PARTS}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        found[name].append(time.perf_counter() - begun)

    def turn(group: Any, *others: Any) -> Any:
        return group.turn(*others) if way == "together" else nullcontext()

    with placed(way, path, has_gpu) as (actor, rollout):
        with turn(actor, rollout):
            sync = rl.WeightSync(actor, rollout)
            shared = rl.WeightSync(actor, rollout, share=True) if has_gpu else sync
        for step in range(1, steps + 1):
            with ExitStack() as stack:
                with timed("to the trainer"):
                    stack.enter_context(turn(actor))
                actor.step(step)
                expected = [actor.greedy(prompt, 4)[0] for prompt in PROMPTS]
            with ExitStack() as stack:
                with timed("to both"):
                    stack.enter_context(turn(actor, rollout))
                with timed("sync"):
                    sync(version=step)
                if has_gpu:
                    with timed("sync, shared"):
                        shared(version=step)
            with ExitStack() as stack:
                with timed("to the engine"):
                    stack.enter_context(turn(rollout))
                answers = rollout.generate({"prompt": PROMPTS}, GREEDY)["answer"]
                n = 1 if has_gpu else 4
                assert [one.tolist()[:n] for one in answers] == [one[:n] for one in expected], (answers, expected)
    return found


def main() -> None:
    """Measure both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--gpu", action="store_true", help="one rank of each, on one GPU")
    known = parser.parse_args()
    width = 64 if known.smoke else 2048 if known.gpu else 512
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=6,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        initializer_range=0.1,
        max_position_embeddings=64,
    )
    print(f"| | {' | '.join(PARTS)} |", "| --- " * (len(PARTS) + 1) + "|", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        for way in ("together", "apart"):
            found = measure(way, folder, known.steps, known.gpu)
            told = [f"{statistics.median(found[name][1:]) * 1000:.0f} ms" if found[name] else "" for name in PARTS]
            print(f"| {way} | {' | '.join(told)} |", flush=True)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, float32, torch {torch.__version__}")


if __name__ == "__main__":
    main()
