"""Where metrics go beside metrics.jsonl: TensorBoard, wandb or trackio, all without a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from options import Options

__all__ = ["LOGGERS", "Logger", "logger"]


class Logger(Protocol):
    """What takes the metrics of each step."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step, whose number is among them."""

    def close(self) -> None:
        """Write what is not yet written."""


class Nothing:
    """Takes the metrics to nowhere."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TensorBoard:
    """Event files in the folder of the run, for ``tensorboard --logdir``."""

    def __init__(self, options: Options) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(options.out)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, int(metrics["step"]))

    def close(self) -> None:
        """Flush the event files."""
        self._writer.close()


class Run:
    """A run of wandb or trackio, which have the same functions.

    Args:
        run: What ``init`` has returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step under its number."""
        self._run.log(dict(metrics), step=int(metrics["step"]))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb(options: Options) -> Run:
    """A run in the folder ``wandb`` there; ``WANDB_MODE=online`` sends it, else ``wandb sync`` does so later."""
    import wandb

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    return Run(wandb.init(project="bandmaster", dir=options.out, mode=mode, config=asdict(options)))


def _trackio(options: Options) -> Run:
    """A run in trackio's database, in the folder ``TRACKIO_DIR`` or that of its own; ``trackio show`` shows it."""
    import trackio

    return Run(trackio.init(project="bandmaster", config=asdict(options), embed=False))


LOGGERS: Mapping[str, Callable[[Options], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
    "none": lambda options: Nothing(),
}


def logger(options: Options) -> Logger:
    """The logger that the options ask for.

    Raises:
        SystemExit: There is no such logger, it is not installed, or there is no folder to log to.
    """
    if options.log not in LOGGERS:
        raise SystemExit(f"--log takes {', '.join(LOGGERS)}; got {options.log!r}")
    if not options.out:
        if options.log in ("wandb", "trackio"):
            raise SystemExit(f"--log {options.log} needs --out, the folder of the run")
        return Nothing()
    try:
        return LOGGERS[options.log](options)
    except ImportError as error:
        raise SystemExit(f"--log {options.log}: {error}; pip install {error.name or options.log}") from error
