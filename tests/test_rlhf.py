"""The programs of examples/rlhf: shortened runs, the same on every backend and mesh, that can be resumed."""

import importlib
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from by_value import sent_by_value

import bandmaster as bm

FOLDER = Path(__file__).parent.parent / "examples" / "rlhf"
SHORT = {"warm_up": 40, "steps": 3, "n_prompts": 16, "n_samples": 8, "n_batches": 2, "eval_every": 2, "save_every": 0}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def programs():
    """The modules of the programs, importable here and sent to workers by value."""
    with sent_by_value(FOLDER, *sorted(path.stem for path in FOLDER.glob("*.py"))):
        yield


def run(program, **options):
    """The metrics of a run, a dict for each step."""
    module = importlib.import_module(program)
    return module.run(module.DEFAULTS(**{**SHORT, **options})).metrics


def assert_alike(lines, expected, tolerance):
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        for name in {"accuracy", "reward", "loss", "kl", "norm"} & line.keys():
            assert line[name] == pytest.approx(other[name], abs=tolerance), (line["step"], name)


@pytest.fixture(scope="module")
def alone():
    """GRPO on one rank in this process."""
    return run("grpo", train="dp=1", backend="inprocess")


@pytest.mark.backends("local", "ray")
def test_the_curve_is_the_same_on_every_backend(alone, backend):
    assert_alike(run("grpo", train="dp=1", backend=backend), alone, 1e-5)


@pytest.mark.parametrize("options", [{"train": "dp=4"}, {"train": "dp=1,tp=2", "generate": "tp=1"}], ids=str)
def test_meshes_differ_by_the_order_of_sums_alone(alone, options):
    assert_alike(run("grpo", **options), alone, 1e-4)


def test_a_run_can_be_resumed(tmp_path):
    options = {"train": "dp=1", "backend": "inprocess", "save_every": 2, "out": str(tmp_path)}
    whole = run("grpo", **options | {"out": str(tmp_path / "whole"), "steps": 5})
    run("grpo", **options, steps=0)  # interrupted after the warm-up, which is not repeated
    run("grpo", **options | {"warm_up": 0}, steps=2, resume=True)
    assert_alike(run("grpo", **options, steps=4, resume=True), whole[:5], 0)
    other_mesh = {"train": "dp=1,tp=2", "generate": "tp=1", "backend": "local"}
    assert_alike(run("grpo", **options | other_mesh, steps=5, resume=True), whole, 1e-4)


def test_ppo_updates_actor_and_critic():
    lines = run("ppo", backend="inprocess", train="dp=1", placement="split", n_prompts=128, n_samples=1)
    assert len({line["value_loss"] for line in lines[1:]}) == 3
    assert all(line["controller_nbytes"] < 100_000 and line["moved_nbytes"] > 0 for line in lines[1:])


@pytest.mark.parametrize(("program", "models"), [("grpo", ["Actor"]), ("ppo", ["Actor", "Critic"])])
def test_a_step_has_as_many_updates_as_asked_for(monkeypatch, program, models):
    small = {"backend": "inprocess", "train": "dp=1", "warm_up": 0, "n_prompts": 4, "n_samples": 4, "steps": 1}
    running, traces = importlib.import_module("running"), []
    measured = running.measured

    @contextmanager
    def kept(metrics):
        with measured(metrics) as trace:
            yield traces.append(trace)

    monkeypatch.setattr(running, "measured", kept)
    for n_batches, n_updates in (3, 3), (64, 16):  # of 16 rows
        run(program, **small, n_batches=n_batches)
        methods = [call.method for call in traces.pop().calls]
        assert [methods.count(f"{model}.update") for model in models] == [n_updates] * len(models)


def test_a_step_whose_answers_all_fail_raises_the_first_error():
    small = {"backend": "inprocess", "train": "dp=1", "warm_up": 0, "n_prompts": 2, "n_samples": 2, "steps": 1}
    with pytest.raises(RuntimeError, match="a generation fails"):
        run("async_grpo", **small, failing=1.0)


