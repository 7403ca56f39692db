"""``bandmaster top``, live and once, and the question that ``kill --all`` asks: on a terminal as a user has it."""

import asyncio
import os
import shlex
import subprocess
import sys
import time

import pexpect
import pytest
from clock import idle_time
from commands import MINE

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.cli import main
from bandmaster.cli.discovery import Discovered, discover
from bandmaster.cli.top_view import HEADER, columns_that_fit, rows_of
from bandmaster.cli.usage import GroupUsage, Moment, RankUsage
from bandmaster.wire.status_page import Activity, ActivityWords


class Busy(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def wait_long(self):
        if self.rank:
            time.sleep(60)
        return self.rank

    @register(Dispatch.DP_PROTO)
    def items(self, rows, gate):
        yield 1
        while not os.path.exists(gate):
            time.sleep(0.01)

    @register(Dispatch.DP_PROTO)
    async def later(self, rows, gate):
        while not os.path.exists(gate):
            time.sleep(0.01)
        return rows

    @register(Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()


def lines_of(group, capsys):
    """The lines of one snapshot about a group, each split into its columns."""
    assert main(["top", "--once", *MINE]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"{group.name} "))
    shown = [line.removeprefix(group.name).split() for line in lines[first : first + group.world_size]]
    return {int(columns[0]): columns[1:] for columns in shown}


def running(group):
    """The method that each rank runs."""
    (found,) = [one for one in discover(os.getpid()).groups if one.name == group.name]
    return [Activity.of(identity.pid).method for identity, _ in found.workers]


def wait_until(condition):
    deadline = idle_time() + 30
    while not condition():
        assert idle_time() < deadline
        time.sleep(0.01)  # polling for other processes


@pytest.mark.backends("local", "ray")
def test_a_snapshot_shows_what_each_rank_runs(make_group, capsys, gate):
    group = make_group(2, Busy)
    pids = group.pid()
    call = group.wait_long.submit()
    wait_until(lambda: running(group) == ["", "wait_long"])
    shown = lines_of(group, capsys)
    assert shown[0][:3] == [str(pids[0]), "idle", "-"]
    assert shown[1][:2] == [str(pids[1]), "wait_long"]
    assert shown[1][3] == "s" and shown[1][5:7] == [shown[1][5], "MiB"]
    call.cancel()
    with pytest.raises(bm.CallCancelled):
        call.result()
    wait_until(lambda: running(group) == ["", ""])

    with group.items.stream([1, 2], str(gate)) as stream:
        next(stream)
        wait_until(lambda: running(group) == ["items", "items"])
        gate.touch()
    group.pid()
    gate.unlink()
    call = group.later.submit([1, 2], str(gate))
    wait_until(lambda: running(group) == ["later", "later"])
    gate.touch()
    call.result()


@pytest.mark.backends("local")
def test_the_tasks_of_async_methods_are_counted(make_group, capsys, gate):
    class Episodes(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        async def run(self, gate, n):
            await asyncio.gather(*[self.episode(gate) for _ in range(n)])

        async def episode(self, gate):
            while not os.path.exists(gate):
                await asyncio.sleep(0.001)

        @register(Dispatch.ONE_TO_ALL)
        async def leave_one(self):
            self.task = asyncio.create_task(asyncio.sleep(1000))

    group = make_group(2, Episodes)
    call = group.run.submit(str(gate), 11)
    wait_until(lambda: lines_of(group, capsys)[1][1:4] == ["run", "(tasks:", "12)"])
    gate.touch()
    call.result()
    group.leave_one()
    wait_until(lambda: lines_of(group, capsys)[1][1:4] == ["idle", "(tasks:", "1)"])


@pytest.mark.backends("local", "ray")
def test_the_stack_of_an_idle_rank(make_group, capsys):
    group = make_group(2, Busy)
    group.pid()

    def is_shown():
        assert main(["stack", group.name, *MINE]) == 0
        return capsys.readouterr().out == "--- stack of rank 0, 1 ---\n  idle: it runs no method\n"

    wait_until(is_shown)


def test_a_roles_method_is_shown_with_its_role(zygote):
    class Waits(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def act(self):
            time.sleep(60)

    with bm.ResourcePool([1]) as pool:
        group = bm.colocate(pool, actor=Waits, critic=Waits)
        call = group.critic.act.submit()
        wait_until(lambda: running(group) == ["critic.act"])
        call.cancel()


# --- the page -------------------------------------------------------------------------------------------------------


def test_names_are_shown_whatever_they_are_and_however_many():
    with subprocess.Popen([sys.executable, "-c", MANY_NAMES], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as other:
        for expected in ("first", "x" * 200, "line?red?", "(another method)", "first", ""):
            assert other.stdout.readline() == b"shown\n"
            found = Activity.of(other.pid)
            assert found.method == expected and 0 <= found.seconds < 60
            other.stdin.write(b"\n")
            other.stdin.flush()


MANY_NAMES = """
import os
import time
from bandmaster.wire.status_page import StatusPage, WorkerIdentity
page = StatusPage(WorkerIdentity(os.getpid(), 0, 0, 0, 1, "many")).activity
for name in ("first", "x" * 300, "line\\nred\\x1b", None, "first", ""):
    if name is None:
        for number in range(5000):
            page.show({0: (f"method {number}", time.monotonic())})
    elif name:
        page.show({0: (name, time.monotonic())})
    else:
        page.end()
    print("shown", flush=True)
    input()
"""


def test_a_process_without_such_a_page_shows_nothing():
    assert Activity.of(os.getpid()) is None
    assert Activity.of(1 << 22) is None


def test_a_page_of_the_in_process_backend_is_not_shown_to_others():
    page = ActivityWords()
    page.show({0: ("method", time.monotonic())})
    assert Activity.of(os.getpid()) is None


# --- the table ------------------------------------------------------------------------------------------------------


def rank(number, method, seconds=1.0, **more):
    activity = None if method is None else Activity(method, seconds if method else 0.0)
    return RankUsage(number, 1000 + number, activity, 300 << 20, **more)


def test_ranks_in_the_same_state_share_a_row_where_there_is_no_room_for_all():
    ranks = [rank(n, "" if n in (3, 4) else "update", n, cpu_percent=n, held_nbytes=1 << 20) for n in range(64)]
    moment = Moment((GroupUsage("actor", 64, tuple(ranks)), GroupUsage("critic", 1, (rank(0, None),), "detached")))
    assert len(rows_of(moment)) == len(rows_of(moment, 65)) == 65
    assert rows_of(moment, 36) == [
        ("actor", "0-2,5-63", "62 processes", "update", "0.0 s-1m 03s", "0-63%", "300 MiB", "62 MiB", "-"),
        ("", "3-4", "2 processes", "idle", "-", "3-4%", "300 MiB", "2 MiB", "-"),
        ("critic (detached)", "0", "1000", "unknown", "-", "-", "300 MiB", "-", "-"),
    ]
    last = rows_of(moment, 2)[-1]
    assert last[0] == "and 2 more rows"


def test_narrow_terminals_get_fewer_columns():
    rows = rows_of(Moment((GroupUsage("actor", 2, (rank(0, "update", cpu_percent=5), rank(1, "", cpu_percent=100))),)))

    def names(width):
        return [HEADER[column] for column in columns_that_fit(rows, width)]

    assert names(200) == list(HEADER)
    assert names(50) == ["group", "rank", "pid", "runs", "for", "cpu", "memory"], "those without values go first"
    assert names(42) == ["group", "rank", "runs", "for", "cpu", "memory"]
    assert names(10) == ["group", "rank", "runs", "for"]


def test_tasks_are_counted_where_there_are_more_than_that_of_the_method():
    activities = [Activity("run", 1.0, 0, n) for n in (1, 4, 7)] + [Activity("", 0.0, 0, n) for n in (0, 1)]
    ranks = [RankUsage(n, 1000 + n, activity, 300 << 20) for n, activity in enumerate(activities)]
    moment = Moment((GroupUsage("actor", 5, tuple(ranks)),))
    assert [row[3] for row in rows_of(moment)] == ["run", "run (tasks: 4)", "run (tasks: 7)", "idle", "idle (tasks: 1)"]
    assert [row[3] for row in rows_of(moment, 2)] == ["run (tasks: 1-7)", "idle (tasks: 0-1)"]


def test_devices():
    ranks = [rank(n, "update", device=f"GPU {n} 50% 1.0 GiB") for n in range(2)]
    moment = Moment((GroupUsage("actor", 2, tuple(ranks)),))
    assert [row[-1] for row in rows_of(moment)] == ["GPU 0 50% 1.0 GiB", "GPU 1 50% 1.0 GiB"]
    assert [row[-1] for row in rows_of(moment, 1)] == ["2 GPUs"]


# --- terminals ------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal():
    """``terminal("top")``: the command on a pseudo-terminal of 30 lines."""
    started = []

    def start(*arguments, program=None):
        command = ["-c", program] if program else ["-m", "bandmaster", *arguments]
        started.append(pexpect.spawn(sys.executable, command, dimensions=(30, 150), encoding="utf-8", timeout=60))
        return started[-1]

    yield start
    for one in started:
        one.close(force=True)


@pytest.mark.backends("local")
@pytest.mark.parametrize("key", ["q", "\x03"])
def test_the_live_view_shows_changes_and_ends(make_group, terminal, key):
    group = make_group(2, Busy)
    group.pid()
    top = terminal("top", "--interval", "0.1", *MINE)
    top.expect("q ends")
    call = group.wait_long.submit()
    top.expect("wait_long")
    call.cancel()
    with pytest.raises(bm.CallCancelled):
        call.result()
    top.expect("idle")
    top.send(key)
    top.expect(pexpect.EOF)
    assert "Traceback" not in top.before
    top.close()
    assert top.exitstatus == 0


def test_the_live_view_says_what_to_install(terminal):
    program = "import sys; sys.modules['rich'] = None; from bandmaster.cli import main; sys.exit(main(['top']))"
    top = terminal(program=program)
    top.expect(r"needs rich, which is not installed; install it with: pip install 'bandmaster\[top\]'")
    top.expect(pexpect.EOF)
    top.close()
    assert top.exitstatus == 1


def test_intervals_that_make_no_sense(capsys):
    assert main(["top", "--interval", "0"]) == 2
    assert capsys.readouterr().err == "bandmaster top: --interval must be at least 0.1 seconds, got 0\n"


# Without the option, the command would end the groups of other programs of this user as well.
KILL_ALL = ["kill", "--all", *MINE]


@pytest.mark.backends("local")
def test_kill_all_asks_first(make_group, terminal):
    group, other = make_group(2, Busy), make_group(1, Busy)
    for answer in ("n", "", "\x04", "\x03"):
        kill = terminal(*KILL_ALL)
        kill.expect(r"end 2 groups \(3 workers\)\? \[y/N\] ")
        kill.send(answer) if answer in ("\x04", "\x03") else kill.sendline(answer)
        kill.expect("nothing was ended")
        kill.expect(pexpect.EOF)
        kill.close()
        assert kill.exitstatus == 1
    assert group.healthy and other.healthy

    kill = terminal(*KILL_ALL)
    kill.expect(r"\[y/N\] ")
    kill.sendline("y")
    kill.expect(f"group {group.name}@{os.getpid()}: ended ")
    kill.expect(pexpect.EOF)
    kill.close()
    assert kill.exitstatus == 0
    with pytest.raises(bm.WorkerDied):
        group.pid()


@pytest.mark.backends("local")
def test_kill_all_without_a_terminal_needs_yes(make_group):
    group = make_group(1, Busy)
    runs = []
    for arguments, redirection in (([], "< /dev/null"), ([], "<&-"), (["--yes"], "<&-")):
        command = shlex.join([sys.executable, "-m", "bandmaster", *KILL_ALL, *arguments])
        runs.append(subprocess.run(f"{command} {redirection}", shell=True, capture_output=True, text=True, timeout=60))
    *refusals, ended = runs
    for refused in refusals:
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("bandmaster kill: --all asks before") and "--yes" in refused.stderr
    assert ended.returncode == 0 and f"group {group.name}@" in ended.stdout


def test_a_name_that_is_almost_right(capsys, monkeypatch):
    from test_cli import made_up

    found = Discovered((made_up("Critic", 1, False),))
    monkeypatch.setattr("bandmaster.cli.processes.discover", lambda controller: found)
    assert main(["kill", "Critc"]) == 1
    assert capsys.readouterr().err == "bandmaster kill: there is no group 'Critc'; did you mean 'Critic'\n"
