"""A peer in a process of its own, as the benchmark has it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from harness import proc
from harness.environments import BENCHMARKS, Found

STOP_TIMEOUT_S = 30.0
END_GRACE_S = 5.0
ENVIRONMENT = {
    "PYTHONPATH": str(BENCHMARKS),
    "PYTHONUNBUFFERED": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class PeerFailed(Exception):
    """A peer raised, gave a wrong result, did not answer in time, or is gone."""


class PeerProcess:
    """Start the interpreter that has a peer, and ask it to do things.

    Args:
        found: The peer and its interpreter.
        environment: Variables to set, besides those that every peer gets.
        prefix: A command that runs the command behind it elsewhere.
    """

    def __init__(self, found: Found, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> None:
        self.kind = found.kind
        self._log = os.memfd_create("log")
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, found.python, "-m", "harness.child", found.kind.name, str(theirs.fileno())],
                cwd=BENCHMARKS,
                env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
                | ENVIRONMENT
                | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._started: dict[int, int] = {}

    @property
    def pid(self) -> int:
        """The controller's."""
        return self._process.pid

    def tree(self) -> list[int]:
        """The controller, its workers, and whatever else the peer runs."""
        pids = proc.tree(self.pid)
        self._started |= proc.start_times(pids)
        return pids

    def ask(self, do: str, timeout_s: float = 120.0, **arguments: Any) -> dict[str, Any]:
        """Have something done; the answer.

        Raises:
            PeerFailed: It could not be done.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            line = self._lines.readline()
        except TimeoutError:
            raise PeerFailed(f"no answer to {do!r} in {timeout_s:g} s") from None
        except OSError as error:
            raise PeerFailed(f"gone at {do!r}: {error}") from error
        if not line:
            raise PeerFailed(f"gone at {do!r}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(" ".join(answer["error"].split())[:160])
        return answer

    def close(self) -> None:
        """Stop the peer, and kill whatever of it does not end."""
        self.tree()
        try:
            self.ask("stop", STOP_TIMEOUT_S)
        except PeerFailed:
            self._process.kill()
        self._socket.close()
        self._lines.close()
        try:
            self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        proc.kill_left(self._started, END_GRACE_S)
        os.close(self._log)

    def log(self) -> str:
        """What it wrote to its standard output and error."""
        return os.pread(self._log, 1 << 20, 0).decode(errors="replace")

    def _last_words(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()]
        return lines[-1][:200] if lines else f"exit code {self._process.poll()}"