def test_answers_that_fail_are_left_out_with_their_whole_group():
    options = {"failing": 0.01, "chunk": 16, "max_staleness": 1, "rollouts": 2, "kill_at": 3, "steps": 5}
    lines = run("async_grpo", **options)[1:]
    for line in lines:
        assert 0 <= line["failed"] < 128
        assert line["failed"] % 8 == 0, "groups stay whole"
        assert line["staleness"] <= 1
    assert sum(line["failed"] for line in lines) > 0


def test_trainer_and_generator_agree():
    workers, running = importlib.import_module("workers"), importlib.import_module("running")
    options = importlib.import_module("options").Options(**SHORT)
    with bm.ResourcePool([1], backend="inprocess") as pool:
        actor = bm.WorkerGroup(pool, workers.Actor, mesh=bm.Mesh(dp=1, tp=1).refine(gen_tp=1))
        rows = actor.generate(running.Run(options, actor, None).prompts(0))
        assert torch.equal(actor.log_probs(rows)["log_probs"], rows["log_probs"]), "the same bits in equal layouts"


def test_an_engine_answers_as_the_actor_does(tmp_path):
    options = {"train": "dp=1", "backend": "inprocess"}
    options["model"] = importlib.import_module("small_model").write_model(tmp_path)
    lines = run("grpo", **options, engine="toy", replicas=2)
    assert_alike(lines, run("grpo", **options), 1e-4)
    assert max(line["log_probs_error"] for line in lines[1:]) <= 1e-4


def test_an_unknown_engine_is_an_error():
    with pytest.raises(SystemExit, match="--engine takes toy or vllm, got 'x'"):
        run("grpo", engine="x")
    with pytest.raises(SystemExit, match="--engine takes toy or vllm, got 'x'"):
        run_agents(engine="x")


def run_agents(**options):
    program = importlib.import_module("agent_grpo")
    return program.run(program.DEFAULTS(**options))


def test_agents_learn_from_each_episode_once_while_a_replica_is_killed(tmp_path):
    short = {"warm_up": 5, "steps": 3, "n_questions": 2, "n_samples": 2, "n_agents": 4, "replicas": 2, "kill_at": 2}
    out = tmp_path / "new" / "agents.jsonl"
    files = {"folder": str(tmp_path), "timeline": str(tmp_path / "last.html"), "out": str(out)}
    lines = run_agents(engine="toy", **files, **short)
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    assert "Actor.update" in (tmp_path / "last.html").read_text()
    assert [line["episodes"] for line in lines] == [4, 4, 4]
    for line in lines:
        assert line["lost"] == line["twice"] == 0
        assert 0 <= line["oldest"] <= 1, "no token is older than --max-staleness"


def test_demonstrations_are_what_the_endpoint_renders(tmp_path):
    chat = importlib.import_module("tool_chat")
    path = importlib.import_module("small_model").write_model(tmp_path, 0, chat.WORDS, chat.CHAT_TEMPLATE)
    tokenizer = chat.ChatTokenizer(path)
    batch = chat.demonstrations(tokenizer, seed=0, step=0, n=8, carelessness=0.0)
    call = {"name": "add", "arguments": '{"a": 47, "b": 85}'}
    messages = [
        {"role": "user", "content": "47+85+16"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "132"},
    ]
    text = tokenizer.rendered(messages, is_open=True)
    assert text == (
        '<user>47+85+16.<assistant><tool_call>{"name": "add", "arguments": {"a": 47, "b": 85}}</tool_call>.'
        "<tool>132.<assistant>"
    )
    assert len(tokenizer.encode(text)) == 27 and tokenizer.decode(tokenizer.encode(text)) == text
    for tokens, mask, n_tokens in zip(batch["tokens"], batch["mask"], batch["n_tokens"], strict=True):
        said = tokenizer.decode(tokens[1:][mask.bool()])
        assert said.count("<tool_call>") == 2 and int(n_tokens) == len(tokenizer.encode(said))
