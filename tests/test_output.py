"""What workers write: lines with a prefix, progress bars, files, and the records of `logging`."""

import contextlib
import json
import logging
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from clock import idle_time

import bandmaster as bm
from bandmaster import Dispatch, register
from bandmaster.contract import Written
from bandmaster.output import screen
from bandmaster.output.log_records import MAX_RECORD_NBYTES, RecordSender
from bandmaster.output.streams import MAX_LINE_NCHARS, Lines


def fed(*parts):
    lines = Lines()
    found = [line for part in parts for line in lines.feed(part)]
    return found, lines.bar


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["one\ntwo\n", "no end"], (["one", "two"], "")),
        (["\r 10%", "\r 20%"], ([], " 20%")),
        (["\r 10%\r", " 20%\r"], ([], " 20%")),
        (["\r 10%\r 100%\n"], ([" 100%"], "")),
        ([" 10%\r", "\n", "next\r\nlast\n"], ([" 10%", "next", "last"], "")),
        (["\r 10%\r", "     \r", "said\n"], (["said"], "")),
        (["\r 10%\r    "], ([], "")),
        (["\n\nblank\n"], (["", "", "blank"], "")),
        (["\r 1ä", "\r 2ä\n"], ([" 2ä"], "")),
    ],
)
def test_lines_are_those_that_a_terminal_shows(texts, expected):
    parts = [text.encode() for text in texts]
    assert fed(*parts) == expected
    assert fed(*[bytes([byte]) for byte in b"".join(parts)]) == expected, "one byte at a time"


def test_the_last_line_needs_no_end():
    lines = Lines()
    assert lines.feed("one\nno end ä".encode()[:-1]) == ["one"]
    assert lines.rest() == ["no end \N{REPLACEMENT CHARACTER}"]
    assert lines.rest() == [] and lines.is_between_lines


def test_a_line_without_end_is_split():
    lines = Lines()
    (first,) = lines.feed(b"x" * (MAX_LINE_NCHARS + 1))
    assert len(first) == MAX_LINE_NCHARS
    assert lines.feed(b"y\n") == ["xy"] and lines.is_between_lines


def test_a_stream_that_is_read_as_a_file_gets_bars_that_have_ended(tmp_path):
    BarStream = pytest.importorskip("bandmaster.single_controller.ray.output").BarStream
    with open(tmp_path / "file", "w") as file:
        stream = BarStream(file)
        for text in ("a line\n", "\r 10%", "\r 20%", "\r100%\n", "mid", "\r  1%", "\r  2%\n", "end\n"):
            assert stream.write(text) == len(text)
        assert (stream.fileno(), stream.isatty()) == (file.fileno(), False)
    assert (tmp_path / "file").read_text() == "a line\n100%\nmid\n  2%\nend\n"


BARS = """
import os, sys, time
import bandmaster as bm

class Bar(bm.Worker):
    @bm.register(bm.Dispatch.ONE_TO_ALL)
    def run(self, fifo):
        for n in range(0, 100, 10):
            sys.stderr.write(f"\\r{n:3}% of rank {self.rank}")
        sys.stderr.flush()
        with open(fifo):  # until the bars were seen
            pass
        sys.stderr.write(f"\\r100% of rank {self.rank}\\n")

with bm.ResourcePool([2]) as pool:
    group = bm.WorkerGroup(pool, Bar, name="actor")
    group.run(sys.argv[1])
"""


HIDDEN = "import sys; sys.modules['rich'] = None\n"  # as if it was not installed
FINAL = ["[actor 0] 100% of rank 0", "[actor 1] 100% of rank 1"]


