"""Answers of engines as OpenAI's JSON, whole and in the events of a stream. Pure."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bandmaster.rl import Answer, Choice, CompletionPart
from bandmaster.serve.fields import Asked

Object = dict[str, Any]
LEAST = -9999.0  # JSON has no minus infinity
DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """A value as an event of a stream."""
    return b"data: " + as_json(value) + b"\n\n"


def as_json(value: Mapping[str, Any]) -> bytes:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def usage(n_prompt: int, n_answer: int, n_known: int) -> Object:
    """Counts of tokens, by OpenAI's names; ``known_tokens`` of a prompt are those of the turns before."""
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"known_tokens": n_known},
    }


class Form:
    """The form of the answers to one request: that of a chat, or of a completion.

    Args:
        asked: What the request asks for.
        model: The name of the model.
        is_chat: Whether it is a chat.
    """

    def __init__(self, asked: Asked, model: str, is_chat: bool) -> None:
        self._asked, self._is_chat = asked, is_chat
        self._head: Object = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }
        self._tool_calls: set[int] = set()  # the choices of a stream that have some
        self._offsets: dict[int, int] = {}  # of the texts of completions
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Object], used: Object, prompts: Sequence[Sequence[int]]) -> Object:
        """The whole response.

        Args:
            choices: The choices of all prompts.
            used: The tokens of all.
            prompts: The token ids of each prompt.
        """
        made = {**self._head, "object": "chat.completion" if self._is_chat else "text_completion"}
        made |= {"choices": choices, "usage": used}
        if self._asked.has_ids:
            made["prompt_token_ids"] = list(prompts[0]) if len(prompts) == 1 else [list(one) for one in prompts]
        return made

    def choice(self, choice: Choice, message: Mapping[str, Any], texts: Mapping[int, str], first: int) -> Object:
        """One choice of a whole response.

        Args:
            choice: The answer.
            message: The message that it makes.
            texts: The texts of its tokens.
            first: The number of the first choice of its prompt.
        """
        answer = choice.answer
        made: Object = {"index": first + answer.number}
        reason = answer.finish_reason
        if self._is_chat:
            made["message"] = {"role": "assistant", "content": None, **message}
            if message.get("tool_calls") and reason == "stop":
                reason = "tool_calls"
        else:
            made["text"] = answer.text or ""
        made |= {"logprobs": self._log_probs(answer, texts, made["index"]), "finish_reason": reason}
        return made | self._ids(answer)

    def message(self, message: Mapping[str, Any]) -> Object:
        """The message of an answer, as the client gets it: with ids of its tool calls, and one call if it wants one."""
        made = dict(message)
        calls = [
            {**call, "id": call.get("id") or f"call_{secrets.token_hex(12)}"} for call in message.get("tool_calls", ())
        ]
        if calls:
            made["tool_calls"] = calls[:1] if self._asked.is_one_call else calls
        return made

    def part(self, part: CompletionPart, first: int, prompt: Sequence[int] | None) -> Object | None:
        """One event of a stream; None if the part is of no interest to the client.

        Args:
            part: The part.
            first: The number of the first choice of its prompt.
            prompt: The token ids of the prompt, with its first part.
        """
        answer, index = part.answer, first + part.answer.number
        made: Object = {"index": index}
        reason = answer.finish_reason
        if self._is_chat:
            delta = self._delta(part, index)
            if index in self._tool_calls and reason == "stop":
                reason = "tool_calls"
            is_empty = not delta
            made["delta"] = delta
        else:
            is_empty = not answer.text
            made["text"] = answer.text or ""
        wants_more = self._asked.has_ids or self._asked.has_logprobs
        if is_empty and reason is None and not (wants_more and answer.tokens):
            return None
        made |= {"logprobs": self._log_probs(answer, part.texts, index), "finish_reason": reason}
        chunk = self._chunk([made | self._ids(answer)])
        if self._asked.has_ids and prompt is not None:
            chunk["prompt_token_ids"] = list(prompt)
        return chunk

    def end(self, used: Object) -> Object:
        """The event that says how many tokens there were."""
        return {**self._chunk([]), "usage": used}

    def _chunk(self, choices: list[Object]) -> Object:
        made = {**self._head, "object": "chat.completion.chunk" if self._is_chat else "text_completion"}
        made["choices"] = choices
        if self._asked.has_usage:
            made["usage"] = None
        return made

    def _delta(self, part: CompletionPart, index: int) -> Object:
        delta = dict(part.delta or {})
        if "tool_calls" in delta:
            if self._asked.is_one_call:
                delta["tool_calls"] = [call for call in delta["tool_calls"] if call["index"] == 0]
            if delta["tool_calls"]:
                self._tool_calls.add(index)
            else:
                del delta["tool_calls"]
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": "", **delta}
        return delta

    def _ids(self, answer: Answer) -> Object:
        return {"token_ids": answer.tokens, "versions": answer.versions} if self._asked.has_ids else {}

    def _log_probs(self, answer: Answer, texts: Mapping[int, str], index: int) -> Object | None:
        if not self._asked.has_logprobs or answer.log_probs is None:
            return None
        tops = answer.top_logprobs or [{} for _ in answer.tokens]
        if self._is_chat:
            return {
                "content": [
                    {
                        **_token(texts[token], log_prob),
                        "top_logprobs": [_token(texts[t], p) for t, p in self._best(top)],
                    }
                    for token, log_prob, top in zip(answer.tokens, answer.log_probs, tops, strict=True)
                ]
            }
        words = [texts[token] for token in answer.tokens]
        offsets = []
        for word in words:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(word)
        return {
            "tokens": words,
            "token_logprobs": [max(p, LEAST) for p in answer.log_probs],
            "top_logprobs": [{texts[t]: max(p, LEAST) for t, p in self._best(top)} for top in tops],
            "text_offset": offsets,
        }

    def _best(self, top: Mapping[int, float]) -> list[tuple[int, float]]:
        return sorted(top.items(), key=lambda pair: -pair[1])[: self._asked.n_top]


def _token(text: str, log_prob: float) -> Object:
    return {"token": text, "logprob": max(log_prob, LEAST), "bytes": list(text.encode("utf-8", "replace"))}


def joined_message(deltas: Sequence[Mapping[str, Any]]) -> Object:
    """The message that the parts of one answer make, as a client joins them.

    Example:
        >>> call = {"index": 0, "id": "a", "type": "function", "function": {"name": "add", "arguments": "{"}}
        >>> made = joined_message([{"content": "so"}, {"tool_calls": [call]},
        ...                        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}])
        >>> made["content"], made["tool_calls"][0]["function"]
        ('so', {'name': 'add', 'arguments': '{}'})
    """
    made: Object = {}
    calls: dict[int, Object] = {}
    for delta in deltas:
        for name in ("content", "reasoning"):
            if delta.get(name):
                made[name] = made.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            whole = calls.setdefault(call["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
            if call.get("id"):
                whole["id"] = call["id"]
            for name, text in (call.get("function") or {}).items():
                whole["function"][name] += text or ""
    if calls:
        made["tool_calls"] = [calls[index] for index in sorted(calls)]
    return made
