"""Completions: from chat messages or a text to token ids, and from answers to the messages of an assistant.

::

    Prompt: messages, a text, or ids ──► Conversation.render, encode ──► ids ──► the engine ──► Answer
                                                                                                  │
    Completion: ids of the prompt, answers, messages ◄── Reader.message, or Reader.delta of parts ◄┘

All of it runs in the worker, which has the tokenizer. What an engine adds is a `Conversation`, see
`Engine.conversation`. When the caller knows the tokens of the first messages, because it has sent and received them
before, only what comes behind them is rendered: the ids of a turn begin with all ids of the turns before, although
a tokenizer might cut the text of an answer otherwise than the model did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bandmaster import UsageError
from bandmaster.rl.engines.answers import Answer, token_ids
from bandmaster.rl.engines.sampling import Sampling

Ids = NDArray[np.int32]
Message = Mapping[str, Any]
MARK = "answer17c4e9mark"  # stands for an answer in a rendering, to find what the template puts behind it


class PromptTooLong(UsageError):
    """A prompt leaves no place for an answer in the context of the model."""


class Known(NamedTuple):
    """The tokens of the first messages of a prompt, as they were sent to the model and answered by it.

    Attributes:
        n_messages: So many messages, of which the last is the assistant's.
        ids: Their token ids, int32 (tokens,).
    """

    n_messages: int
    ids: Ids


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The beginning of a completion: chat messages, a text or token ids, one of the three.

    Args:
        messages: Chat messages in OpenAI's form.
        text: A text, which no chat template changes.
        ids: Token ids.
        tools: Tools that the assistant may call, in OpenAI's form. They need messages.
        options: What else a chat template or a parser of answers reads, by OpenAI's names: ``tool_choice``,
            ``parallel_tool_calls``, ``response_format``, ``reasoning_effort``, ``chat_template_kwargs``.
        known: The tokens of the first messages, if they are known.
        wants_texts: Whether the text of each token is returned.

    Raises:
        UsageError: Not one of the three is given.

    Example:
        >>> Prompt(text="2 + 2", ids=[1])
        Traceback (most recent call last):
        bandmaster.errors.UsageError: Prompt takes one of messages, text and ids, got text and ids
    """

    messages: Sequence[Message] | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    known: Known | None = None
    wants_texts: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "text", "ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UsageError(f"Prompt takes one of messages, text and ids, got {' and '.join(given) or 'none'}")


class Rendering(NamedTuple):
    """Messages as a chat template renders them.

    Attributes:
        ids: The token ids.
        text: The text; None if the engine has ids alone.
    """

    ids: list[int]
    text: str | None = None


class Reader:
    """Makes an assistant's message of one answer, or parts of it. This one takes the whole text as the content."""

    def delta(self, part: Answer) -> Mapping[str, Any] | None:
        """The addition of a part of an answer to the message, by OpenAI's names; None if there is none."""
        return {"content": part.text} if part.text else None

    def message(self, answer: Answer) -> Mapping[str, Any]:
        """The message of a whole answer: ``content``, and maybe ``reasoning`` and ``tool_calls``."""
        return {"content": answer.text or ""}


class Conversation(ABC):
    """The chat template, tokenizer and parser of an engine, for one prompt. An engine makes one for each request.

    Attributes:
        ends: The tokens with which the model ends an answer.
    """

    ends: Collection[int] = ()

    @abstractmethod
    async def render(self, messages: Sequence[Message], is_open: bool) -> Rendering:
        """Render messages by the chat template.

        Args:
            messages: The messages.
            is_open: Whether an answer is to follow, for which the template may put something at the end.

        Raises:
            UsageError: There is no template, or it refuses the messages.
        """

    @abstractmethod
    def encode(self, text: str, is_first: bool) -> list[int]:
        """The token ids of a text.

        Args:
            text: The text.
            is_first: Whether a prompt begins with it, so that the tokenizer may put a token before it.

        Raises:
            UsageError: The tokenizer has no tokens for it.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included."""

    def adjusted(self, sampling: Sampling) -> Sampling:
        """The sampling that the tools and options of the prompt need. Called after `render`; by default as it is."""
        return sampling

    def reader(self, ids: Sequence[int]) -> Reader:
        """A reader for one of the answers to a prompt of these ids. By default one that takes the text as it is."""
        return Reader()


