"""``python -m bandmaster.serve path/of/model --replicas 2``: an endpoint over replicas of vLLM on this machine."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import bandmaster as bm
from bandmaster import rl
from bandmaster.serve.endpoint import Endpoint, check_host, listen
from bandmaster.serve.options import Options

KEY = "BANDMASTER_API_KEY"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status."""
    options = _parser().parse_args(arguments)
    served = {
        "api_key": options.api_key,
        "model": options.served_model_name or options.model,
        "max_open": options.max_open,
        "timeout": options.timeout,
    }
    try:
        engine = dict(_engine_option(one) for one in options.engine)
        check_host(options.host, Options(**served))  # before the engines load the model, which takes minutes
        listen(options.host, options.port).close()
    except (bm.UsageError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    per_worker = engine.get("tensor_parallel_size", 1)
    gpus = {"use_gpu": True, "gpus_per_worker": per_worker} if options.gpu else {}
    for name in ("tool_parser", "reasoning_parser", "max_model_len", "dtype"):
        if getattr(options, name) is not None:
            engine.setdefault(name, getattr(options, name))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # which also interrupts the start of the engines
    try:
        with bm.ResourcePool([options.replicas], **gpus) as pool:
            group = bm.WorkerGroup(pool, rl.VLLM, options.model, mesh=bm.Mesh(dp=options.replicas), **engine)
            with Endpoint(group, host=options.host, port=options.port, **served) as endpoint:
                print(f"{endpoint.model} is served at {endpoint.url} by {options.replicas} replicas", flush=True)
                while True:
                    time.sleep(1)  # so that signals are handled
    except KeyboardInterrupt:
        pass
    except (bm.BandmasterError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bandmaster.serve", description=__doc__)
    parser.add_argument("model", help="a model's hub name or local path")
    parser.add_argument("--replicas", type=_positive, default=1, help="engines, each a worker (default 1)")
    parser.add_argument("--gpu", action="store_true", help="give each replica tensor_parallel_size GPUs")
    parser.add_argument("--host", default="127.0.0.1", help="others than loopback need an API key")
    parser.add_argument("--port", type=_port, default=8000, help="0 chooses a free one")
    parser.add_argument("--api-key", default=os.environ.get(KEY), help=f"default: the environment variable {KEY}")
    parser.add_argument("--served-model-name", help="the name by which clients ask for the model")
    parser.add_argument("--max-open", type=_positive, default=1024, help="most requests at a time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a request")
    parser.add_argument("--tool-parser", help="vLLM's parser of the model's tool calls, such as hermes")
    parser.add_argument("--reasoning-parser", help="vLLM's parser of the model's reasoning, such as qwen3")
    parser.add_argument("--max-model-len", type=_positive, help="most tokens of a prompt with its answer")
    parser.add_argument("--dtype", help="of weights and activations, such as bfloat16")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further option of vLLM's EngineArgs; the value is JSON, or a text: --engine gpu_memory_utilization=0.8",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {value}")
    return value


def _engine_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise bm.UsageError(f"--engine takes NAME=VALUE, got {text!r}")
    if name in ("model", "mesh"):
        raise bm.UsageError(f"--engine takes options of vLLM's EngineArgs, and {name} is given otherwise: see --help")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
