"""Agents that call OpenAI's API, and GRPO on what they said: the endpoint between them is the only thing in common.

`Agent` is written with the official client alone: it asks for a sum, and tells how good the answer was. `train` takes
what the endpoint has recorded of each agent's session, as rows for the actor of the other examples, and hands its new
weights to the engine, whose next tokens say so.

    pip install 'bandmaster[rlhf,serve]' openai
    python examples/rlhf/openai_agents.py --steps 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import torch
from addition import N_PROMPT, N_RESPONSE, Tokenizer, answers, problems
from losses import group_advantages
from toy_engine import ToyEngine
from workers import Actor

import bandmaster as bm
from bandmaster import rl
from bandmaster.serve import Endpoint, Episode, rows


class Agent:
    """Asks a model for sums.

    Args:
        client: A client of OpenAI's API.
        session: The name of the episode.
    """

    def __init__(self, client: openai.OpenAI, session: str) -> None:
        self._client, self._headers = client, {"X-Session-ID": session}

    def play(self, a: int, b: int) -> float:
        """The reward: the share of the digits of a sum, and its end, that the model gets right."""
        response = self._client.chat.completions.create(
            model="sums",
            messages=[{"role": "user", "content": f"{a:02}+{b:02}="}],
            max_tokens=N_RESPONSE,
            extra_headers=self._headers,
        )
        said = response.choices[0].message.content or ""
        right = Tokenizer().decode(answers(torch.tensor([a + b]))[0])
        return sum(x == y for x, y in zip(said, right, strict=False)) / max(len(said), len(right))


def batch_of(episodes: Sequence[Episode], rewards: Sequence[float], n_samples: int) -> dict[str, torch.Tensor]:
    """The rows that the actor of the examples learns from: prompts and answers of fixed lengths."""
    columns, width, pad = rows(episodes), N_PROMPT + N_RESPONSE, Tokenizer().pad
    made = {
        "tokens": rl.padded(columns["tokens"], width, pad),
        "mask": rl.padded(columns["mask"], width, dtype=np.float32)[:, N_PROMPT:],
        "log_probs": rl.padded(columns["log_probs"], width)[:, N_PROMPT:],
        "n_tokens": columns["n_tokens"],
    }
    batch = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in made.items()}
    batch["reference"] = batch["log_probs"]  # no penalty for the distance to another model
    batch["advantages"] = group_advantages(torch.tensor(rewards), n_samples)[:, None]
    return batch


def train(steps: int, n_problems: int = 32, n_samples: int = 8, lr: float = 1e-3) -> list[dict[str, Any]]:
    """Train for some steps. Returns their metrics."""
    with (
        bm.ResourcePool([1]) as pool,
        bm.ResourcePool([1]) as servers,
        bm.WorkerGroup(pool, Actor, mesh=bm.Mesh(dp=1, tp=1).refine(gen_tp=1)) as actor,
        bm.WorkerGroup(servers, ToyEngine, mesh=bm.Mesh(dp=1, tp=1)) as rollout,
        Endpoint(rollout, model="sums", record=True) as endpoint,
        openai.OpenAI(base_url=endpoint.url, api_key="any") as client,
        ThreadPoolExecutor(16) as threads,
    ):
        sync, found = rl.WeightSync(actor, rollout), []
        for step in range(steps):
            sync(version=step)
            pairs = problems()[0][step * n_problems : (step + 1) * n_problems].repeat_interleave(n_samples, dim=0)
            names = [f"{step}/{number}" for number in range(len(pairs))]
            rewards = list(threads.map(lambda name, pair: Agent(client, name).play(*pair), names, pairs.tolist()))
            episodes = [episode for name in names for episode in endpoint.take(name)]
            metrics = actor.update(batch_of(episodes, rewards, n_samples), lr, 0.2)
            versions = sorted({int(version) for one in episodes for version in one.versions[one.mask]})
            found.append({"reward": float(np.mean(rewards)), "versions": versions, "loss": metrics["loss"]})
            print(f"step {step}: reward {found[-1]['reward']:.3f} by weights of version {versions}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    train(parser.parse_args().steps)
