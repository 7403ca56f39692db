"""What workers print arrives on the controller's streams line by line, with the group and the rank before it."""

import io
import os
import sys
import tempfile
import threading
from pathlib import Path

import bandmaster as bm
from bandmaster import Dispatch, register


class Talks(bm.Worker):
    def __init__(self):
        print("made")

    @register(Dispatch.ONE_TO_ALL)
    def talk(self):
        print("one\ntwo")
        os.system("echo from a child")
        print("trouble", file=sys.stderr)
        sys.stdout.write("no end of line")

    @register(Dispatch.ONE_TO_ALL)
    def show_progress(self, fifo):
        print("begins")
        sys.stdout.write("\r 10%\r")
        sys.stdout.flush()
        with open(fifo, "w"):  # which waits until somebody reads there
            pass
        for text in ("\r 20%\r", "\r100%", "\n", "\nblank\r", "\nends\r\nhere\n"):
            sys.stdout.write(text)
            sys.stdout.flush()

    @register(Dispatch.ONE_TO_ALL)
    def write_without_end(self, text):
        sys.stdout.write(text)

    @register(Dispatch.ONE_TO_ALL)
    def die_with_a_bar(self):
        sys.stderr.write("the cause\n")
        for n in range(100):
            sys.stderr.write(f"\r{n} of 100")
        os._exit(3)


class Stream(io.StringIO):
    """Tells of what is written."""

    def __init__(self):
        super().__init__()
        self.is_written = threading.Event()

    def write(self, text):
        super().write(text)
        self.is_written.set()


def lines_of(make_output):
    """What is written to the controller's standard output while a group of one rank works and is closed."""
    sys.stdout = stream = Stream()
    try:
        with bm.ResourcePool([1]) as pool:
            make_output(bm.WorkerGroup(pool, Talks), stream)
    finally:
        sys.stdout = sys.__stdout__
    return [line.removeprefix("[Talks 0] ") for line in stream.getvalue().split("\n")[1:]]


sys.stdout, sys.stderr = out, err = io.StringIO(), io.StringIO()
try:
    with bm.ResourcePool([2]) as pool:
        bm.WorkerGroup(pool, Talks).talk()
finally:
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
lines = ["made", "one", "two", "from a child", "no end of line"]
assert sorted(out.getvalue().splitlines()) == sorted(f"[Talks {r}] {line}" for r in (0, 1) for line in lines), (
    out.getvalue()
)
assert sorted(err.getvalue().splitlines()) == ["[Talks 0] trouble", "[Talks 1] trouble"], err.getvalue()


def show_progress(group, stream):
    with tempfile.TemporaryDirectory() as directory:
        os.mkfifo(fifo := Path(directory) / "fifo")
        pending = group.show_progress.submit(fifo)
        while "begins" not in stream.getvalue():  # it is seen before the worker goes on
            stream.is_written.wait(timeout=20)
            stream.is_written.clear()
        with open(fifo):
            pending.result()


seen = lines_of(show_progress)
assert seen == ["begins", "100%", "", "blank", "ends", "here", ""], seen

text = "ä€𝄞" * 100_000
seen = lines_of(lambda group, _: group.write_without_end(text))
assert "".join(seen) == text, "no character is cut"
assert max(map(len, seen)) <= 64 * 1024, "it is not kept until it ends"


def die(group, _):
    try:
        group.die_with_a_bar()
    except bm.WorkerDied as error:
        assert "standard error:\nthe cause\n99 of 100" in str(error), error
        assert "98 of 100" not in str(error), error


sys.stderr = io.StringIO()
lines_of(die)
sys.stderr = sys.__stderr__