class Choice(NamedTuple):
    """One of the answers to a prompt.

    Attributes:
        answer: The answer.
        message: The assistant's message; of a prompt of messages.
    """

    answer: Answer
    message: Mapping[str, Any]


class Completion(NamedTuple):
    """The answers to a prompt.

    Attributes:
        n_known: So many ids of the prompt are those that the caller knew.
        ids: The ids of the prompt behind them, int32 (tokens,).
        choices: The answers.
        texts: The text of each token that occurs in an answer or its log-probabilities, if asked for.
        version: The version of the weights at the beginning.
    """

    n_known: int
    ids: Ids
    choices: list[Choice]
    texts: Mapping[int, str]
    version: int


class CompletionPart(NamedTuple):
    """The part of one of the answers to a prompt that has come since the part before.

    Attributes:
        answer: The part.
        delta: What it adds to the assistant's message; None for nothing.
        texts: As in `Completion`.
        n_known: As in `Completion`, of the first part of all.
        ids: As in `Completion`, of the first part of all; None in all others.
    """

    answer: Answer
    delta: Mapping[str, Any] | None
    texts: Mapping[int, str]
    n_known: int = 0
    ids: Ids | None = None


class EngineFacts(NamedTuple):
    """The facts about an engine that its clients need.

    Attributes:
        model: The name of the model.
        max_model_len: Most tokens of a prompt with its answer.
        vocab_size: Token ids of prompts are below this number.
        version: The version of the weights.
        is_ready: Whether the engine makes tokens: it is neither paused nor asleep.
    """

    model: str
    max_model_len: int
    vocab_size: int
    version: int
    is_ready: bool


class Begun:
    """A prompt that is about to be answered: its ids, and what reads the answers.

    Args:
        prompt: The prompt.
        conversation: How the engine renders and reads it; None for ids whose texts nobody wants.
        n_known: So many of the ids are those that the caller knew.
        ids: All ids.
    """

    def __init__(self, prompt: Prompt, conversation: Conversation | None, n_known: int, ids: list[int]) -> None:
        self.ids, self._prompt, self._conversation, self._n_known = ids, prompt, conversation, n_known
        self._readers: dict[int, Reader] = {}
        self._is_first = True

    def completion(self, answers: Sequence[Answer], version: int) -> Completion:
        """The answers, read."""
        choices = [Choice(answer, self._message(answer)) for answer in answers]
        return Completion(self._n_known, self._new_ids(), choices, self._texts(answers), version)

    def part(self, answer: Answer) -> CompletionPart:
        """A part of an answer, read."""
        delta = None
        if self._prompt.messages is not None:
            delta = self._reader(answer.number).delta(answer)
        made = CompletionPart(answer, delta, self._texts([answer]))
        if self._is_first:
            self._is_first = False
            made = made._replace(n_known=self._n_known, ids=self._new_ids())
        return made

    def _new_ids(self) -> Ids:
        return np.array(self.ids[self._n_known :], np.int32)

    def _message(self, answer: Answer) -> Mapping[str, Any]:
        return {} if self._prompt.messages is None else self._reader(answer.number).message(answer)

    def _reader(self, number: int) -> Reader:
        assert self._conversation is not None, "messages have one"
        if number not in self._readers:
            self._readers[number] = self._conversation.reader(self.ids)
        return self._readers[number]

    def _texts(self, answers: Sequence[Answer]) -> Mapping[int, str]:
        if not self._prompt.wants_texts or self._conversation is None:
            return {}
        found = {token for answer in answers for token in answer.tokens}
        found.update(token for answer in answers for top in answer.top_logprobs or () for token in top)
        return {token: self._conversation.decode([token]) for token in found}


