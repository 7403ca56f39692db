"""The program examples/agent_loop.py: agents that call a policy and a tool learn to play."""

import importlib
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import bandmaster as bm


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    module = importlib.import_module("agent_loop")
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["agent_loop"]
    sys.path.pop(0)


@pytest.mark.slow
@pytest.mark.backends("local")
def test_agents_learn_to_ask_and_to_go_there(program, backend):
    rewards, weights = program.learn(steps=9, n_episodes=150, backend=backend)
    assert rewards[0] < -0.2 and np.mean(rewards[-3:]) > 0.4
    chances = program.probabilities(weights)
    assert chances[program.IS_LEFT].argmax() == program.LEFT and chances[program.IS_RIGHT].argmax() == program.RIGHT


@pytest.mark.backends("inprocess", "local")
def test_equal_seeds_give_equal_episodes_in_whatever_order_requests_are_answered(program, backend):
    rewards, _ = program.learn(steps=2, n_episodes=20, backend=backend)
    assert rewards == pytest.approx([-0.4715, -0.019], abs=1e-9)


@pytest.mark.backends("local")
def test_means_are_those_of_all_episodes_however_they_are_split(program, backend):
    episodes = [{"turns": np.array([(0, 2), (1, 0)]), "reward": reward} for reward in (1.0, 1.0, -2.0)]
    with bm.ResourcePool([2], backend=backend) as pool:
        found = bm.WorkerGroup(pool, program.Learner).gradient(episodes, np.zeros((3, 3)))
    assert found["reward"] == pytest.approx(0)


def test_too_few_episodes_to_compare_are_an_error():
    command = [sys.executable, "examples/agent_loop.py", "--episodes", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--episodes must be at least 4" in done.stderr
