"""An engine whose answers follow from the conversation, so that tests know them: bytes as tokens, a chat template with
end tokens, and tool calls in a notation of its own.

It says "you said X" to a message X; calls the first tool for a message "use NAME {...}", and one called "twice" two
times; repeats what a tool returned; and counts for as long as it may for a message "count". It writes each word with
tokens of two bytes where it can, which its tokenizer never does: rendered again, an answer has other tokens than those
that the engine chose.
"""

import asyncio
import itertools
import json
import re

from bandmaster import Dispatch, UsageError, register, report, rl
from bandmaster.rl.engine_weights.target import UNUSABLE_LOAD, EngineDied

N_BYTES = 256
PAIRS = N_BYTES + 3  # a token for two letters begins here
BEGIN, END, THINK = N_BYTES, N_BYTES + 1, N_BYTES + 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ROLES = {"system", "user", "assistant", "tool"}


def encode(text):
    return list(text.encode())


def chosen(text):
    """The tokens that the engine chooses for a text."""
    ids, place = [], 0
    while place < len(text):
        pair = text[place : place + 2]
        if len(pair) == 2 and all(letter in LETTERS for letter in pair):
            ids.append(PAIRS + LETTERS.index(pair[0]) * 26 + LETTERS.index(pair[1]))
            place += 2
        else:
            ids += encode(text[place])
            place += 1
    return ids


