"""`Options`: what an endpoint serves, to whom, and how much of it at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bandmaster import UsageError
from bandmaster.rl import Sampling

if TYPE_CHECKING:
    from bandmaster.serve.episodes import Turn


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of an endpoint. Checked when made.

    Args:
        api_key: The key that clients send as ``Authorization: Bearer …``; None lets all in, which only a loopback
            address allows.
        model: The name by which clients ask for the model; by default the engine's own.
        defaults: The sampling of a request, but for what it says itself. ``max_tokens`` of a request is by default the
            rest of the context.
        max_open: Most requests at a time; further ones get status 429.
        max_body_nbytes: Most bytes of a request's body; longer ones get status 413.
        timeout: Seconds in which a request must be answered; later it is given up in the engine, with status 504.
        stall_timeout: Seconds in which a client must send its request, or take a part of the answer; a slower one is
            disconnected, and its request given up in the engine.
        max_session_tokens: Most tokens of conversations that are remembered; the ones that were used least recently
            are forgotten, and rendered anew when they go on.
        record: Whether turns are kept for `Endpoint.take`, with the log-probabilities of their tokens.
        max_recorded_tokens: Most tokens of turns that are kept; the oldest sessions are dropped, which the metrics
            count and the log reports.
        on_turn: Called with each `Turn` in the thread of the endpoint. It must return at once. Its errors are logged.

    Raises:
        UsageError: A value is out of its range.
    """

    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    defaults: Sampling = field(default_factory=Sampling)
    max_open: int = 1024
    max_body_nbytes: int = 16 << 20
    timeout: float = 600.0
    stall_timeout: float = 30.0
    max_session_tokens: int = 32 << 20
    record: bool = False
    max_recorded_tokens: int = 32 << 20
    on_turn: Callable[[Turn], object] | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and (not isinstance(self.api_key, str) or not self.api_key.isascii()):
            raise UsageError(f"api_key of an endpoint must be an ASCII text, got {type(self.api_key).__name__}")
        if self.api_key == "":
            raise UsageError("api_key of an endpoint is empty; leave it out, or choose one: secrets.token_urlsafe()")
        if self.api_key is not None and (self.api_key != self.api_key.strip() or not self.api_key.isprintable()):
            raise UsageError(
                "api_key of an endpoint has blanks or line ends around it, or control characters, which no client can "
                "send in a header; strip it: key.strip()"
            )
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise UsageError(f"model of an endpoint must be a text that is not empty, got {self.model!r}")
        if not isinstance(self.defaults, Sampling):
            raise UsageError(f"defaults of an endpoint must be a rl.Sampling, got {self.defaults!r}")
        for name in ("max_open", "max_body_nbytes", "max_session_tokens", "max_recorded_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} of an endpoint must be a whole number of 1 or more, got {value!r}")
        for name in ("timeout", "stall_timeout"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise UsageError(f"{name} of an endpoint must be a positive number of seconds, got {value!r}")
        if self.on_turn is not None and not callable(self.on_turn):
            raise UsageError(f"on_turn of an endpoint must be a function of a Turn, got {self.on_turn!r}")

    @property
    def is_recorded(self) -> bool:
        """Whether somebody reads the turns."""
        return self.record or self.on_turn is not None
