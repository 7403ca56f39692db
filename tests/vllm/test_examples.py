"""The programs of examples/rlhf with vLLM: answers of engines for a trainer, and agents that call tools."""

import importlib
from pathlib import Path

import pytest
import uvloop
from by_value import sent_by_value

FOLDER = Path(__file__).parents[2] / "examples" / "rlhf"


@pytest.fixture(scope="module", autouse=True)
def programs():
    uvloop.new_event_loop().close()  # libuv keeps a pipe for signals in each process from its first loop on
    with sent_by_value(FOLDER, *sorted(path.stem for path in FOLDER.glob("*.py"))):
        yield


def run(program, **options):
    module = importlib.import_module(program)
    return module, module.run(module.DEFAULTS(**options))


def test_grpo_learns_from_answers_of_vllm():
    short = {"warm_up": 20, "steps": 2, "n_prompts": 16, "n_batches": 2, "eval_every": 2, "save_every": 0}
    _, done = run("grpo", engine="vllm", train="dp=1", **short)
    assert max(line["log_probs_error"] for line in done.metrics[1:]) <= 1e-4


def test_agents_learn_from_what_they_said_to_vllm():
    short = {"warm_up": 60, "steps": 3, "n_questions": 4, "n_samples": 2, "n_agents": 8}
    _, lines = run("agent_grpo", engine="vllm", **short)
    for line in lines:
        assert line["lost"] == line["twice"] == 0
        assert 0 <= line["oldest"] <= 1
