"""What runs in the interpreter that has a peer: commands come as lines of JSON, answers go back as lines of JSON.

``python -m harness.child PEER DESCRIPTOR``. Nothing but the standard library is imported before the first command, so
that a start can be timed from an interpreter that has loaded nothing.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import socket
import sys
import time
import traceback
from typing import Any

MIXED = (  # what `mixed` draws from: operation, bytes, how often
    ("noop", 0, 50),
    ("broadcast", 1 << 10, 10),
    ("broadcast", 40 << 10, 6),
    ("broadcast", 1 << 20, 3),
    ("split_inc_concat", 1 << 10, 10),
    ("split_inc_concat", 200 << 10, 6),
    ("split_inc_concat", 2 << 20, 3),
    ("gather", 1 << 10, 8),
    ("gather", 400 << 10, 3),
    ("gather", 4 << 20, 1),
)


class Session:
    """One peer, from its start to its end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._peer: Any = None
        self._n_workers = 0
        self._works: dict[tuple[str, int], Any] = {}
        self._random = random.Random(0)

    def start(self, n_workers: int, with_torch: bool = False) -> dict[str, Any]:
        """Import the peer, start it, and have a first result; how long that took."""
        begun = time.perf_counter()
        if self._name == "floor" and with_torch:
            importlib.import_module("torch")  # its workers are forked from here
        self._peer = importlib.import_module(f"peers.{self._name}").Peer()
        self._peer.start(n_workers)
        result = self._peer.load_torch() if with_torch else self._peer.noop()
        seconds = time.perf_counter() - begun
        if result != [True if with_torch else 1] * n_workers:
            raise ValueError(f"the first result was {result!r}")
        self._n_workers = n_workers
        return {"seconds": seconds}

    def prepare(self, op: str, nbytes: int) -> dict[str, Any]:
        """Make the input of a call, and let go of that of others."""
        if (op, nbytes) not in self._works:
            self._works.clear()
            self._add_work(op, nbytes)
        return {}

    def measure(self, op: str, nbytes: int, n_min: int, n_max: int, budget_s: float) -> dict[str, Any]:
        """Time calls: ``n_max``, or as many as fit in the budget, but ``n_min`` anyway."""
        self.prepare(op, nbytes)
        work = self._works[op, nbytes]
        durations: list[float] = []
        cpu_s = 0.0
        spent = 0.0
        gc.collect()
        while len(durations) < n_min or (len(durations) < n_max and spent < budget_s):
            work.prepare()
            cpu_before = time.process_time()
            before = time.perf_counter()
            result = work.call()
            durations.append(time.perf_counter() - before)
            cpu_s += time.process_time() - cpu_before
            spent += durations[-1]
            work.check(result)
            del result
        return {"seconds": durations, "cpu_s": cpu_s}

    def mixed(self, n_calls: int) -> dict[str, Any]:
        """Calls of all kinds and sizes in random order; some results are kept for a while."""
        for op, nbytes, _ in MIXED:
            if (op, nbytes) not in self._works:
                self._add_work(op, nbytes)
        kinds = self._random.choices([entry[:2] for entry in MIXED], [entry[2] for entry in MIXED], k=n_calls)
        kept: list[Any] = []
        before = time.perf_counter()
        for kind in kinds:
            work = self._works[kind]
            work.prepare()
            result = work.call()
            work.check(result)
            if self._name != "floor":  # whose results are only good until the next call
                kept = [*kept[-15:], result]
            del result
        return {"seconds": time.perf_counter() - before}

    def stop(self) -> dict[str, Any]:
        """End the peer."""
        self._works.clear()
        if self._peer is not None:
            self._peer.stop()
            self._peer = None
        return {}

    def _add_work(self, op: str, nbytes: int) -> None:
        from harness.work import WORKS

        self._works[op, nbytes] = WORKS[op](self._peer, self._n_workers, nbytes)


def main() -> None:
    """Answer commands until there are no more."""
    session = Session(sys.argv[1])
    channel = socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(channel.fileno(), False)
    lines = channel.makefile("r", encoding="utf-8")
    for line in lines:
        command = json.loads(line)
        try:
            answer = getattr(session, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        channel.sendall(json.dumps(answer).encode() + b"\n")
    session.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some peers leave threads that would keep the interpreter


if __name__ == "__main__":
    main()
