"""Faults of whole hosts, on separate networks and a real Ray cluster; needs root.

What ranks on other hosts do otherwise is what they do anywhere: `python tests/on_hosts.py` runs those tests there.
"""

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clock import idle_time
from hosts import SHM_SIZE, Hosts, address, why_not

pytestmark = pytest.mark.timeout(180)

PROGRAM = Path(__file__).parent / "host_programs" / "sleep.py"
AGENT = "BandmasterAgent"  # the title of its process
ZYGOTE = "zygote_process"  # in the commands of its guard, itself, and its workers
LIMIT_S = 10.0  # after which a host counts as lost
SLACK_S = 2.0  # for a machine that has other things to do


@pytest.fixture(scope="module")
def hosts():
    """Seven hosts, of which the first has no ranks, and a pool of two nodes takes the first two others that live."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(7) as made:
        yield made


@contextlib.contextmanager
def running(hosts, *args, program=PROGRAM):
    """A program on the first host; yields what returns the next thing that it tells, after some input."""
    command = hosts.command(0, [sys.executable, str(program), *map(str, args)])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=hosts.environment, text=True, **pipes) as process:

        def told(name, said=""):
            process.stdin.write(said)
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("{") and name in (facts := json.loads(line)):
                    return facts
            raise AssertionError(f"the program has ended without telling {name}")

        try:
            yield told
        finally:
            process.kill()
            if left := found_on(hosts, 0, str(program)):  # nsenter has forked it
                send_signal(hosts, 0, "KILL", left)


def send_signal(hosts, host, name, pids):
    subprocess.run(hosts.command(host, ["kill", f"-{name}", *pids]), check=True)


def found_on(hosts, host, pattern):
    """Process ids of a host, as its own processes see them, by a pattern of their commands."""
    found = subprocess.run(hosts.command(host, ["pgrep", "-f", pattern]), capture_output=True, text=True)
    return found.stdout.split()


def workers_on(hosts, host):
    return found_on(hosts, host, f"{ZYGOTE}|{AGENT}")


def all_workers(hosts):
    return [pid for host in hosts.others() for pid in workers_on(hosts, host)]


def assert_ends(hosts, within_s, where=None, n_left=0):
    """No agent, zygote and worker is left on some hosts, by default all but the first, or so many are."""
    deadline = idle_time() + within_s
    while len(left := [pid for host in where or hosts.others() for pid in workers_on(hosts, host)]) > n_left:
        assert idle_time() < deadline, left
        time.sleep(0.1)  # processes of other hosts tell nobody that they have ended


def test_calls_go_by_links_and_a_short_cut_of_the_network_is_survived(hosts):
    with running(hosts, 4) as told:
        facts = told("hosts")
        assert facts["hosts"] == ["host1", "host1", "host2", "host2"] and facts["channels"] == ["link"]
        told("is_asleep")
        shown = subprocess.run(
            hosts.command(1, [sys.executable, "-m", "bandmaster", "ps"]), capture_output=True, text=True
        )
        assert "0-1 of 4" in shown.stdout and "on host0)" in shown.stdout, shown.stdout
        hosts.cut(2)
        time.sleep(2)  # how long the cut is
        hosts.mend(2)
        assert told("slept")
        assert told("is_over")
    assert_ends(hosts, 10)


@contextlib.contextmanager
def stopped_agent(hosts, host):
    pids = found_on(hosts, host, AGENT)
    send_signal(hosts, host, "STOP", pids)
    yield
    send_signal(hosts, host, "KILL", pids)


@contextlib.contextmanager
def cut_off(hosts, host):
    hosts.cut(host)
    yield
    hosts.mend(host)


@contextlib.contextmanager
def powered_off(hosts, host):
    hosts.power_off(host)
    yield


def test_pools_go_where_they_are_asked_to(hosts):
    command = hosts.command(0, [sys.executable, str(PROGRAM.with_name("pools.py"))])
    done = subprocess.run(command, env=hosts.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    before, after = facts["planned"]
    where = [f"{address(2)} (host2)  0-1    2      2 of 8 CPUs", f"{address(1)} (host1)  2      1      1 of 8 CPUs"]
    assert "not reserved yet" in before and all(line in before for line in where), before
    assert ", reserved" in after and before.splitlines()[1:] == after.splitlines()[1:]
    assert "spare" in before.splitlines()[-1] and "host1" not in before.splitlines()[-1]
    assert facts["labels"] == ["host2", "host2", "host1"]
    assert facts["name"] == ["host3"]
    assert facts["resource"] == ["host1", "host3"]
    assert len(set(facts["pack"])) == 1
    assert f"node {address(1)} (number=1) has 8 CPUs, room for 8" in facts["no label"]
    assert facts["no label"].endswith("no node is number=9")
    assert facts["no name"].endswith("there is no node host9")
    assert "7 workers as [1, 1, 1, 1, 1, 1, 1] (1 CPU each), each on a node of its own" in facts["too few"]
    assert "8 CPUs and 1 odd, room for 0" in facts["no resource"]


def test_workers_call_groups_on_every_host(hosts):
    with running(hosts, program=PROGRAM.with_name("callers.py")) as told:
        places = {"controller": ["host0"], "first": ["host1", "host1"], "both": ["host1", "host2"]}
        for name, found in told("asked")["asked"].items():
            assert found["values"] and found["items"], (name, found)
            assert found["places"] == places[name.rpartition(" ")[2]] and len(found["ranks"]) == len(found["places"])
        before = hosts.traffic(0)
        assert all(told("sent", "\n")["sent"])
        assert sum(hosts.traffic(0)) - sum(before) < 1_000_000, "each sends 8 MB, of which the controller sees none"
        told("is_held", "\n")
        send_signal(hosts, 2, "KILL", found_on(hosts, 2, AGENT))
        died = told("died", "\n")["died"]
        assert len(died) == 2
        for words in died.values():
            assert "Rollout.hold" in words and "rank 1" in words and "host host2" in words
        assert told("again", "\n")["again"] == dict.fromkeys(died, "a")
    assert_ends(hosts, 2 + SLACK_S)


@pytest.fixture
def without_shared_memory(hosts):
    """Hosts whose ``/dev/shm`` is full, as that of a container often is."""
    for host in range(hosts.n):
        hosts.limit_shared_memory(host, "64k")
    yield hosts
    for host in range(hosts.n):
        hosts.limit_shared_memory(host, SHM_SIZE)


def test_large_calls_and_rows_need_no_shared_memory_file_system(without_shared_memory):
    with running(without_shared_memory, program=PROGRAM.with_name("rows.py")) as told:
        told("kept")
    assert_ends(without_shared_memory, 10)


def test_agents_wait_for_rows_that_somebody_needs(hosts):
    with running(hosts, program=PROGRAM.with_name("rows.py")) as told:
        told("kept")
        assert len(all_workers(hosts)) == 6, "their agents with the zygotes and the guards of these, not the workers"
        told("released", "\n")
        assert_ends(hosts, 10)


def test_a_killed_agent_is_replaced_with_its_rank(hosts):
    with running(hosts, 60, "replace") as told:
        told("is_asleep")
        send_signal(hosts, 2, "KILL", found_on(hosts, 2, AGENT))
        assert told("died")["died"] < LIMIT_S
        assert told("hosts")["hosts"] == ["host1", "host2"]
        assert told("is_over")


@contextlib.contextmanager
def memory_cgroup(nbytes):
    """The directory of a control group whose processes may have so much memory."""
    root = Path("/sys/fs/cgroup")
    directory, limit = root / "bandmaster-test", "memory.max"
    if not (root / "cgroup.controllers").exists():
        directory, limit = root / "memory" / "bandmaster-test", "memory.limit_in_bytes"
    try:
        directory.mkdir(exist_ok=True)
        (directory / limit).write_text(str(nbytes))
    except OSError as error:
        pytest.skip(f"there are no control groups to limit memory with: {error}")
    yield directory
    directory.rmdir()


def test_the_death_of_a_rank_on_another_host_is_told_as_on_this_one(hosts):
    with memory_cgroup(200 << 20) as cgroup, running(hosts, cgroup, program=PROGRAM.with_name("deaths.py")) as told:
        facts = told("messages")
    ends = {
        "exit": "exit code 3",
        "kill": r"killed by SIGKILL; its peak memory was 0\.\d GiB of",
        "segfault": "killed by SIGSEGV",
        "zygote": "killed, because the process that workers are forked from has ended",
        "out of memory": r"killed by SIGKILL; .*the kernel's out-of-memory killer ended a process meanwhile",
    }
    for how, words in ends.items():
        message = facts["messages"][how]
        assert re.search(rf"rank 1 \(.*host {facts['hosts'][1]}, .*\): {words}", message), (how, message)
        assert "my last words" in message, (how, message)
    assert_ends(hosts, 10)


@pytest.mark.parametrize("lost", [stopped_agent, cut_off, powered_off])  # the last two leave a host that Ray counts out
def test_a_lost_host_is_named_in_time(hosts, lost):
    with running(hosts, 60) as told:
        host = int(told("hosts")["hosts"][2].removeprefix("host"))
        told("is_asleep")
        with lost(hosts, host):
            facts = told("died")
        assert facts["died"] < LIMIT_S + SLACK_S
        assert "rank 2" in facts["message"] and "rank 3" in facts["message"]
        assert f"host host{host} ({address(host)}) is lost" in facts["message"]
        assert not told("is_healthy")["is_healthy"]
        assert told("is_over")
    assert_ends(hosts, 15)


@pytest.mark.parametrize(
    ("command", "number", "n_left"),
    [(AGENT, 0, 0), (ZYGOTE, 0, 1), (ZYGOTE, 1, 1), ("raylet/raylet", 0, 0)],
    ids=["agent", "guard", "zygote", "raylet"],
)
def test_workers_end_with_the_processes_that_they_depend_on(hosts, command, number, n_left):
    with running(hosts, 60) as told:
        host = int(told("hosts")["hosts"][2].removeprefix("host"))
        told("is_asleep")
        send_signal(hosts, host, "KILL", [found_on(hosts, host, command)[number]])  # older ones come first
        assert_ends(hosts, 2 + SLACK_S, [host], n_left)
        assert told("died")["died"] < LIMIT_S
        assert told("is_over")
    assert_ends(hosts, 2 + SLACK_S)


def test_nothing_outlives_a_controller_that_is_killed(hosts):
    with running(hosts, 60) as told:
        told("is_asleep")
    assert_ends(hosts, 2 + SLACK_S)


def test_the_ranks_of_a_lost_host_restart_on_a_spare_one(hosts):
    with running(hosts, 60, "restart") as told:
        before = told("hosts")["hosts"]
        told("is_asleep")
        hosts.power_off(int(before[2].removeprefix("host")))
        told("died")
        facts = told("plan")
        assert "spare" not in facts["plan"] and "lost" not in facts["plan"]
        assert facts["took"] < 30, "Ray finds out after half a minute"
        after = told("hosts")["hosts"]
        assert after[:2] == before[:2] and set(after[2:]).isdisjoint(before)
        assert told("is_over")


def test_workers_end_whose_reply_finds_the_controllers_host_gone(hosts):
    with running(hosts, 4) as told:
        told("is_asleep")
        with cut_off(hosts, 0):
            assert_ends(hosts, LIMIT_S + SLACK_S)  # of which the call takes the first seconds


def test_nothing_outlives_the_controllers_host(hosts):
    with running(hosts, 60) as told:
        told("is_asleep")
        assert len(all_workers(hosts)) == 10, "two workers, their zygote, its guard, and an agent on each of two hosts"
        hosts.power_off(0)
        assert_ends(hosts, 10)