def test_a_terminal_shows_the_bars_of_all_ranks_at_the_bottom(tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-c", BARS, str(fifo)]
    with subprocess.Popen(command, stderr=theirs, cwd=tmp_path, env=environment) as program:
        os.close(theirs)
        seen = b""
        while not re.search(rb"\[actor \d\]  90% of rank \d *\r?\n\[actor \d\]  90% of rank \d", seen):
            seen += os.read(ours, 1000)
        with open(fifo, "w"):
            seen += _rest(ours)
        assert program.wait(30) == 0
    os.close(ours)
    for line in FINAL:
        assert line in seen.decode()


@pytest.mark.timeout(60)
def test_a_terminal_without_rich_gets_each_bar_when_it_has_ended(tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", HIDDEN + BARS, str(fifo)]
    with subprocess.Popen(command, stderr=theirs, cwd=tmp_path) as program, open(fifo, "w"):
        os.close(theirs)
        seen = _rest(ours)
        assert program.wait(30) == 0
    os.close(ours)
    assert sorted(line for line in seen.decode().splitlines() if not line.startswith("starting")) == FINAL


def test_a_bar_is_shown_every_ten_seconds_where_no_region_can_be_drawn(monkeypatch, capsys):
    now = 1000.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    for seconds in range(25):
        now = 1000.0 + seconds
        screen.show(Written("stderr", "actor", 2, [], f"{seconds}%"))
    screen.show(Written("stderr", "actor", 2, ["100%"]))
    for seconds in range(25, 34):  # the next bar has ten seconds of its own
        now = 1000.0 + seconds
        screen.show(Written("stderr", "actor", 2, [], f"next {seconds}%"))
    screen.show(Written("stderr", "actor", 2, ["next 100%"]))
    lines = ["10%", "20%", "100%", "next 100%"]
    assert capsys.readouterr().err.splitlines() == [f"[actor 2] {line}" for line in lines]


def test_a_line_is_written_at_once(monkeypatch, tmp_path):
    path = tmp_path / "out"
    with path.open("w") as buffered:
        monkeypatch.setattr(sys, "stdout", buffered)
        screen.show(Written("stdout", "actor", 2, ["one", "two"]))
        assert path.read_text() == "[actor 2] one\n[actor 2] two\n"


def test_lines_with_characters_that_the_output_lacks_are_not_lost(monkeypatch, tmp_path):
    path = tmp_path / "out"
    with path.open("w", encoding="latin-1") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        screen.show(Written("stdout", "actor", 2, ["one", "caf\u00e9 \u2588 \ufffd", "two"]))
        assert path.read_text("latin-1") == "[actor 2] one\n[actor 2] caf\u00e9 \\u2588 \\ufffd\n[actor 2] two\n"


def _rest(fd):
    data = b""
    while True:
        try:
            more = os.read(fd, 1000)
        except OSError:  # the other end is closed
            return data
        if not more:
            return data
        data += more


def test_a_pipe_gets_each_bar_when_it_has_ended(tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    command = [sys.executable, "-c", BARS, str(fifo)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path) as program, open(fifo, "w"):
        written = program.communicate(timeout=30)[1].decode()
    assert sorted(written.splitlines()) == FINAL


class Talks(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def talk(self, text):
        print(text, self.rank)
        os.system("echo from a child")

    @register(Dispatch.ONE_TO_ALL)
    def die(self):
        sys.stderr.write("the cause\n")
        sys.stderr.flush()
        os._exit(3)

    @register(Dispatch.ONE_TO_ALL)
    def log(self):
        logger = logging.getLogger("trainer.loss")
        logger.debug("too low")
        logger.info("loss %.1f", 0.5, extra={"step": 3, "model": object()})
        try:
            raise ValueError("on purpose")
        except ValueError:
            logger.exception("it failed")

    @register(Dispatch.ONE_TO_ALL)
    def flood(self, n):
        for number in range(n):
            logging.getLogger("trainer").warning("%d %s", number, "x" * 1000)
        logging.getLogger("trainer").warning("x" * 1_000_000)

    @register(Dispatch.ONE_TO_ALL)
    def log_long(self, message, prompt):
        logging.getLogger("trainer").warning(message, extra={"prompt": prompt})


@pytest.mark.backends("local", "ray")
def test_output_goes_to_a_file_of_each_rank(make_pool, tmp_path, capfd):
    directory = tmp_path / "new" / "logs"
    with bm.WorkerGroup(make_pool([2]), Talks, name="a/b", output=directory) as group:
        group.talk("hello")
    again = bm.WorkerGroup(make_pool([2]), Talks, name="a/b", output=str(directory))
    with again, pytest.raises(bm.WorkerDied, match="the cause"):
        again.die()
    assert sorted(path.name for path in directory.iterdir()) == ["a_b-0.out", "a_b-1.out"]
    for rank in (0, 1):
        lines = (directory / f"a_b-{rank}.out").read_text().splitlines()
        assert sorted(line for line in lines if not line.startswith(":"))[:2] == ["from a child", f"hello {rank}"]
    assert "the cause" in (directory / "a_b-1.out").read_text() + (directory / "a_b-0.out").read_text()
    assert "hello" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"output": 3}, "output of WorkerGroup must be the path of a directory, such as 'logs', or None, got 3"),
        ({"output": ""}, "must be the path of a directory"),
        ({"logging": "LOUD"}, "logging of WorkerGroup must be a level of logging, such as 'INFO', or None, got 'LOUD'"),
        ({"logging": True}, "must be a level of logging"),
    ],
)
def test_nonsense_is_refused(given, words):
    with bm.ResourcePool([1], backend="inprocess") as pool, pytest.raises(bm.UsageError, match=re.escape(words)):
        bm.WorkerGroup(pool, Talks, **given)