async def begin(prompt: Prompt, conversation: Conversation | None) -> Begun:
    """Find the ids of a prompt.

    Args:
        prompt: The prompt.
        conversation: How the engine renders it; None for ids whose texts nobody wants.

    Raises:
        UsageError: It cannot be rendered.
    """
    if prompt.ids is not None:
        return Begun(prompt, conversation, 0, token_ids(prompt.ids))
    assert conversation is not None, "all but ids are rendered"
    if prompt.text is not None:
        return Begun(prompt, conversation, 0, conversation.encode(prompt.text, is_first=True))
    assert prompt.messages is not None, "a prompt has one of the three"
    whole = await conversation.render(prompt.messages, is_open=True)
    if prompt.known is not None:
        rest = await _rest(conversation, prompt.messages, prompt.known, whole)
        if rest is not None:
            return Begun(prompt, conversation, len(prompt.known.ids), [*prompt.known.ids.tolist(), *rest])
    return Begun(prompt, conversation, 0, whole.ids)


async def _rest(
    conversation: Conversation, messages: Sequence[Message], known: Known, whole: Rendering
) -> list[int] | None:
    """The ids behind the known ones; None if the template does not show where they begin."""
    closed = await conversation.render(messages[: known.n_messages], is_open=False)
    found = behind_end(whole.ids, closed.ids, conversation.ends)
    if found is not None and not conversation.decode(found.between).strip():
        return found.rest[known.ids[-1] in conversation.ends :]
    rest = await _behind_mark(conversation, messages, known.n_messages - 1)
    if rest and rest[0] == known.ids[-1] and rest[0] in conversation.ends:
        return rest[1:]
    return rest


class BehindEnd(NamedTuple):
    """The end of the first messages of a rendering.

    Attributes:
        rest: The end token of the last of them, and all behind it.
        between: What the template puts between the end token and the next message.
    """

    rest: list[int]
    between: list[int]


def behind_end(whole: Sequence[int], closed: Sequence[int], ends: Collection[int]) -> BehindEnd | None:
    """Find where the first messages of a rendering end, by the number of end tokens in a rendering of these alone.

    The ids before that may differ: templates drop the reasoning of earlier answers, for example.

    Args:
        whole: The ids of all messages.
        closed: The ids of the first of them.
        ends: The end tokens.

    Returns:
        The place; None if there is no end token, or what follows it differs.

    Example:
        >>> behind_end(whole=[5, 9, 2, 3, 7, 2, 3, 4], closed=[5, 8, 2, 3], ends={2})
        BehindEnd(rest=[2, 3, 7, 2, 3, 4], between=[3])
    """
    places = [place for place, token in enumerate(closed) if token in ends]
    same = [place for place, token in enumerate(whole) if token in ends]
    if not places or len(same) < len(places):
        return None
    last, cut = places[-1], same[len(places) - 1]
    between = list(closed[last + 1 :])
    if whole[cut] != closed[last] or list(whole[cut + 1 : cut + 1 + len(between)]) != between:
        return None
    return BehindEnd(list(whole[cut:]), between)


async def _behind_mark(conversation: Conversation, messages: Sequence[Message], number: int) -> list[int] | None:
    """The ids behind an answer, by a rendering in which a mark stands for it; None if the mark is not in there."""
    marked = [*messages[:number], {"role": "assistant", "content": MARK}, *messages[number + 1 :]]
    try:
        text = (await conversation.render(marked, is_open=True)).text
    except UsageError:  # such as a tool's message that has no call before it
        return None
    if text is None or text.count(MARK) != 1:
        return None
    return conversation.encode(text.partition(MARK)[2], is_first=False)
