"""GRPO: answers are rewarded relative to other answers to the same prompt.

The whole dataflow is `train`; everything else that a run needs is in the other files of this folder.

    python examples/rlhf/grpo.py
    python examples/rlhf/grpo.py --train dp=2,tp=2 --generate tp=1 --placement split --backend ray
    python examples/rlhf/grpo.py --train dp=1 --engine vllm        # vLLM answers, in processes of its own

Source: DeepSeekMath, arXiv 2402.03300; the placement of models and the hybrid engine: HybridFlow, arXiv 2409.19256.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from engines import EngineOptions, model_of, replicas
from losses import group_advantages
from options import of_command_line, placed
from running import Run
from surviving import SpareOptions, surviving
from workers import Actor, Reference, Reward

from bandmaster import rl


def train(run: Run, options: EngineOptions, actor: Any, reference: Any, reward: Any, engine: Any) -> None:
    """Train the actor, which answers itself, unless there is an engine."""
    start = run.begin(rl.WeightSync(actor, reference))
    to_engine = rl.WeightSync(actor, engine) if engine is not None else None
    for metrics in run.steps(start):
        if to_engine is not None:
            to_engine(version=metrics["step"] - 1)
        # Each call returns a handle at once: the rows stay on the ranks that make them, and others read them there.
        rows = (actor if engine is None else engine).generate.submit(run.prompts(metrics["step"]))
        errors = None if engine is None else actor.log_probs_error.submit(rows)
        scores = reward.score.submit(rows)
        known = reference.log_probs.submit(rows).rename(log_probs="reference")
        rewards = scores.result()["reward"]  # a number per row, while the reference computes: all that comes here
        advantages = group_advantages(rewards, options.n_samples)
        rows = rows.join(known).join(actor.put({"advantages": advantages[:, None]}))
        batches = rows.shuffle(seed=metrics["step"]).batches(-(-len(rows) // options.n_batches))
        updates = [actor.update.submit(batch, options.lr, options.clip, options.kl_weight) for batch in batches]
        means = {name: fmean(update.result()[name] for update in updates) for name in ("loss", "kl", "norm")}
        metrics.update(means, reward=float(rewards.mean()))
        if errors is not None:  # by the numerics of the engine alone, as it has the same weights
            metrics["log_probs_error"] = float(errors.result()["log_probs_error"].max())


DEFAULTS = SpareOptions


def run(options: SpareOptions) -> Run:
    """Place the models, and train."""
    with (
        model_of(options) as model,
        placed(
            options,
            actor=(Actor, model, options.seed),
            reference=(Reference, model, options.seed),
            reward=(Reward, model),
        ) as groups,
        replicas(options, model) as engine,
        Run(options, groups.actor, groups.reward) as running,
    ):
        models = groups.actor, groups.reference, groups.reward, engine
        processes = [*groups.processes, *([] if engine is None else [engine])]
        surviving(options, processes, lambda: train(running, options, *models))
    return running


if __name__ == "__main__":
    run(of_command_line(DEFAULTS(), __doc__)).report()
