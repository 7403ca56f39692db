"""How many chat requests a second does the endpoint answer, beside vLLM's own server with the same model?

`python -m bandmaster.serve` with one replica of a tiny model and a server of vLLM's stand side by side. Rounds go to
them in turn: so many clients, each with one request at a time, from a process of their own that sends HTTP by aiohttp.
The tiny model makes the engine as fast as it can be, and so the servers' part as large. Needs vLLM: `make
bench-engines`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from harness import machine
from harness.rows import as_text, figure

TESTS = Path(__file__).parents[1] / "tests" / "vllm"
N_CLIENTS, N_REQUESTS, N_TOKENS = 300, 600, 16
PORT = 8947
START_S = 300


@contextlib.contextmanager
def server(module: str, port: int, options: Sequence[str]) -> Iterator[str]:
    """A server of a model in a process of its own, as a base URL."""
    command = [sys.executable, "-m", module, *options, "--port", str(port), "--host", "127.0.0.1"]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryFile() as output, subprocess.Popen(command, env=environment, stderr=output) as process:
        try:
            deadline = time.monotonic() + START_S
            while not _is_there(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None and time.monotonic() < deadline, f"{module} has not begun"
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            process.wait(60)


def endpoint(path: str, options: dict[str, Any]) -> contextlib.AbstractContextManager[str]:
    """The endpoint, as a program."""
    engine = [one for name, value in options.items() for one in ("--engine", f"{name}={json.dumps(value)}")]
    return server("bandmaster.serve", PORT, [path, "--served-model-name", "tiny", *engine])


def vllm_server(path: str, options: dict[str, Any]) -> contextlib.AbstractContextManager[str]:
    """vLLM's own server."""
    given = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    engine = [one for name, value in given for one in ([name] if value is True else [name, str(value)])]
    names = ["--model", path, "--served-model-name", "tiny", "--disable-uvicorn-access-log"]
    return server("vllm.entrypoints.openai.api_server", PORT + 1, [*names, *engine])


def _is_there(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


async def load(url: str, bodies: Sequence[bytes], n_clients: int) -> list[float]:
    """Seconds of each request, and of all at the end."""
    found = [0.0] * len(bodies)
    numbers = iter(range(len(bodies)))
    head = {"Content-Type": "application/json"}

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            start = time.perf_counter()
            async with session.post(f"{url}/chat/completions", data=bodies[number], headers=head) as response:
                answer = await response.read()
                assert response.status == 200, answer
            found[number] = time.perf_counter() - start
            _check(answer)

    timeout = aiohttp.ClientTimeout(total=START_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()
        await asyncio.gather(*[client(session) for _ in range(n_clients)])
        return [*found, time.perf_counter() - start]


def _check(answer: bytes) -> None:
    if answer.startswith(b"data:"):
        *_, last, done, end = answer.split(b"\n\n")
        assert done == b"data: [DONE]" and not end, answer
        used = json.loads(last.removeprefix(b"data: "))["usage"]
    else:
        used = json.loads(answer)["usage"]
    assert used["completion_tokens"] == N_TOKENS, used


def bodies_of(seed: int, n: int, is_stream: bool) -> list[bytes]:
    """Requests with prompts that no other round has, so that none is in a cache."""
    return [
        json.dumps(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{seed} {number} what is 2+3? " * 3}],
                "max_tokens": N_TOKENS,
                "ignore_eos": True,
                **({"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}),
            }
        ).encode()
        for number in range(n)
    ]


def by_a_process(url: str, seed: int, n: int, is_stream: bool, n_clients: int) -> list[float]:
    """The seconds of `load` in a process of its own, so that clients share no interpreter with the endpoint."""
    command = [sys.executable, __file__, "--load", json.dumps([url, seed, n, is_stream, n_clients])]
    found: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def compared(ours: str, theirs: str, n_clients: int, n: int, n_rounds: int) -> list[list[str]]:
    """Requests a second of both, and the seconds of a request."""
    table = [
        ["requests", "clients", "n", "vLLM's server", "p50", "endpoint", "p50", "of vLLM's: median", "worst", "best"]
    ]
    for is_stream in (False, True):
        found: dict[str, list[list[float]]] = {ours: [], theirs: []}
        for number in range(-1, n_rounds):  # the first is a warm-up
            for url in (ours, theirs) if number % 2 else (theirs, ours):
                seed = (number + 1) * 4 + 2 * is_stream + (url == ours)
                seconds = by_a_process(url, seed, n, is_stream, n_clients)
                if number >= 0:
                    found[url].append(seconds)
        rates = {url: [n / seconds[-1] for seconds in rounds] for url, rounds in found.items()}
        middle = {
            url: statistics.median([s for seconds in rounds for s in seconds[:-1]]) for url, rounds in found.items()
        }
        ratios = sorted(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))
        cells = [
            text
            for url in (theirs, ours)
            for text in (f"{statistics.median(rates[url]):,.0f}/s", figure(middle[url], "s"))
        ]
        chosen = statistics.median(ratios), ratios[0], ratios[-1]
        kind = "streamed" if is_stream else "whole"
        table.append([kind, str(n_clients), str(n_rounds), *cells, *[f"{ratio:.3f}" for ratio in chosen]])
    return table


def main() -> None:
    """Ask the question, and print the answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=N_REQUESTS, help="of each round")
    parser.add_argument("--smoke", action="store_true", help="tiny: does it work at all?")
    parser.add_argument("--load", type=json.loads, help=argparse.SUPPRESS)  # what such a process is to do
    options = parser.parse_args()
    if options.load:
        url, seed, n, is_stream, n_clients = options.load
        print(json.dumps(asyncio.run(load(url, bodies_of(seed, n, is_stream), n_clients))))
        return
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    import chat_model
    from small_vllm import OPTIONS

    engine = {**OPTIONS, "max_model_len": 1024}
    n_rounds, n, n_clients = (1, 20, 10) if options.smoke else (options.rounds, options.requests, N_CLIENTS)
    facts = {**machine.facts(), "vllm-cpu": version("vllm-cpu"), "torch": version("torch")}
    print("\n".join(f"{name:18} {fact}" for name, fact in facts.items()))
    with tempfile.TemporaryDirectory() as folder:
        path = chat_model.make(Path(folder))
        with endpoint(path, engine) as ours, vllm_server(path, engine) as theirs:
            print(as_text(compared(ours, theirs, n_clients, n, n_rounds)), flush=True)


if __name__ == "__main__":
    main()
