"""The benchmarks run, print what they promise, and notice wrong results."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
KEPT_HERE = ("floor", "bandmaster_local")

SIZES = {"1 KiB", "256 KiB"}
GROWTH = {"growth: memory", "growth: descriptors", "growth: threads"}
EXPECTED = {  # what each file measures, and for how many workers, in a smoke run
    "import_time": ({"import"}, {0}),
    "startup": ({"first result"}, {2}),
    "noop": ({"1 to each, and back"}, {2}),
    "broadcast": (SIZES | {"256 KiB, all of it read"}, {2}),
    "split_concat": (SIZES, {2}),
    "gather": (SIZES, {2}),
    "chain": (SIZES, {2}),
    "minibatches": ({"10 rows out of 256 KiB", "1 to each, and back"}, {2}),
    "long_tail": ({"draw 1, one by one", "draw 1, in equal parts"}, {2}),
    "memory": ({f"split, add 1, concatenate 1 MiB: {part}" for part in ("controller", "largest other process")}, {2}),
    "idle": ({"0.5 s of nothing"}, {2}),
    "scaling": ({"controller's processor time per rank and call"}, {2, 4}),
    "many_calls": ({"call of the mix"} | GROWTH, {2}),
}


@pytest.fixture
def harness(monkeypatch):
    """The modules of the benchmarks, importable as they are for the benchmarks themselves."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness import rows, work

    yield SimpleNamespace(rows=rows, work=work)
    for name in [name for name in sys.modules if name.split(".")[0] in ("harness", "peers")]:
        del sys.modules[name]


