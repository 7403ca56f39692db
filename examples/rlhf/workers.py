"""The workers: an actor that generates and trains, a frozen reference, a critic, and a reward by verification."""

from __future__ import annotations

import os
from collections.abc import Mapping

import addition
import losses
import models
import sampling
import torch
from random_rows import uniform
from torch import Tensor, nn
from training import Trainer
from transformers import AutoTokenizer

import bandmaster as bm
from bandmaster import Dispatch, Only, Split, TransferProtocol, register, rl

__all__ = ["Actor", "Critic", "Reference", "Reward"]

Rows = dict[str, Tensor]
# Rows go to the ranks along dp, so that all have about equally many tokens; each rank returns the same numbers.
UPDATE = TransferProtocol(Split("dp", balance="n_tokens"), Only())
N_TOKENS = addition.N_RESPONSE
FAILS = 1 << 20  # which draw of a row says whether its generation fails


class Trained(bm.Worker):
    """A worker with a model in training."""

    trainer: Trainer

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path: str, step: int) -> None:
        """Save model and optimizer in a folder."""
        self.trainer.save(path, step=step)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path: str) -> int:
        """Load them on any mesh; the step at which they were saved."""
        return int(self.trainer.load(path, step=0)["step"])

    @register(Dispatch.ONE_TO_ALL)
    def forget(self) -> None:
        """Begin with a new optimizer."""
        self.trainer.forget()


class LanguageModel(rl.HoldsWeights, bm.Worker):
    """What actor and reference have in common: a model, cut along tp, and the log-probabilities that it gives.

    Args:
        name: A model's hub name or local path; None for the tiny Llama.
        seed: Of its random weights.
    """

    def __init__(self, name: str | None = None, seed: int = 0) -> None:
        torch.set_num_threads(1)  # ranks share the cores of a machine, and one thread always adds up in the same order
        self.tokenizer = addition.Tokenizer(name)
        self.model = models.parallel(models.language_model(name, seed), self, "tp")

    def weights(self) -> Mapping[str, Tensor]:
        return self.model.state_dict()

    @register(Dispatch.THREE_D_PROTO)
    def log_probs(self, rows: Rows) -> Rows:
        """The log-probabilities of the answers' tokens, float32 (rows, tokens)."""
        with torch.no_grad():
            return {"log_probs": sampling.log_probs(self.model, rows["tokens"], N_TOKENS)}


class Reference(LanguageModel):
    """The policy before training, which never changes."""


class Actor(LanguageModel, Trained):
    """The policy. It trains in the layout of the axes dp and tp, and generates in that of gen_tp and micro_dp.

    Args:
        name: As for the reference.
        seed: As for the reference.
    """

    def __init__(self, name: str | None = None, seed: int = 0) -> None:
        super().__init__(name, seed)
        self.trainer = Trainer(self, self.model)
        self.rollout = models.parallel(models.language_model(name, seed), self, "gen_tp")
        self.engine = rl.HybridEngine(self, self.model, self.rollout)
        self.name = name

    @register(Dispatch.ONE_TO_ALL)
    def export(self, path: str) -> None:
        """Write the model as transformers and vLLM load it."""
        rl.export(path, self.model, tokenizer=AutoTokenizer.from_pretrained(self.name) if self.name else None)

    @register(Dispatch.THREE_D_ALL_MICRO_DP)
    def generate(self, prompts: Rows, temperature: float = 1.0) -> Rows:
        """Answer prompts.

        Args:
            prompts: ``prompt``: int64 (rows, tokens); ``seed``: int64 (rows,).
            temperature: 0 for the most probable answers.

        Returns:
            ``tokens``: int64, prompts and answers; ``mask`` of the answers' tokens and their ``log_probs``, float32;
            ``n_tokens`` of each answer.
        """
        with self.engine:
            return answered(self.rollout, self.tokenizer, prompts, temperature)

    @register(Dispatch.THREE_D_PROTO)
    def log_probs_error(self, rows: Rows) -> Rows:
        """How far the log-probabilities of rows are from those of this model, at most: float32 (rows,)."""
        new = self.log_probs(rows)["log_probs"]
        return {"log_probs_error": ((new - rows["log_probs"]) * rows["mask"]).abs().amax(dim=1)}

    @register(UPDATE)
    def imitate(self, rows: Rows, lr: float) -> dict[str, float]:
        """Make the answers of rows more probable."""
        new = sampling.log_probs(self.model, rows["tokens"], rows["mask"].shape[1])
        return self.trainer.step(-(new * rows["mask"]).sum(), rows["mask"].sum(), lr)

    @register(UPDATE)
    def update(self, rows: Rows, lr: float, clip: float, kl_weight: float = 0.0) -> dict[str, float]:
        """One clipped policy-gradient step, on rows with ``advantages`` and the ``reference``'s log-probabilities."""
        mask = rows["mask"]
        new = sampling.log_probs(self.model, rows["tokens"], mask.shape[1])
        kl = losses.kl(new, rows["reference"], mask)
        loss = losses.policy_loss(new, rows["log_probs"], rows["advantages"], mask, clip) + kl_weight * kl
        return self.trainer.step(loss, mask.sum(), lr, kl=kl)


