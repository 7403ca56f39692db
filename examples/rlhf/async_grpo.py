"""GRPO in which answers to the next prompts are generated while the policy is updated with the last ones.

Replicas of the policy take prompts in small chunks, whoever is free; a chunk that fails is left out, with all answers
to its prompts. Rows say which version of the policy has answered them. A replica that dies is replaced, and
takes the actor's weights, as the others do. The whole dataflow is `train`.

    python examples/rlhf/async_grpo.py
    python examples/rlhf/async_grpo.py --max-staleness 0                    # one after the other, to compare
    python examples/rlhf/async_grpo.py --rollouts 2 --failing 0.01 --kill-at 5
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from losses import group_advantages
from options import Options, of_command_line, option, placed
from running import Run
from workers import Actor, Reference, Reward, Rollout

import bandmaster as bm
from bandmaster import rl


@dataclass
class AsyncOptions(Options):
    """The options of asynchronous GRPO."""

    train: str = option("dp=1", "training layout of the models: sizes of dp and tp, such as dp=2,tp=2")
    eval_every: int = option(5, "steps between two evaluations on held-out problems; 0 for the last alone", least=0)
    rollouts: int = option(1, "replicas of the policy that generate", least=1)
    max_staleness: int = option(1, "updates that the policy may have had since it answered", least=0)
    chunk: int = option(64, "answers that a replica makes at a time; those to the same prompt stay together", least=1)
    failing: float = option(0.0, "share of the answers whose generation fails, to see what comes of it")
    kill_at: int = option(0, "step at which a replica is killed, to see what comes of it")


DEFAULTS = AsyncOptions


def train(run: Run, options: AsyncOptions, actor: Any, reference: Any, reward: Any, rollout: Any) -> None:
    """Train the actor."""
    done = run.begin(rl.WeightSync(actor, reference))
    to_rollout = rl.WeightSync(actor, rollout)
    synced = to_rollout.submit(version=done)
    generate = partial(rollout.generate.map, chunk=options.chunk, group_by="uid", on_error="return")
    ahead = min(options.max_staleness, options.steps - done)
    asked = deque(generate(run.prompts(done + 1 + step)) for step in range(ahead))
    for metrics in run.steps(done):
        step = int(metrics["step"])
        if error := synced.exception():
            heal(rollout, [error], to_rollout, step - 1)
        if step == options.kill_at:
            os.kill(rollout.process()[0], signal.SIGKILL)
        if step + ahead <= options.steps:
            asked.append(generate(run.prompts(step + ahead)))
        chunks = list(asked.popleft())
        while not (rows := without_failures(chunks)):
            heal(rollout, [chunk.exception() for chunk in chunks], to_rollout, step - 1)
            chunks = list(generate(run.prompts(step)))
        scores = reward.score.submit(rows)
        known = reference.log_probs.submit(rows).rename(log_probs="reference")
        rewards = scores.result()["reward"]
        advantages = group_advantages(rewards, options.n_samples)
        rows = rows.join(known).join(actor.put({"advantages": advantages[:, None]}))
        batches = rows.shuffle(seed=step).batches(-(-len(rows) // options.n_batches))
        updates = [actor.update.submit(batch, options.lr, options.clip, options.kl_weight) for batch in batches]
        synced = to_rollout.submit(version=step)  # after the updates, between two chunks of each replica
        metrics.update({name: fmean(update.result()[name] for update in updates) for name in ("loss", "kl", "norm")})
        staleness = step - 1 - rows.select("version").result()["version"].double()
        metrics.update(reward=float(rewards.mean()), staleness=float(staleness.mean()))
        metrics["failed"] = sum(len(chunk.numbers) for chunk in chunks) - len(rows)


def without_failures(chunks: Sequence[Any]) -> Any:
    """The rows of the chunks that have not failed, which hold all answers to a prompt or none; None if all have."""
    good = [chunk for chunk in chunks if chunk.exception() is None]
    return bm.concat(good) if good else None


def heal(rollout: Any, errors: Sequence[Any], to_rollout: rl.WeightSync, version: int) -> None:
    """Replace a replica that has died, and give all replicas the actor's weights, which have this version.

    Raises:
        Exception: The first of the errors, if none comes from a death, or from the calls that a replacement cancels.
    """
    if not any(isinstance(error, (bm.WorkerDied, bm.CallCancelled)) for error in errors):
        raise errors[0]
    deaths = [error for error in errors if isinstance(error, bm.WorkerDied)]
    if deaths and not rollout.healthy:
        rollout.replace(deaths[-1].rank)
        to_rollout(version=version)


def run(options: AsyncOptions) -> Run:
    """Place the models, and train."""
    model, replicas = options.model or None, bm.Mesh(dp=options.rollouts, tp=1)
    roles = {
        "actor": (Actor, model, options.seed),
        "reference": (Reference, model, options.seed),
        "reward": (Reward, model),
    }
    with (
        placed(options, **roles) as groups,
        options.pool(options.rollouts) as pool,
        bm.WorkerGroup(pool, Rollout, model, options.seed, options.failing, mesh=replicas) as rollout,
        Run(options, groups.actor, groups.reward) as running,
    ):
        train(running, options, groups.actor, groups.reference, groups.reward, rollout)
    return running


if __name__ == "__main__":
    run(of_command_line(DEFAULTS(), __doc__)).report()
