"""GRPO of an agent that calls tools: it plays against an endpoint, and the trainer learns from what was said there.

The agent, `calculator_agent.py`, is written with OpenAI's client alone. Its episodes have several turns. They are
recorded at the endpoint, token by token with the version of the weights that chose it, and the next ones are played
while the actor learns from the last ones: what it learns from is at most ``--max-staleness`` updates old.

    python examples/rlhf/agent_grpo.py --engine toy --plot curves.svg
    python examples/rlhf/agent_grpo.py --engine vllm --replicas 2 --kill-at 10
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import openai
import torch
from calculator_agent import solve
from engines import engine_class, vllm_options
from losses import group_advantages
from measuring import measured
from options import Places, of_command_line, option
from plotting import plot
from small_model import write_model
from tool_chat import CHAT_TEMPLATE, WORDS, ChatTokenizer, Question, ToolConversation, demonstrations, questions
from toy_engine import ToyEngine
from workers import Actor

import bandmaster as bm
from bandmaster import rl
from bandmaster.serve import Endpoint, Episode, rows


@dataclass
class AgentOptions(Places):
    """The options."""

    engine: str = option("toy", "what answers the agents: toy, or vllm")
    replicas: int = option(1, "replicas of the engine", least=1)
    max_staleness: int = option(
        1, "updates that the policy may have had since it answered; 0 plays, then learns", least=0
    )
    steps: int = option(30, "steps of reinforcement learning", least=0)
    n_questions: int = option(16, "questions per step", least=1)
    n_samples: int = option(8, "episodes with each question, which are compared", least=2)
    n_agents: int = option(32, "agents that play at a time", least=1)
    n_batches: int = option(4, "updates per step, at most", least=1)
    lr: float = option(3e-4, "learning rate; 0 leaves the policy as it is")
    clip: float = option(0.2, "how far a token's probability may move in a step, relative to that when it was sampled")
    warm_up: int = option(600, "steps of supervised learning before, from a careless assistant", least=0)
    warm_up_lr: float = option(3e-3, "highest learning rate of these")
    carelessness: float = option(0.5, "how often that assistant leaves out a call of the tool that it ought to make")
    seed: int = option(0, "seed of weights and questions")
    kill_at: int = option(0, "step in which a replica is killed, to see what comes of it")
    out: str = option("", "file for the metrics, a line of JSON for each step")


DEFAULTS = AgentOptions


class ToyAgentEngine(ToyEngine):
    """The toy engine with chats and a tool."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed, max_model_len=256)
        self.tokenizer = ChatTokenizer(name)

    def conversation(self, prompt: rl.Prompt) -> rl.Conversation:
        return ToolConversation(self.tokenizer)


