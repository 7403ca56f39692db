"""Runs on the first host: rank 1 of 2 on other hosts ends in several ways, and the errors say how.

python deaths.py DIRECTORY-OF-A-MEMORY-CGROUP
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import bandmaster as bm
from bandmaster import Dispatch, register


class Mortal(bm.Worker):
    @register(Dispatch.ONE_TO_ALL)
    def end(self, how, cgroup):
        if self.rank != 1:
            return
        print("my last words", file=sys.stderr, flush=True)
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "zygote":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        if how == "out of memory":
            Path(cgroup, "cgroup.procs").write_text("0")  # this process
            self.much = bytearray(b"1") * (1 << 30)

    @register(Dispatch.ONE_TO_ALL)
    def place(self):
        return os.uname().nodename


def message_of(group, how):
    try:
        group.end(how, sys.argv[1])
    except bm.WorkerDied as error:
        return str(error)
    return "nothing"


messages = {}
with bm.ResourcePool([1, 1], backend="ray") as pool:
    group = bm.WorkerGroup(pool, Mortal)
    hosts = group.place()
    for how in ("exit", "kill", "segfault", "zygote", "out of memory"):
        messages[how] = message_of(group, how)
        group.restart()
        assert group.place() == hosts, how
print(json.dumps({"messages": messages, "hosts": hosts}), flush=True)
