"""The benchmark of calls and rows between hosts measures all its parts; needs root, as it makes hosts.

The part that needs no hosts is tried in `test_benchmarks.py`.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hosts import why_not

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "hosts.py"
MONARCH = "on_hosts.monarch"
TWO_HOSTS = {"on_hosts.agents", "on_hosts.plain_ray"}
PEERS = {
    "noop": {*TWO_HOSTS, "bandmaster_local"},
    "broadcast": {*TWO_HOSTS, "on_hosts.floor"},
    "split": {*TWO_HOSTS, "on_hosts.floor"},
    "chain": TWO_HOSTS,
    "rows": TWO_HOSTS,
    "many": {"on_hosts.one_each", "on_hosts.eight_each"},
    "idle": TWO_HOSTS,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder of a smoke run of all parts."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(PROGRAM), "--smoke", "--results", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def rows(results):
    (path,) = results.glob("*-hosts.json")
    return json.loads(path.read_text())["rows"]


def test_every_part_has_a_figure_of_every_peer(rows, results):
    peers = defaultdict(set)
    for row in rows:
        if row["peer"] == MONARCH and row["why_not"].startswith("not installed"):
            continue  # it has an environment of its own
        assert row["n"] > 0, row
        peers[row["question"]].add(row["peer"])
    for question in ("noop", "broadcast", "split"):
        assert MONARCH in {row["peer"] for row in rows if row["question"] == question}
        peers[question].discard(MONARCH)
    assert peers == PEERS
    (page,) = results.glob("*-hosts.md")
    assert all(f"## {name}" in page.read_text() for name in PEERS)


def test_traffic_is_counted(rows):
    medians = {(row["what"], row["peer"]): row["median"] for row in rows}
    assert 2 <= medians["1 MiB: sent by the controller's host", "on_hosts.floor"] < 2.2
    assert 1 <= medians["1 MiB: sent by the host that made them", "on_hosts.agents"] < 1.2
    assert medians["1 MiB: through the controller's host", "on_hosts.agents"] < 0.2
