"""What can be said of the recipes of docs/deploy/ anywhere: scripts parse, manifests fit, commands have known options.

`test_on_hosts.py` and `test_ray_job.py` run them.
"""

import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "deploy"
PAGES = sorted((ROOT / "docs" / "deploy").glob("*.md"))
SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
GRPO = "examples/rlhf/grpo.py"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_parses(path):
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)


def test_ssh_says_how_it_is_used():
    done = subprocess.run([RECIPES / "ssh.sh", "host-b"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_a_missing_environment_is_named(tmp_path):
    environment = {**os.environ, "VENV": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    for command in (["ssh.sh", "host-b", "--", "true"], ["slurm.sh"]):
        command[0] = str(RECIPES / command[0])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"there is no Ray in {tmp_path}" in done.stderr


@pytest.fixture
def ssh(tmp_path):
    """``ssh(pgrep=1, start=0)``: a run of ssh.sh with stubs that exit so; what it says, and which words they got."""

    def ssh(pgrep, start):
        bin_, log = tmp_path / "bin", tmp_path / "log"
        bin_.mkdir()
        (bin_ / "python").symlink_to(sys.executable)
        stubs = {
            "ray": f'echo "${{WHERE:-here}} $1" >> {log}; [ "$1" = stop ] || exit {start}',
            "pgrep": f"exit {pgrep}",
            "ssh": 'WHERE=$1 exec bash -c "$2"',
        }
        for name, text in stubs.items():
            (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
            (bin_ / name).chmod(0o755)
        environment = {**os.environ, "VENV": str(tmp_path), "SSH": str(bin_ / "ssh"), "HEAD": "127.0.0.1"}
        command = [RECIPES / "ssh.sh", "host-b", "--", "true"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return done, sorted(log.read_text().splitlines()) if log.exists() else []

    return ssh


def test_ssh_stops_what_it_has_started(ssh):
    done, calls = ssh(pgrep=1, start=0)
    assert done.returncode == 0, done.stderr
    assert calls == ["here start", "here stop", "host-b start", "host-b stop"]


def test_ssh_stops_no_ray_that_it_has_not_started(ssh):
    done, calls = ssh(pgrep=0, start=0)
    assert done.returncode == 1 and "a Ray runs on this host already" in done.stderr
    assert calls == []


def test_ssh_stops_what_its_ray_leaves_if_it_does_not_start(ssh):
    done, calls = ssh(pgrep=1, start=1)
    assert done.returncode == 1
    assert calls[0] == "here start" and "here stop" in calls


def manifest():
    return yaml.safe_load((RECIPES / "rayjob.yaml").read_text())


def test_the_manifest_fits_the_schema_of_kuberay():
    jsonschema.validate(manifest(), SCHEMA)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (["spec", "entrypoynt"], "x"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "replicas"], "two"),
        (["spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "resources", "limit"], {}),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "template", "spec", "volumes", 0, "emptydir"], {}),
    ],
)
def test_the_schema_notices_a_misspelt_or_wrong_field(where, value):
    broken = manifest()
    part = broken
    for name in where[:-1]:
        part = part[name]
    part[where[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_the_manifest_has_the_versions_of_the_constraints_and_asks_for_no_more_than_it_has():
    spec = manifest()["spec"]
    cluster = spec["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text().splitlines()
    asked = options_of(spec["entrypoint"])
    worker = cluster["workerGroupSpecs"][0]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    n_gpus = worker["replicas"] * limits["nvidia.com/gpu"]
    assert int(asked["nodes"]) == worker["replicas"]
    assert int(asked["train"].removeprefix("dp=")) + int(asked["replicas"]) <= n_gpus


def test_the_image_copies_what_is_there():
    text = (RECIPES / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.M) for name in line.split()[:-1]]
    assert "src" in copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    if shutil.which("hadolint"):
        subprocess.run(["hadolint", RECIPES / "Dockerfile"], check=True)


def commands():
    """All commands in the pages and recipes that run GRPO, by where they are."""
    for path in [*PAGES, *RECIPES.iterdir()]:
        text = re.sub(r"^# +", "", path.read_text(), flags=re.M).replace("\\\n", " ")
        for line in text.splitlines():
            for script in (GRPO, "examples/deploy/slurm.sh"):
                if f"{script} --" in line:
                    yield pytest.param(line, id=f"{path.name}: {line.strip()[:40]}")
    yield pytest.param(manifest()["spec"]["entrypoint"], id="entrypoint")


def options_of(command):
    """The options of GRPO in a command, by name."""
    words = shlex.split(command.partition(".py --")[2] or command.partition(".sh --")[2], comments=True)
    words[:1] = [f"--{words[0]}"]
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {
        word.removeprefix("--").replace("-", "_"): "" if after.startswith("--") else after
        for word, after in pairs
        if word.startswith("--") and word != "--"
    }


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_has_options_that_are_there(command):
    sys.path.insert(0, str(ROOT / "examples" / "rlhf"))
    try:
        from surviving import SpareOptions
    finally:
        sys.path.pop(0)
    names = {field.name for field in dataclasses.fields(SpareOptions)}
    asked = options_of(command)
    assert asked
    assert set(asked) <= names