def test_a_directory_that_cannot_be_made_is_refused(zygote, tmp_path):
    (tmp_path / "file").touch()
    with bm.ResourcePool([1]) as pool:
        with pytest.raises(bm.UsageError, match=r"cannot make the directory output='.*file/logs'.*: .*Not a directory"):
            bm.WorkerGroup(pool, Talks, output=tmp_path / "file" / "logs")
        bm.WorkerGroup(pool, Talks)
    with bm.ResourcePool([1], backend="inprocess") as pool, pytest.raises(bm.UsageError, match="backend 'inprocess'"):
        bm.WorkerGroup(pool, Talks, output=tmp_path)


def test_records_of_workers_arrive_in_the_loggers_of_the_controller(zygote, caplog):
    with caplog.at_level("DEBUG"), bm.ResourcePool([2]) as pool:
        bm.WorkerGroup(pool, Talks, name="actor", logging="INFO").log()
    records = [record for record in caplog.records if record.name == "trainer.loss"]
    assert sorted((r.rank, r.levelname) for r in records) == [(n, w) for n in (0, 1) for w in ("ERROR", "INFO")]
    first = next(record for record in records if record.rank == 1 and record.levelno == logging.INFO)
    assert (first.getMessage(), first.group, first.step) == ("[actor 1] loss 0.5", "actor", 3)
    assert first.funcName == "log" and not hasattr(first, "model")
    failed = next(record for record in records if record.levelno == logging.ERROR)
    assert "ValueError: on purpose" in failed.getMessage()


def test_the_strings_of_records_that_are_too_long_are_shortened(zygote, caplog):
    with caplog.at_level("DEBUG"), bm.ResourcePool([1]) as pool:
        group = bm.WorkerGroup(pool, Talks, name="actor", logging="INFO")
        for message, prompt in (("short", "x" * 150_000), ("\N{GRINNING FACE}" * 20_000, "y" * 300_000)):
            group.log_long(message, prompt)
    first, second = (record for record in caplog.records if record.name == "trainer")
    assert first.getMessage() == "[actor 0] short"
    assert second.getMessage().startswith("[actor 0] " + "\N{GRINNING FACE}" * 1000)
    assert re.fullmatch(r"x{9000,} …", first.prompt) and re.fullmatch(r"y{1000,} …", second.prompt)


def test_the_controller_decides_what_is_logged(zygote, caplog):
    with caplog.at_level("ERROR", "trainer.loss"), bm.ResourcePool([1]) as pool:
        bm.WorkerGroup(pool, Talks, logging=logging.INFO).log()
    assert {record.levelname for record in caplog.records if record.name == "trainer.loss"} == {"ERROR"}


def test_a_slow_handler_does_not_block_workers(zygote, tmp_path):
    """Records are dropped while nobody reads, and a record says how many."""
    os.mkfifo(fifo := tmp_path / "fifo")
    messages = []

    class Slow(logging.Handler):
        def emit(self, record):
            if not messages:
                with open(fifo):  # until the worker is done
                    pass
            messages.append(record.getMessage())

    handler, logger = Slow(), logging.getLogger()
    logger.addHandler(handler)
    try:
        with bm.ResourcePool([1]) as pool, bm.WorkerGroup(pool, Talks, name="actor", logging="WARNING") as group:
            assert group.flood(2000) == [None]
            with open(fifo, "w"):
                pass
            deadline = idle_time() + 20
            while not any("records are lost" in message for message in list(messages)):
                assert idle_time() < deadline, "a record that finds room says how many found none"
                group.log()
    finally:
        logger.removeHandler(handler)
    assert sum(message.endswith("xxx") for message in messages) < 2000
    assert any(re.fullmatch(r"\[actor 0\] \d+ log records are lost, .*", message) for message in messages)


def test_a_record_says_once_how_many_were_dropped_before_it():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        sender, record = RecordSender(theirs, logging.INFO), logging.makeLogRecord({"msg": "x" * 10_000})

        def arrived():
            numbers = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    numbers.append(json.loads(ours.recv(MAX_RECORD_NBYTES))["n_dropped"])
            return numbers

        for _ in range(1000):
            sender.emit(record)
        first = arrived()
        assert 0 < len(first) < 1000 and set(first) == {0}
        for _ in range(2):
            sender.emit(record)
        assert arrived() == [1000 - len(first), 0]


def test_files_have_no_part_of_bars(zygote, tmp_path):
    class Bar(bm.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def run(self):
            for n in range(100):
                sys.stderr.write(f"\r{n}%")
            sys.stderr.write("\r100%\n")

    with bm.ResourcePool([1]) as pool, bm.WorkerGroup(pool, Bar, output=tmp_path) as group:
        group.run()
    assert Path(tmp_path, "Bar-0.out").read_text() == "100%\n"
