"""`Sessions`: the token ids of conversations, as they were sent to the model and answered by it.

A client sends all messages with each turn. Rendered again, an answer may get other tokens than those that the model
chose: the cache of the engine is of no use from there on, and what a trainer learns from is not what was sampled. So
the ids up to an answer are remembered under a digest of the messages up to there, and only what follows is rendered.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bandmaster.rl import Known, Prompt
from bandmaster.serve.messages import Message, behind, digests


class Begun(NamedTuple):
    """A conversation that goes on, or begins.

    Attributes:
        name: The session that the client names, or the name of the conversation.
        digest: The digest of its messages.
        known: The tokens of its first messages; None if it begins.
    """

    name: str
    digest: bytes
    known: Known | None


class _Remembered(NamedTuple):
    name: str
    ids: np.ndarray[Any, np.dtype[np.int32]]


class Sessions:
    """The conversations of an endpoint. Used by one thread.

    Args:
        most_tokens: Most tokens that are remembered; the conversations that were used least recently are forgotten.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens, self.n_tokens = most_tokens, 0
        self._found: OrderedDict[bytes, _Remembered] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def begin(self, session: str | None, prompt: Prompt) -> Begun:
        """Find what is known of a conversation.

        Args:
            session: The session that the client names, in which alone is looked; None looks among the conversations
                without one, which are told apart by their messages.
            prompt: The messages, tools and options of a turn.
        """
        assert prompt.messages is not None, "a turn of a conversation has messages"
        root = [session, prompt.tools, _of_template(prompt.options)]
        found = list(digests(root, prompt.messages))
        for number in range(len(found) - 2, -1, -1):  # at least one message is new
            remembered = self._found.get(found[number])
            if remembered is not None and prompt.messages[number]["role"] == "assistant":
                self._found.move_to_end(found[number])
                return Begun(remembered.name, found[-1], Known(number + 1, remembered.ids))
        return Begun(session or f"conversation-{secrets.token_hex(8)}", found[-1], None)

    def remember(self, begun: Begun, answer: Message, ids: Any) -> None:
        """Remember the tokens of a conversation up to an answer, int32 (tokens,)."""
        digest = behind(begun.digest, {"role": "assistant", **answer})
        old = self._found.pop(digest, None)
        if old is not None:
            self.n_tokens -= len(old.ids)
        self._found[digest] = _Remembered(begun.name, ids)
        self.n_tokens += len(ids)
        while self.n_tokens > self._most_tokens:
            _, dropped = self._found.popitem(last=False)
            self.n_tokens -= len(dropped.ids)


def _of_template(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options that may change what a template makes of the same messages."""
    return {name: value for name, value in options.items() if name in ("chat_template_kwargs", "reasoning_effort")}
