"""`--log` of the examples: metrics go to TensorBoard, wandb or trackio, in processes without a network."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from later import Later

transformers = Later("transformers")
ROOT = Path(__file__).parents[1]
SMALL = ["--train", "dp=1", "--backend", "inprocess", "--warm-up", "2", "--steps", "2", "--n-prompts", "4"]
SMALL += ["--n-samples", "4", "--n-batches", "1"]


def grpo(*words, **environment):
    command = [sys.executable, str(ROOT / "examples" / "rlhf" / "grpo.py"), *SMALL, *words]
    environment = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("tensorboard", "out/events.out.tfevents.*"),
        ("wandb", "out/wandb/offline-run-*/run-*.wandb"),
        ("trackio", "trackio/*.db"),
    ],
)
def test_metrics_are_logged(tmp_path, name, written):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    done = grpo("--out", str(tmp_path / "out"), "--log", name, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert done.returncode == 0, done.stderr
    (found,) = tmp_path.glob(written)
    assert found.stat().st_size > 0


@pytest.mark.slow
def test_a_trained_model_is_exported(tmp_path):
    done = grpo("--export", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    transformers.utils.logging.disable_progress_bar()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.model_type == "llama"


@pytest.mark.slow
def test_a_logger_that_is_not_known_or_has_no_folder():
    assert "--log takes tensorboard, wandb, trackio, none; got 'x'" in grpo("--log", "x").stderr
    assert "--log wandb needs --out" in grpo("--log", "wandb").stderr
