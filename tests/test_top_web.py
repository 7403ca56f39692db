"""``bandmaster top --web``: the groups of a machine in a browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from commands import MINE

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.cli import main
from bandmaster.cli.usage import GroupUsage, Moment, RankUsage
from bandmaster.cli.web import History
from bandmaster.wire.status_page import Activity

CHROMIUM = shutil.which("chromium")


class Waiting(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def wait(self, gate):
        with open(gate) as opened:
            opened.read()


@contextmanager
def top_in_a_browser():
    """The address that the command serves."""
    command = [sys.executable, "-m", "bandmaster", "top", "--web", "--port", "0", "--interval", "0.1", *MINE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            yield re.match(r"(http://127\.0\.0\.1:\d+/) shows your groups", line)[1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def got(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as reply:
        return reply.read().decode()


@pytest.fixture
def gate(tmp_path):
    """A pipe that workers wait for, until the test opens it."""
    os.mkfifo(tmp_path / "gate")
    return str(tmp_path / "gate")


@pytest.mark.backends("local")
def test_the_state_of_each_rank_and_what_it_ran(backend, gate):
    with bm.ResourcePool([2], backend=backend) as pool, top_in_a_browser() as url:
        group = bm.WorkerGroup(pool, Waiting)
        future = group.wait.submit(gate)
        while True:  # until the command has seen it; the time limit of the test ends it
            found = {one["name"]: one for one in json.loads(got(f"{url}state"))["groups"]}
            ranks = found.get("Waiting", {"ranks": []})["ranks"]
            if [rank["method"] for rank in ranks if rank["cpu"] is not None] == ["wait", "wait"]:
                break
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert all(rank["spans"][-1][2] == "wait" and rank["memory"] > 0 for rank in ranks)
        (said,) = [one for one in json.loads(got(f"{url}why")) if one["group"] == "Waiting"]
        assert [place["ranks"] for place in said["places"]] == [[0, 1]]
        page = got(url)
        assert "<title>bandmaster top</title>" in page
        assert not re.search(r'(src|href)\s*=\s*"|@import|url\(', page), "nothing is loaded from elsewhere"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            got(url, Host="attacker.example")
        if CHROMIUM:
            options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={gate}-profile"]
            command = [CHROMIUM, *options, "--virtual-time-budget=3000", "--dump-dom", url]
            drawn = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
            assert re.search(r"Waiting <small[^>]*>2 ranks<", drawn)
        with open(gate, "w"):
            pass
        while not future.done():  # a reader that came late needs a writer of its own
            try:
                os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                continue
        future.result()


def moment(method, seconds):
    return Moment((GroupUsage("g", 1, (RankUsage(0, 1, Activity(method, seconds), 1),)),))


def test_the_spans_of_a_rank_are_joined_and_end_after_a_minute():
    history = History(lambda: Moment(), 1.0)
    for now, method, seconds in ((100, "a", 0.5), (101, "a", 1.5), (102, "a", 0.2), (103, "", 0.0), (104, "b", 0.9)):
        history.add(moment(method, seconds), now)
    (rank,) = history.state["groups"][0]["ranks"]
    assert rank["spans"] == [[99.5, 101, "a"], [101.8, 102, "a"], [103.1, 104, "b"]]
    history.add(moment("b", 59.5), 162.6)
    assert history.state["groups"][0]["ranks"][0]["spans"] == [[101.8, 102, "a"], [103.1, 162.6, "b"]][1:]
    history.add(Moment(), 163)
    assert history.state["groups"] == []


def test_a_port_that_is_taken_is_an_error():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-m", "bandmaster", "top", "--web", "--port", str(server.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(r"cannot listen on 127\.0\.0\.1:\d+: Address already in use", done.stderr)


@pytest.mark.parametrize("option", [["--interval", "0.01"], ["--port", "70000"]])
def test_options_out_of_range_are_errors_before_anything_is_served(option, capsys):
    assert main(["top", "--web", *option]) == 2
    assert re.search(f"{option[0]} must be .*, got {option[1]}", capsys.readouterr().err)
