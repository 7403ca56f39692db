"""PPO: a critic says what reward is to be expected at each token, and advantages are estimated with it (GAE).

The whole dataflow is `train`; everything else that a run needs is in the other files of this folder.

    python examples/rlhf/ppo.py
    python examples/rlhf/ppo.py --train dp=2,tp=2 --generate tp=1 --placement split --backend ray

Source: Schulman et al., arXiv 1707.06347; the dataflow over four models: HybridFlow, arXiv 2409.19256, figure 6.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from options import Options, of_command_line, option, placed
from running import Run
from workers import Actor, Critic, Reference, Reward

from bandmaster import rl


@dataclass
class PPOOptions(Options):
    """The options of PPO; ``kl_weight`` is that of the divergence in the rewards."""

    n_prompts: int = option(512, "prompts per step", least=1)
    n_samples: int = option(1, "answers to each prompt", least=1)
    critic_lr: float = option(1e-3, "learning rate of the critic")
    value_clip: float = option(0.2, "how far a value may move in a step")


DEFAULTS = PPOOptions


def train(run: Run, options: PPOOptions, actor: Any, reference: Any, critic: Any, reward: Any) -> None:
    """Train the actor and the critic."""
    to_reference, to_critic = rl.WeightSync(actor, reference), rl.WeightSync(actor, critic)
    start = run.begin(lambda: (to_reference(), to_critic()), critic=critic)
    for metrics in run.steps(start):
        # Each call returns a handle at once: the rows stay on the ranks that make them, and others read them there.
        rows = actor.generate.submit(run.prompts(metrics["step"]))
        known = reference.log_probs.submit(rows).rename(log_probs="reference")
        rows = rows.join(known).join(critic.values.submit(rows)).join(reward.score.submit(rows))
        rows = rows.join(critic.advantages.submit(rows, options.kl_weight))
        batches = list(rows.shuffle(seed=metrics["step"]).batches(-(-len(rows) // options.n_batches)))
        critic_updates = [critic.update.submit(batch, options.critic_lr, options.value_clip) for batch in batches]
        updates = [actor.update.submit(batch, options.lr, options.clip) for batch in batches]
        metrics.update({name: fmean(update.result()[name] for update in updates) for name in ("loss", "kl", "norm")})
        metrics["value_loss"] = fmean(update.result()["loss"] for update in critic_updates)
        metrics["reward"] = float(rows.select("reward").result()["reward"].mean())


def run(options: PPOOptions) -> Run:
    """Place the models, and train."""
    model = options.model or None
    roles = {
        "actor": (Actor, model, options.seed),
        "reference": (Reference, model, options.seed),
        "critic": (Critic, model, options.seed),
        "reward": (Reward, model),
    }
    with placed(options, **roles) as groups, Run(options, groups.actor, groups.reward) as running:
        train(running, options, groups.actor, groups.reference, groups.critic, groups.reward)
    return running


if __name__ == "__main__":
    run(of_command_line(DEFAULTS(), __doc__)).report()
