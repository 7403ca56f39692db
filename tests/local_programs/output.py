"""What workers print arrives on the controller's streams line by line, with the group and the rank before it."""

import io
import os
import sys

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