def decode(ids):
    parts = []
    for token in ids:
        if token >= PAIRS:
            parts.append((LETTERS[(token - PAIRS) // 26] + LETTERS[(token - PAIRS) % 26]).encode())
        elif token in (BEGIN, END, THINK):
            parts.append({BEGIN: b"<", END: b">", THINK: b"~"}[token])
        else:
            parts.append(bytes([token]))
    return b"".join(parts).decode(errors="replace")


class ByteConversation(rl.Conversation):
    """A conversation.

    Args:
        prompt: The prompt.
        has_ends: Whether the template ends messages with a token, or else with a character.
        has_text: Whether renderings have a text.
    """

    def __init__(self, prompt, has_ends, has_text):
        self.prompt, self.has_text = prompt, has_text
        self.ends = (END,) if has_ends else ()

    async def render(self, messages, is_open):
        ids, end = [], list(self.ends) or encode(">")
        for tool in self.prompt.tools:
            ids += [BEGIN, *encode(f"tool {tool['function']['name']}"), *end]
        for message in messages:
            if message["role"] not in ROLES:
                raise UsageError(f"the template has no role {message['role']!r}")
            calls = "".join(
                f"call {call['function']['name']} {call['function']['arguments']}"
                for call in message.get("tool_calls", ())
            )
            ids += [BEGIN, *encode(f"{message['role']}:{message.get('content') or ''}{calls}"), *end, *encode("\n")]
        ids += [BEGIN, *encode("assistant:")] if is_open else []
        return rl.Rendering(ids, decode(ids) if self.has_text else None)

    def encode(self, text, is_first):
        return [BEGIN if byte == ord("<") else byte for byte in encode(text)]

    def decode(self, ids):
        return decode(ids)

    def adjusted(self, sampling):
        if "response_format" in self.prompt.options:
            raise UsageError("this engine has no response formats")
        return sampling

    def reader(self, ids):
        return CallReader() if self.prompt.tools else rl.Reader()


class CallReader(rl.Reader):
    """Finds "call NAME {...}" at the beginning of an answer; a part of the arguments in each part of the answer."""

    def __init__(self):
        self.text, self.sent = "", None

    def delta(self, part):
        self.text += part.text or ""
        if not self.text.startswith("call "[: len(self.text)]):
            content, self.text = self.text, ""
            self.sent = "content"
            return {"content": content} if content else None
        if self.sent == "content":
            return {"content": part.text} if part.text else None
        found = re.match(r"call (\w+) (.*)", self.text, re.DOTALL)
        if found is None:
            return None
        name, arguments = found.groups()
        if self.sent is None:
            self.sent = arguments
            self.indices = (0, 1) if name == "twice" else (0,)
            head = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
            return {"tool_calls": [{"index": index, **head} for index in self.indices]}
        new, self.sent = arguments[len(self.sent) :], arguments
        parts = [{"index": index, "function": {"arguments": new}} for index in self.indices]
        return {"tool_calls": parts} if new else None

    def message(self, answer):
        found = re.fullmatch(r"call (\w+) (.*)", answer.text, re.DOTALL)
        if found is None:
            return {"content": answer.text}
        call = {"name": found[1], "arguments": found[2]}
        calls = [{"id": None, "type": "function", "function": call}]
        return {"content": None, "tool_calls": calls * 2 if call["name"] == "twice" else calls}


def reply_to(text):
    """The text of the answer to a rendered conversation."""
    *_, last, _ = re.split("<", text)
    role, _, said = last.rstrip("\n>").partition(":")
    if role == "tool":
        return f"it is {said}"
    if said.startswith("use "):
        return f"call {said[4:]}"
    if said == "count":
        return " ".join(map(str, range(10_000)))
    return f"you said {said}"


class ByteEngine(rl.Engine):
    """The engine.

    Args:
        max_model_len: Most tokens of a prompt with its answer.
        name: The name of the model.
        has_ends: As for `ByteConversation`.
        has_text: As for `ByteConversation`.
    """

    vocab_size = PAIRS + 26 * 26

    def __init__(self, max_model_len=4096, name="bytes", has_ends=True, has_text=False):
        self.max_model_len, self.name = max_model_len, name
        self.template = has_ends, has_text
        self.held, self.go = False, asyncio.Event()
        self.has_died = False
        self.n_started = self.n_ended = self.n_given_up = 0
        self.prompts = []

    @property
    def model_name(self):
        return self.name

    def conversation(self, prompt):
        return ByteConversation(prompt, *self.template)

    def check_sampling(self, sampling):
        if sampling.extra:
            raise UsageError(f"this engine does not do {next(iter(sampling.extra))}")

    async def answers(self, prompt, sampling):
        parts = {}
        async for part in self.increments(prompt, sampling):
            parts.setdefault(part.number, []).append(part)
        return [rl.Answer.joined(parts[number]) for number in sorted(parts)]

    async def increments(self, prompt, sampling):
        self.n_started += 1
        self.prompts.append(list(prompt))
        try:
            for number in range(sampling.n):
                async for part in self._parts(prompt, sampling, number):
                    yield part
            self.n_ended += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.n_given_up += 1
            raise

    async def _parts(self, prompt, sampling, number):
        text = decode(prompt)
        text = reply_to(text) if text.endswith("<assistant:") else f"{text} and so on"
        ends = [text.index(stop) for stop in sampling.stop if stop in text]
        is_stopped = bool(ends)
        if is_stopped:
            text = text[: min(ends)]
        ids = [*chosen(text), *([] if is_stopped else [END])]
        most = min(sampling.max_tokens, self.max_model_len - len(prompt))
        for count, token in enumerate(itertools.islice(ids, most), 1):
            await asyncio.sleep(0)
            while self.held:
                await self.go.wait()
            self.check_usable()
            reason = "stop" if count == len(ids) else "length" if count == most else None
            known = None if sampling.logprobs is None else [-0.5]
            top = [{token: -0.5, 65: -2.0, 66: -1.0}] if sampling.logprobs else None
            said = "" if token == END else decode([token])
            yield rl.Answer([token], known, [self.version], reason, said, number, top)

    @register(Dispatch.REQUEST)
    async def die(self):
        self.has_died = True

    def check_usable(self):
        super().check_usable()
        if self.has_died:
            raise EngineDied("the engine has died, though its worker lives")

    def _report_load(self):
        report(self, load=UNUSABLE_LOAD if self.has_died else self._n_open)

    async def pause(self, mode="abort"):
        await super().pause(mode)
        self.held = True
        self.go.clear()

    async def resume(self):
        self.held = False
        self.go.set()

    async def abort(self): ...
    async def sleep(self): ...
    async def wake(self): ...
    async def reset_cache(self): ...

    @property
    def is_ready(self):
        return not self.held

    async def metrics(self):
        counts = {"n_started": self.n_started, "n_ended": self.n_ended, "n_given_up": self.n_given_up}
        return {**await super().metrics(), **counts}


def call_text(name, **arguments):
    """A message for which the engine calls a tool."""
    return f"use {name} {json.dumps(arguments)}"
