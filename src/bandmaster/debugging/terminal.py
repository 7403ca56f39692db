"""Both ends of the socket between a debugger in a worker and the terminal that commands it.

::

    worker: Terminal, the debugger's input and output         bandmaster debug, as the same user: attach
      listens on a socket without a path ◄─────────────────── connects; both check the peer's user
      "> file(3)method()...(Pdb) ", a zero byte ────────────► shows it, and reads a line
                                              "p self\\n" ◄── sends it

The worker announces its address by the name of an anonymous file. The kernel chooses the socket's name, so that no
other process can take it before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from types import FrameType
from typing import TextIO

from bandmaster.platform.proc import peer_of
from bandmaster.wire.status_page import DEBUGGER, announce, announcement

_UNIX = "unix:"


class Terminal:
    """Standard input and output of the debugger, on the attached terminal or the next one that attaches."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._announced = -1
        self._attached: TextIO | None = None
        self._text = ""  # text that the debugger has written since it last read a line

    def open(self) -> None:
        """Let terminals attach from now on."""
        if self._listener is None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind("")  # Linux chooses a name that is free
            listener.listen(1)
            self._announced = announce(DEBUGGER, _UNIX + bytes(listener.getsockname())[1:].decode())
            self._listener = listener

    def close(self) -> None:
        """Detach the attached terminal, and refuse new ones."""
        self._detach()
        if self._listener is not None:
            self._listener.close()
            os.close(self._announced)
        self._listener, self._text = None, ""

    def write(self, text: str) -> int:
        """Buffer text. The terminal shows it when a line is read."""
        self._text += text
        return len(text)

    def flush(self) -> None:
        """Do nothing: text is sent when a line is read."""

    def readline(self) -> str:
        """Send the buffered text, and wait for a line. If the terminal detaches, the next one gets the text."""
        while True:
            try:
                terminal = self._next()
                terminal.write(f"{self._text}\0")
                terminal.flush()
                answer = terminal.readline()
            except OSError:
                answer = ""
            if answer:
                self._text = ""
                return answer
            self._detach()

    def _next(self) -> TextIO:
        while self._attached is None:
            assert self._listener is not None, "open was called"
            sock, _ = self._listener.accept()
            with sock:  # the file keeps it open
                if peer_of(sock)[1] in (os.geteuid(), 0):
                    self._attached = sock.makefile("rw", encoding="utf-8", errors="replace")
        return self._attached

    def _detach(self) -> None:
        if self._attached is not None:
            with contextlib.suppress(OSError):  # the terminal was closed before it had all text
                self._attached.close()
        self._attached = None


def attach(pid: int) -> str:
    """Command the debugger of a process from this terminal until its method goes on, or the user detaches.

    Returns:
        The process's state, for a message.

    Raises:
        OSError: No pdb waits there, or the socket belongs to another process or another user.
    """
    address = announcement(pid, DEBUGGER) or ""
    if not address.startswith(_UNIX):
        raise ConnectionRefusedError(f"process {pid} waits for an IDE at {address}" if address else "it does not wait")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"\0{address.removeprefix(_UNIX)}")
        owner, user = peer_of(sock)
        if owner != pid or user not in (os.geteuid(), 0):
            raise PermissionError(f"the debugger of process {pid} belongs to another user or process")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() history and editing keys
        text = b""
        try:
            while data := sock.recv(65536):
                text += data
                if text.endswith(b"\0"):
                    answer, text = _typed(text[:-1].decode(errors="replace")), b""
                    sock.sendall(f"{answer}\n".encode())
        except EOFError:
            return "still waits; the terminal is detached"
        except KeyboardInterrupt:
            return "goes on with the command; the terminal is detached"
        except ConnectionError:
            pass
    return "goes on without the debugger"


def _typed(text: str) -> str:
    """Show a text that ends in a prompt, and read a line."""
    shown, newline, prompt = text.rpartition("\n")
    print(f"{shown}{newline}", end="", flush=True)
    while True:
        try:
            return input(prompt)
        except KeyboardInterrupt:  # begins a new line, as in a shell
            print()


def say_where(frame: FrameType, what_to_do: str) -> None:
    """Print the position at which the worker waits, and the next step, to its output."""
    code = frame.f_code
    where = f"{code.co_name} waits in a debugger at {code.co_filename}:{frame.f_lineno}"
    print(f"{where}; on host {os.uname().nodename}, {what_to_do}", file=sys.stderr, flush=True)
