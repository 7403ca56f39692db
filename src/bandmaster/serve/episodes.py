"""Episodes: the turns that went through an endpoint, joined to sequences of tokens that a trainer can learn from."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One answer that the endpoint gave.

    Attributes:
        session: The session that the client named, or the name of the conversation.
        prompt: The token ids of the whole prompt, int32 (tokens,).
        answer: Those of the answer, int32 (tokens,).
        log_probs: The log-probability of each token of the answer at temperature 1, float32 (tokens,).
        versions: The version of the weights that made each of them, int64 (tokens,).
        finish_reason: ``"stop"`` or ``"length"``. An answer that was given up, because the client hung up or the
            engine was told to abort, makes no turn.
        number: The number of the answer among those to one prompt.
    """

    session: str
    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int64]
    finish_reason: str
    number: int = 0

    @property
    def n_tokens(self) -> int:
        """The tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """A sequence of tokens that the model has seen: turns of which each begins with all tokens of the one before.

    Attributes:
        session: The session of the turns.
        tokens: All token ids, int32 (tokens,).
        mask: Which of them the model has chosen, bool (tokens,).
        log_probs: The log-probabilities of these at temperature 1, float32 (tokens,); 0 elsewhere.
        versions: The versions of the weights that made them, int64 (tokens,); -1 elsewhere.
        n_turns: How many turns were joined.
        finish_reason: That of the last turn.
    """

    session: str
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int64]
    n_turns: int
    finish_reason: str


def episodes_of(turns: Sequence[Turn]) -> list[Episode]:
    """Join the turns of one session, in order, to episodes.

    A turn goes on with the longest sequence that its prompt begins with. Where two turns go on with the same one, as
    two answers to one prompt do, each makes an episode of its own, in which the tokens before are the prompt: no token
    is learnt from twice.
    """
    paths: list[list[Turn]] = []
    for turn in turns:
        before = [path for path in paths if _begins_with(turn.prompt, path[-1])]
        if before:
            max(before, key=lambda path: path[-1].n_tokens).append(turn)
        else:
            paths.append([turn])
    return [_joined(path) for path in paths]


def _begins_with(prompt: NDArray[np.int32], turn: Turn) -> bool:
    n, n_prompt = turn.n_tokens, len(turn.prompt)
    return (
        len(prompt) >= n
        and bool((prompt[n_prompt:n] == turn.answer).all())
        and bool((prompt[:n_prompt] == turn.prompt).all())
    )


def _joined(path: Sequence[Turn]) -> Episode:
    last = path[-1]
    n = last.n_tokens
    mask, log_probs, versions = np.zeros(n, bool), np.zeros(n, np.float32), np.full(n, -1, np.int64)
    for turn in path:
        place = slice(len(turn.prompt), turn.n_tokens)
        mask[place], log_probs[place], versions[place] = True, turn.log_probs, turn.versions
    tokens = np.concatenate([last.prompt, last.answer])
    return Episode(
        session=last.session,
        tokens=tokens,
        mask=mask,
        log_probs=log_probs,
        versions=versions,
        n_turns=len(path),
        finish_reason=last.finish_reason,
    )


def rows(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The columns of a batch, one row for each episode, for a trainer.

    Returns:
        ``tokens`` (int64), ``mask`` (bool), ``log_probs`` (float32) and ``versions`` (int64) are lists of arrays
        (tokens,), which `bandmaster.rl.padded` makes rectangular; ``n_tokens``, the chosen tokens of each, int64
        (rows,); ``session`` and ``finish_reason`` are lists of strings.

    Example:
        >>> turn = Turn(session="a", prompt=np.array([5, 6], np.int32), answer=np.array([7], np.int32),
        ...             log_probs=np.array([-0.5], np.float32), versions=np.array([3]), finish_reason="stop")
        >>> rows(episodes_of([turn]))["mask"]
        [array([False, False,  True])]
    """
    return {
        "tokens": [one.tokens.astype(np.int64) for one in episodes],
        "mask": [one.mask for one in episodes],
        "log_probs": [one.log_probs for one in episodes],
        "versions": [one.versions for one in episodes],
        "n_tokens": np.array([int(one.mask.sum()) for one in episodes], np.int64),
        "session": [one.session for one in episodes],
        "finish_reason": [one.finish_reason for one in episodes],
    }


class Recorder:
    """The turns that nobody has taken yet. Any thread may use it.

    Args:
        most_tokens: Most tokens that are kept; the sessions whose last turn is oldest are dropped.
        on_turn: Called with each turn.
        keeps: Whether turns are kept.
    """

    def __init__(self, most_tokens: int, on_turn: Callable[[Turn], object] | None, keeps: bool) -> None:
        self._most_tokens, self._on_turn, self._keeps = most_tokens, on_turn, keeps
        self._turns: dict[str, list[Turn]] = {}  # the session with the newest turn comes last
        self._lock = threading.Lock()
        self._n_tokens = 0
        self.n_dropped = 0

    def add(self, turn: Turn) -> None:
        """Keep a turn, and tell of it."""
        if self._keeps:
            with self._lock:
                self._turns[turn.session] = [*self._turns.pop(turn.session, []), turn]
                self._n_tokens += turn.n_tokens
                self._drop_oldest()
        if self._on_turn is not None:
            try:
                self._on_turn(turn)
            except Exception:
                logger.exception("on_turn of the endpoint failed")

    def _drop_oldest(self) -> None:
        while self._n_tokens > self._most_tokens:
            session = next(iter(self._turns))
            dropped = self._turns.pop(session)
            self._n_tokens -= sum(turn.n_tokens for turn in dropped)
            if self.n_dropped == 0:
                logger.warning(
                    "more than max_recorded_tokens=%d tokens were recorded and not taken: the turns of session %r, and "
                    "maybe of others, were dropped; take sessions when they end",
                    self._most_tokens,
                    session,
                )
            self.n_dropped += len(dropped)

    def sessions(self) -> list[str]:
        """The sessions that have turns, the one with the newest turn last."""
        with self._lock:
            return list(self._turns)

    def take(self, session: str | None) -> list[Episode]:
        """The episodes of a session, or of all, which are forgotten."""
        with self._lock:
            names = list(self._turns) if session is None else [session]
            taken = [self._turns.pop(name, []) for name in names]
            self._n_tokens -= sum(turn.n_tokens for turns in taken for turn in turns)
        return [episode for turns in taken for episode in episodes_of(turns)]