def smoke(program, peers, *options):
    """Run a benchmark as a person would, with this interpreter for every peer."""
    command = [sys.executable, str(BENCHMARKS / program), "--smoke", "--here", "--peers", ",".join(peers), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)  # Ray may start at the third try only


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_every_benchmark_is_tested():
    files = {path.stem for path in BENCHMARKS.glob("*.py")}
    alone = {
        "weights",
        "diagnosis",
        "engine_weights",
        "hosts",
        "many_requests",
        "requests_under_load",
        "engines",
        "serve",
        "telemetry",
        "gpu",
        "run_all",
    }
    assert files == {*EXPECTED, *alone}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a smoke run of all benchmarks, and its rows."""
    results = tmp_path_factory.mktemp("results")
    done = smoke("run_all.py", [*KEPT_HERE, "monarch"], "--results", str(results))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = results.glob("*.md")
    return SimpleNamespace(text=path.read_text(), rows=rows_of(next(results.glob("*.json"))))


@pytest.mark.slow
@pytest.mark.parametrize("question", EXPECTED)
def test_the_page_has_a_figure_of_every_peer(question, page):
    assert f"## {question}" in page.text
    assert "| Monarch |" in page.text
    rows = [row for row in page.rows if row["question"] == question]
    whats, n_workers = EXPECTED[question]
    assert whats <= {row["what"] for row in rows}
    check_peers(rows, n_workers & {0, 2})


def check_peers(rows, n_workers):
    assert {row["n_workers"] for row in rows} == n_workers
    for what in {row["what"] for row in rows}:
        of_what = [row for row in rows if row["what"] == what]
        assert [row["peer"] for row in of_what] == [*KEPT_HERE, "monarch"] * len(n_workers)
        for row in of_what:
            if row["peer"] in KEPT_HERE:
                assert row["n"] > 0
                assert row["median"] <= row["p99"]
            elif row["n"] == 0:
                assert row["why_not"]


@pytest.mark.slow
@pytest.mark.parametrize("question", ["noop", "scaling"])
def test_a_benchmark_alone_prints_its_figures(question, tmp_path):
    done = smoke(f"{question}.py", [*KEPT_HERE, "monarch"], "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "figures.json")
    assert {row["question"] for row in rows} == {question}
    check_peers(rows, EXPECTED[question][1])
    for printed in (
        *{row["what"] for row in rows},
        *("processor", "python", "numpy", "workers", "median", "p99", "x floor", "x local", "Monarch"),
    ):
        assert printed in done.stdout


@pytest.mark.slow
def test_ways_to_move_weights_are_compared(tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "weights.py"), "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert figures["tp=3"]["over_minimum"] == 1
    assert [way["name"] for way in figures["tp=3"]["ways"]] == [
        "WeightSync",
        "without comparing replicas",
        "process group",
        "checkpoint",
    ]
    assert "to tp=3" in done.stdout


@pytest.mark.slow
def test_weights_into_engines_are_measured():
    command = [sys.executable, str(BENCHMARKS / "engine_weights.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nall weights " in done.stdout and "\nchanges " in done.stdout


@pytest.mark.slow
def test_requests_are_compared():
    command = [sys.executable, str(BENCHMARKS / "many_requests.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for peer in ("floor", "bandmaster local", "bandmaster ray", "plain ray"):
        assert f"\n{peer} " in done.stdout, done.stdout
    assert "\nas a replica is lost and replaced " in done.stdout, done.stdout


@pytest.mark.slow
def test_requests_under_load_are_answered_once():
    command = [sys.executable, str(BENCHMARKS / "requests_under_load.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    n_answered, n_died = re.search(r"500 requests: (\d+) answered, (\d+) with its death", done.stdout).groups()
    assert int(n_answered) + int(n_died) == 500, done.stdout
    assert "; 0 run twice; of 500 sent after that, 500 answered" in done.stdout, done.stdout


@pytest.mark.slow
def test_the_processor_time_of_a_controller_of_many_hosts_is_measured(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "hosts.py"), "--smoke", "--only", "many", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-hosts.json")
    rows = rows_of(path)
    assert [row["what"] for row in rows] == ["4 hosts"] * 2
    assert all(0 < row["median"] < 1 for row in rows)
    assert "8 ranks on each" in path.with_suffix(".md").read_text()


def test_a_part_that_nobody_knows_is_refused():
    command = [sys.executable, str(BENCHMARKS / "hosts.py"), "--only", "noop,nop"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode
    assert "no part is called nop" in done.stderr


@pytest.mark.slow
def test_peers_on_ray_do_the_same_work(tmp_path):
    done = smoke("split_concat.py", ["bandmaster_ray", "plain_ray"], "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["n"] for row in rows_of(tmp_path / "figures.json"))


def test_a_peer_that_nobody_knows_is_refused():
    done = smoke("noop.py", ["florr"])
    assert done.returncode
    assert "florr" in done.stderr


class Wrong:
    """A peer whose results are the right ones but for one place."""

    def noop(self):
        return [1, 2]

    def broadcast(self, array):
        return [float(array.sum()), 0.0]

    broadcast_read_all = broadcast

    def split_inc_concat(self, array):
        result = array + 1
        result[7, 3] = 0.5
        return result

    def gather(self, nbytes, token):
        arrays = [np.full(nbytes // 4, rank, np.float32) for rank in range(2)]
        for array in arrays:
            array[0] = token
        return arrays[::-1]


@pytest.mark.parametrize("op", ["noop", "broadcast", "broadcast_read_all", "split_inc_concat", "gather"])
def test_a_wrong_result_is_noticed(harness, op):
    work = harness.work.WORKS[op](Wrong(), 2, 4096)
    work.prepare()
    with pytest.raises(harness.work.WrongResult):
        work.check(work.call())


def test_ratios_pair_rounds_that_were_taken_side_by_side(harness):
    fast = harness.rows.Row("q", "w", "floor", 2, "s", ((1.0, 1.0), (10.0,), (2.0,)))
    slow = harness.rows.Row("q", "w", "bandmaster_local", 2, "s", ((3.0,), (30.0, 30.0), (2.0,)))
    assert slow.over(fast) == 3.0
    assert slow.p99 == 30.0
    assert fast.median == 1.5
