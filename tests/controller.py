"""A controller in a process of its own, in which tests run their functions; `Controller` is the tests' end of it."""

import contextlib
import os
import pickle
import struct
import subprocess
import sys

import cloudpickle


class Controller:
    """Another Python process. What is called `kept` is a dict that its functions share.

    Args:
        **environment: Further environment variables.
    """

    def __init__(self, **environment):
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )

    def submit(self, function, *args):
        """Have the process call ``function(kept, *args)``."""
        write(self.process.stdin, cloudpickle.dumps((function, args)))

    def result(self):
        """What the function that was submitted first returns, or raises."""
        is_error, value = pickle.loads(read(self.process.stdout))
        if is_error:
            raise value
        return value

    def run(self, function, *args):
        """Call ``function(kept, *args)`` in the process."""
        self.submit(function, *args)
        return self.result()

    def end(self):
        """Let the process exit, as a script does at its end."""
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()

    def kill(self):
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


def write(file, content):
    file.write(struct.pack("<Q", len(content)) + content)
    file.flush()


def read(file):
    return file.read(struct.unpack("<Q", file.read(8))[0])


def main():
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what functions print
    kept = {}
    while header := sys.stdin.buffer.read(8):
        function, args = pickle.loads(sys.stdin.buffer.read(struct.unpack("<Q", header)[0]))
        try:
            reply = cloudpickle.dumps((False, function(kept, *args)))
        except Exception as error:
            reply = cloudpickle.dumps((True, error))
        write(replies, reply)


if __name__ == "__main__":
    main()