class Rollout(LanguageModel):
    """A replica of the policy that generates only, with weights that it is given now and then.

    Args:
        name: As for the reference.
        seed: As for the reference.
        failing: Share of the rows whose generation fails, to see what comes of it.
    """

    def __init__(self, name: str | None = None, seed: int = 0, failing: float = 0.0) -> None:
        super().__init__(name, seed)
        self.failing = failing

    @register(Dispatch.REQUEST)
    def generate(self, prompts: Rows, temperature: float = 1.0) -> Rows:
        """Answer prompts on one replica, as `Actor.generate`; each row has the ``version`` of its weights."""
        if self.failing and bool((uniform(prompts["seed"], FAILS, 1) < self.failing).any()):
            raise RuntimeError("a generation fails, as some were asked to")
        rows = answered(self.model, self.tokenizer, prompts, temperature)
        return {**rows, "version": torch.full_like(rows["n_tokens"], self.weights_version or 0)}

    @register(Dispatch.ONE_TO_ALL)
    def process(self) -> int:
        """The number of the worker's process."""
        return os.getpid()

    def on_replace(self, rank: int, state: object) -> None:
        """Nothing: the replicas do not know each other."""


class Critic(rl.HoldsWeights, Trained):
    """Estimates what reward is to be expected at each token.

    Args:
        name: As for the actor.
        seed: Of its random weights.
    """

    def __init__(self, name: str | None = None, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self.model = models.parallel(models.value_model(name, seed), self, "tp")
        self.trainer = Trainer(self, self.model)

    def weights(self) -> Mapping[str, Tensor]:
        """The body, which is that of a language model."""
        return {name: weight for name, weight in self.model.state_dict().items() if name.startswith("model.")}

    @register(Dispatch.THREE_D_PROTO)
    def values(self, rows: Rows) -> Rows:
        """The values before each token of the answers, float32 (rows, tokens)."""
        with torch.no_grad():
            return {"values": self._values(rows["tokens"])}

    @register(Dispatch.THREE_D_PROTO)
    def advantages(self, rows: Rows, kl_weight: float, gamma: float = 1.0, lam: float = 0.95) -> Rows:
        """Advantages with mean 0 and deviation 1 over all ranks, and returns; float32 (rows, tokens) each."""
        mask = rows["mask"]
        rewards = losses.token_rewards(rows["reward"], rows["log_probs"], rows["reference"], mask, kl_weight)
        advantages, returns = losses.gae(rewards, rows["values"], mask, gamma, lam)
        n, total, squares = self.trainer.add_up(torch.stack([mask.sum(), advantages.sum(), advantages.square().sum()]))
        mean = total / n
        deviation = (squares / n - mean.square() + 1e-8).sqrt()
        return {"advantages": (advantages - mean) / deviation * mask, "returns": returns}

    @register(UPDATE)
    def update(self, rows: Rows, lr: float, clip: float) -> dict[str, float]:
        """One step towards the ``returns``, from the ``values`` that were before."""
        new, mask = self._values(rows["tokens"]), rows["mask"]
        return self.trainer.step(losses.value_loss(new, rows["values"], rows["returns"], mask, clip), mask.sum(), lr)

    def _values(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens[:, :-1], use_cache=False).logits[:, -N_TOKENS:, 0]
        return scores


class Reward(bm.Worker):
    """Verifies answers."""

    def __init__(self, name: str | None = None) -> None:
        torch.set_num_threads(1)
        self.tokenizer = addition.Tokenizer(name)

    @register(Dispatch.DP_PROTO)
    def score(self, rows: Rows) -> Rows:
        """1 for each right answer, else 0: float32 (rows,)."""
        return {"reward": addition.verify(self.tokenizer.codes(rows["tokens"]))}


def answered(model: nn.Module, tokenizer: addition.Tokenizer, prompts: Rows, temperature: float) -> Rows:
    """Prompts with the answers of a model."""
    answers = sampling.generate(
        model, prompts["prompt"], prompts["seed"], N_TOKENS, tokenizer.end, tokenizer.pad, temperature
    )
    tokens, mask = torch.cat([prompts["prompt"], answers], dim=1), sampling.mask_of(answers, tokenizer.end)
    with torch.no_grad():
        log_probs = sampling.log_probs(model, tokens, N_TOKENS)
    return {"tokens": tokens, "mask": mask, "log_probs": log_probs, "n_tokens": mask.sum(dim=1).long()}