class VLLMAgentEngine(rl.VLLM):
    """vLLM, which finds tool calls by the parser for Hermes."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed=seed, tool_parser="hermes", **vllm_options(name, self.device))
        parser = "vllm.tool_parsers.hermes_tool_parser"  # which logs a traceback for each call that is no JSON
        logging.getLogger(parser).setLevel(logging.CRITICAL)


ENGINES = {"toy": ToyAgentEngine, "vllm": VLLMAgentEngine}


class Played(NamedTuple):
    """An episode that agents play, or have played."""

    session: str
    reward: Future[float]


class Agents:
    """Agents that play episodes against an endpoint, each in a session of its own.

    Args:
        endpoint: The endpoint, which records.
        options: The options.
    """

    def __init__(self, endpoint: Endpoint, options: AgentOptions) -> None:
        self._endpoint, self._options = endpoint, options
        self._client = openai.OpenAI(base_url=endpoint.url, api_key="any", timeout=120)
        self._threads = ThreadPoolExecutor(options.n_agents)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def begin(self, step: int) -> list[Played]:
        """Begin the episodes of a step; those with the same question follow each other."""
        asked = questions(self._options.seed, step, self._options.n_questions)
        begun = []
        for number, question in enumerate(one for one in asked for _ in range(self._options.n_samples)):
            session = f"{step}/{number}"
            begun.append(Played(session, self._threads.submit(self._play, question, session)))
        return begun

    def _play(self, question: Question, session: str) -> float:
        client = self._client.with_options(default_headers={"X-Session-ID": session})
        return float(solve(client, self._endpoint.model, str(question)) == question.answer)


def train(options: AgentOptions, actor: Any, engine: Any, endpoint: Endpoint, tokenizer: Any) -> Iterator[Any]:
    """Train the actor; yields the metrics of each step."""
    to_engine = rl.WeightSync(actor, engine, heals=options.replicas > 1)
    to_engine(version=0)
    ahead = min(options.max_staleness, options.steps)
    with Agents(endpoint, options) as agents:
        playing = deque(agents.begin(1 + step) for step in range(ahead))
        for step in range(1, options.steps + 1):
            metrics: dict[str, float] = {"step": step}
            with measured(metrics) as trace:
                if step == options.kill_at:
                    os.kill(engine.workers[-1].pid, signal.SIGKILL)
                if step + ahead <= options.steps:
                    playing.append(agents.begin(step + ahead))
                played = playing.popleft()
                rewards = [one.reward.result() for one in played]
                episodes = [episode for one in played for episode in endpoint.take(one.session)]
                batch = actor.put(batch_of(episodes, played, rewards, options.n_samples, tokenizer.pad))
                batches = batch.shuffle(seed=step).batches(-(-len(batch) // options.n_batches))
                updates = [actor.update.submit(some, options.lr, options.clip) for some in batches]
                to_engine(version=step)  # while agents play on
                metrics.update(what_was_played(episodes, played, rewards, step - 1))
                metrics["loss"] = fmean(update.result()["loss"] for update in updates)
            yield metrics
            if options.timeline and step == options.steps:
                trace.timeline().save(options.timeline)
                print(f"open {options.timeline} in a browser: it shows the last step")
        if options.replicas > 1:
            to_engine.wait_until_healed()


def batch_of(
    episodes: Sequence[Episode], played: Sequence[Played], rewards: Sequence[float], n_samples: int, pad: int
) -> dict[str, torch.Tensor]:
    """The rows that the actor learns from: an episode each, with the advantage of its session."""
    advantages = group_advantages(torch.tensor(rewards), n_samples)
    of_session = {one.session: float(advantage) for one, advantage in zip(played, advantages, strict=True)}
    columns = rows(episodes)
    width = max(map(len, columns["tokens"]))
    made = {
        "tokens": rl.padded(columns["tokens"], width, pad),
        "mask": rl.padded(columns["mask"], width, dtype=np.float32)[:, 1:],
        "log_probs": rl.padded(columns["log_probs"], width)[:, 1:],
        "n_tokens": columns["n_tokens"],
        "advantages": np.array([[of_session[session]] for session in columns["session"]], np.float32),
    }
    batch = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in made.items()}
    return {**batch, "reference": batch["log_probs"]}  # no penalty for the distance to another model


def what_was_played(
    episodes: Sequence[Episode], played: Sequence[Played], rewards: Sequence[float], version: int
) -> dict[str, float]:
    """Metrics of episodes from which a policy of some version learns."""
    sessions = Counter(episode.session for episode in episodes)
    versions = np.concatenate([episode.versions[episode.mask] for episode in episodes])
    return {
        "reward": fmean(rewards),
        "turns": fmean(episode.n_turns for episode in episodes),
        "staleness": float(version - versions.mean()),
        "oldest": float(version - versions.min()),
        "episodes": len(episodes),
        "lost": len(played) - len(sessions),
        "twice": sum(count - 1 for count in sessions.values()),
    }


def warm_up(options: AgentOptions, actor: Any, tokenizer: ChatTokenizer) -> None:
    """Teach the actor what chats look like, by demonstrations of which few reach the goal."""
    begin = options.warm_up // 6 + 1
    for step in range(options.warm_up):
        batch = demonstrations(tokenizer, options.seed + 1_000_000, step, 64, options.carelessness)
        lr = options.warm_up_lr * min((step + 1) / begin, 1.05 - step / options.warm_up)
        loss = actor.imitate(batch, lr)["loss"]
        if step % 100 == 99:
            print(f"warm-up {step + 1}: loss {loss:.3f}", flush=True)
    actor.forget()


@contextmanager
def started(options: AgentOptions) -> Iterator[tuple[Any, Any, Endpoint, ChatTokenizer]]:
    """The actor after its warm-up, the engine, its endpoint, and the tokenizer."""
    engine_of_agents = engine_class(ENGINES, options.engine)
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        model = write_model(Path(folder), options.seed, WORDS, CHAT_TEMPLATE)
        with (
            options.pool(1) as pool,
            options.pool(options.replicas) as servers,
            bm.WorkerGroup(pool, Actor, model, mesh=bm.Mesh(dp=1, tp=1).refine(gen_tp=1)) as actor,
        ):
            tokenizer = ChatTokenizer(model)
            warm_up(options, actor, tokenizer)
            mesh = bm.Mesh(dp=options.replicas, tp=1)
            with (
                bm.WorkerGroup(servers, engine_of_agents, model, options.seed, mesh=mesh) as engine,
                Endpoint(engine, model="adder", record=True) as endpoint,
            ):
                yield actor, engine, endpoint, tokenizer


PANELS = {
    "reward": "share of right answers",
    "turns": "turns of an episode",
    "staleness": "updates since a token was chosen, mean",
    "seconds": "seconds of a step",
}


def run(options: AgentOptions) -> list[dict[str, float]]:
    """Train. Returns the metrics of each step."""
    found = []
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    with started(options) as parts, open(options.out or os.devnull, "w", buffering=1) as file:
        for metrics in train(options, *parts):
            found.append(metrics)
            file.write(json.dumps(metrics) + "\n")  # at once, for a run that is interrupted
            said = ", ".join(f"{name} {metrics[name]:.2f}" for name in ("reward", "turns", "staleness", "seconds"))
            print(f"step {metrics['step']}: {said}", flush=True)
    if options.plot:
        plot(Path(options.plot), {options.engine: found}, "GRPO of an agent with a calculator", panels=PANELS)
    return found


if __name__ == "__main__":
    run(of_command_line(DEFAULTS(), __doc__))
