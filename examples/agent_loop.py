"""Agents that take turns with a policy and a tool, many episodes at a time, and learn: python examples/agent_loop.py

The game: a treasure lies 1 to 99 doors away, to the left or to the right. In each turn an agent goes through one door,
or asks a guide, who is slow and knows the direction. A turn costs a hundredth of the treasure. At first the policy is
random, and most episodes end without the treasure after 100 turns; in the end most agents ask first, and then go there.

::

    run ──► AgentLoop: hundreds of episodes on each rank ──► Policy.act: all turns of an episode on one replica
     ▲ │                                                  └► Guide.ask
     │ └── trajectories, by reference ──► Learner.gradient ──► new weights ──► Policy.load
     └──────────────────────────────────────────────────────────────┘
"""

import argparse
import asyncio
import random

import numpy as np

import bandmaster as bm
from bandmaster import Broadcast, Dispatch, Reduce, Split, TransferProtocol, register

UNKNOWN, IS_LEFT, IS_RIGHT = range(3)  # what an agent knows
LEFT, RIGHT, ASK = range(3)  # what it can do
FARTHEST, MOST_TURNS, TURN_COST = 99, 100, 0.01


def probabilities(weights):
    """The policy: for each row of weights, the probabilities of the actions."""
    scores = np.exp(weights - weights.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


class Policy(bm.Worker):
    """Stands for an inference engine: it takes all requests that have come as one batch."""

    def __init__(self):
        self.version, self.weights = 0, np.zeros((3, 3))
        self.batch = []

    @register(Dispatch.REQUEST, concurrency=1024)
    async def act(self, known, chance):
        """Choose an action for what an agent knows. `chance` is from 0 to 1: equal chances give equal actions."""
        loop = asyncio.get_running_loop()
        if not self.batch:
            loop.call_soon(self.step)
        chosen = loop.create_future()
        self.batch.append((known, chance, chosen))
        return await chosen

    def step(self):
        """Answer all requests of the batch."""
        batch, self.batch = self.batch, []
        known, chances, chosen = zip(*batch, strict=True)
        bounds = probabilities(self.weights[list(known)]).cumsum(axis=1)
        actions = (np.array(chances)[:, np.newaxis] > bounds[:, :-1]).sum(axis=1)
        for future, action in zip(chosen, actions.tolist(), strict=True):
            future.set_result(action)

    @register(Dispatch.ONE_TO_ALL)
    def load(self, version, weights):
        """Take new weights. It runs alone: no request is answered by half of them."""
        self.version, self.weights = version, weights


class Guide(bm.Worker):
    """The tool."""

    @register(Dispatch.REQUEST, concurrency=512)
    async def ask(self, here, treasure):
        await asyncio.sleep(0.002)
        return IS_LEFT if treasure < here else IS_RIGHT


class AgentLoop(bm.Worker):
    """Plays the episodes of its rows at the same time."""

    def __init__(self, policy, guide):
        self.policy, self.guide = policy, guide

    @register(Dispatch.DP_PROTO)
    async def run(self, treasures, seeds):
        return await asyncio.gather(*map(self.episode, treasures.tolist(), seeds.tolist()))

    async def episode(self, treasure, seed):
        """Play one episode: what was known and done in each turn, and the reward."""
        act = self.policy.act.options(key=seed)  # as its cache is there
        chances = random.Random(seed)  # its own: the order in which a replica answers episodes changes none
        here, known, turns = 0, UNKNOWN, []
        while here != treasure and len(turns) < MOST_TURNS:
            action = await act(known, chances.random())
            turns.append((known, action))
            if action == ASK:
                known = await self.guide.ask(here, treasure)
            else:
                here += 1 if action == RIGHT else -1
        return {"turns": np.array(turns), "reward": float(here == treasure) - TURN_COST * len(turns)}


class Learner(bm.Worker):
    @register(TransferProtocol(Split("dp"), Reduce("mean", weights="rows")), arguments={"weights": Broadcast()})
    def gradient(self, episodes, weights):
        """The policy gradient of the episodes (REINFORCE), with the mean reward as the baseline."""
        rewards = np.array([episode["reward"] for episode in episodes])
        slope = np.zeros_like(weights)
        for episode, advantage in zip(episodes, rewards - rewards.mean(), strict=True):
            known, actions = episode["turns"].T
            taken = np.eye(3)[actions] - probabilities(weights[known])
            np.add.at(slope, known, advantage * taken / len(actions))
        lengths = [len(episode["turns"]) for episode in episodes]
        return {"slope": slope / len(episodes), "reward": rewards.mean(), "turns": float(np.mean(lengths))}


def learn(steps=25, n_episodes=400, rate=60.0, seed=0, backend="local"):
    """Train the policy. Returns the mean reward of each step, and the weights: the same for the same seed."""
    games, weights, rewards = np.random.default_rng(seed), np.zeros((3, 3)), []
    with bm.ResourcePool([2], backend=backend) as pool:
        policy, guide = bm.WorkerGroup(pool, Policy), bm.WorkerGroup(pool, Guide)
        agents, learner = bm.WorkerGroup(pool, AgentLoop, policy, guide), bm.WorkerGroup(pool, Learner)
        for step in range(steps):
            far = np.exp(games.uniform(0, np.log(FARTHEST), n_episodes)).round().astype(int)
            treasures, seeds = far * games.choice([-1, 1], n_episodes), games.integers(2**62, size=n_episodes)
            episodes = agents.run.submit(treasures, seeds)  # stay where they are
            found = learner.gradient(episodes, weights)
            weights = weights + rate * found["slope"]
            policy.load(step + 1, weights)
            rewards.append(found["reward"])
            print(f"step {step:2}: reward {found['reward']:5.2f}, {found['turns']:5.1f} turns")
    return rewards, weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--backend", default="local")
    given = parser.parse_args()
    if given.episodes < 4:
        parser.error(f"--episodes must be at least 4, two on each rank of the learner to compare, got {given.episodes}")
    learn(given.steps, given.episodes, backend=given.backend)
