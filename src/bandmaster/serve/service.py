"""`Service`: answers requests by a group of engines, remembers conversations, and records turns. Of one event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from bandmaster import CallTimeout, RemoteError, UsageError, WorkerDied
from bandmaster.rl import Answer, Completion, CompletionPart, EngineFacts, Prompt
from bandmaster.rl.engine_weights.sync import is_death
from bandmaster.rl.engine_weights.target import EngineDied, NotUsable
from bandmaster.serve.episodes import Recorder, Turn
from bandmaster.serve.errors import SERVER, APIError
from bandmaster.serve.fields import Asked
from bandmaster.serve.metrics import Metrics
from bandmaster.serve.options import Options
from bandmaster.serve.responses import Form, Object, joined_message, usage
from bandmaster.serve.sessions import Begun, Sessions

RETRIES = 1  # of a request whose replica died
MAXSIZE = 64  # parts of a stream that an engine is ahead of the client
PROBE_S = 2.0  # seconds in which a replica must say that it lives


class Replica(NamedTuple):
    """The state of a replica.

    Attributes:
        state: ``"ok"``, ``"paused"`` (or asleep), ``"busy"`` with a call that holds up requests, ``"unusable"`` if its
            engine has died or lost its weights, or ``"dead"``.
        version: The version of its weights.
    """

    state: str
    version: int | None


class Service:
    """The part of an endpoint that knows nothing of HTTP.

    Args:
        group: A group of `bandmaster.rl.Engine`s, in the controller or as a worker has it.
        options: The options of the endpoint.
    """

    def __init__(self, group: Any, options: Options) -> None:
        for name in ("complete", "completion_parts", "facts", "metrics"):
            if not hasattr(group, name):
                raise UsageError(f"an endpoint needs a group of rl.Engine, but {group!r} has no method {name!r}")
        self.group, self.options = group, options
        self.metrics = Metrics()
        self.recorder = Recorder(options.max_recorded_tokens, options.on_turn, options.record)
        self._sessions = Sessions(options.max_session_tokens)
        mesh = group.mesh
        self.n_replicas = mesh.axis_size("dp") if "dp" in mesh.axis_names else 1
        self.facts = EngineFacts("", 1, 1, 0, False)
        self.model = options.model or ""
        self.created = int(time.time())
        self.has_started = False
        self._open: set[asyncio.Task[Any]] = set()

    @property
    def n_open(self) -> int:
        """The number of open requests."""
        return len(self._open)

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count the request of this task as open."""
        task = asyncio.current_task()
        assert task is not None, "requests run in tasks"
        self._open.add(task)
        self.metrics.open.set(self.n_open)
        try:
            yield
        finally:
            self._open.discard(task)
            self.metrics.open.set(self.n_open)

    def give_up(self) -> None:
        """Cancel all open requests."""
        for task in list(self._open):
            task.cancel()

    async def start(self) -> None:
        """Ask the engines what they are, unless they have said so."""
        if not self.has_started:
            self.facts = await _by_a_living_engine(self.group.facts)
            self.model = self.options.model or self.facts.model
            self.has_started = True

    # --- answers ---

    async def whole(self, asked: Asked, form: Form) -> Object:
        """The response to a request."""
        asked_for = [
            self._complete(asked, prompt, form, n * asked.sampling.n) for n, prompt in enumerate(asked.prompts)
        ]
        answered = await _all(asked_for)
        self._record([turn for one in answered for turn in one.turns])
        choices = [choice for one in answered for choice in one.choices]
        n_prompt, n_known = (sum(counts) for counts in zip(*[(len(a.ids), a.n_known) for a in answered], strict=True))
        n_answer = sum(len(turn.answer) for one in answered for turn in one.turns)
        return form.whole(choices, usage(n_prompt, n_answer, n_known), [one.ids.tolist() for one in answered])

    async def _complete(self, asked: Asked, prompt: Prompt, form: Form, first: int) -> _Answered:
        begun, prompt = self._begin(asked, prompt)
        method = self.group.complete.options(key=begun.name, retries=RETRIES)
        completion: Completion = await _by_a_living_engine(method, prompt, asked.sampling)
        if any(choice.answer.finish_reason == "abort" for choice in completion.choices):
            raise aborted()
        ids = self._ids(begun, completion.n_known, completion.ids)
        made, turns = [], []
        for choice in completion.choices:
            message = form.message(choice.message)
            turns.append(self._ended(begun, prompt, ids, choice.answer, message))
            made.append(form.choice(choice, message, completion.texts, first))
        return _Answered(made, ids, completion.n_known, turns)

    async def events(self, asked: Asked, form: Form) -> AsyncGenerator[Object, None]:
        """The events of the stream that answers a request."""
        counts = [0, 0, 0]
        turns: list[Turn] = []
        streams = [self._parts(asked, prompt, form, n, counts, turns) for n, prompt in enumerate(asked.prompts)]
        async with aclosing(_merged(streams)) as merged:
            async for made in merged:
                yield made
        if asked.has_usage:
            yield form.end(usage(*counts))

    async def _parts(
        self, asked: Asked, prompt: Prompt, form: Form, number: int, counts: list[int], turns: list[Turn]
    ) -> AsyncGenerator[Object, None]:
        """The events about one prompt. Its tokens, those of the answers and those that were known are added up.

        The turns of all prompts are recorded once the last one has ended: before its client, which may then hang up, is
        told so.
        """
        begun, prompt = self._begin(asked, prompt)
        ids: np.ndarray[Any, np.dtype[np.int32]] | None = None
        parts: dict[int, list[CompletionPart]] = {}
        async with aclosing(self._stream(begun, prompt, asked)) as stream:
            async for part in stream:
                of_prompt = None
                if part.ids is not None:
                    ids = self._ids(begun, part.n_known, part.ids)
                    of_prompt = ids.tolist() if asked.has_ids else None
                    counts[0], counts[2] = counts[0] + len(ids), counts[2] + part.n_known
                assert ids is not None, "the first part has the ids of the prompt"
                if part.answer.finish_reason == "abort":
                    raise aborted()
                counts[1] += len(part.answer.tokens)
                same = parts.setdefault(part.answer.number, [])
                same.append(part)
                made = form.part(part, number * asked.sampling.n, of_prompt)
                if part.answer.finish_reason is not None:
                    message = form.message(joined_message([one.delta for one in same if one.delta]))
                    answer = Answer.joined([one.answer for one in same])
                    turns.append(self._ended(begun, prompt, ids, answer, message))
                    if len(turns) == len(asked.prompts) * asked.sampling.n:
                        self._record(turns)
                if made is not None:
                    yield made

    async def _stream(self, begun: Begun, prompt: Prompt, asked: Asked) -> AsyncGenerator[CompletionPart, None]:
        """The parts of an answer, of another replica if one died before it had begun."""
        method = self.group.completion_parts.options(key=begun.name, maxsize=MAXSIZE)
        for attempt in range(RETRIES + 1):
            has_begun = False
            stream = method.stream(prompt, asked.sampling)
            try:
                async for part in stream:
                    has_begun = True
                    yield part
                return
            except (WorkerDied, RemoteError) as error:
                if has_begun or attempt == RETRIES or not is_death(error):
                    raise
            finally:
                stream.close()

    # --- conversations ---

    def _begin(self, asked: Asked, prompt: Prompt) -> tuple[Begun, Prompt]:
        """A conversation, and the prompt with what is known of it."""
        if prompt.messages is None:
            name = asked.session or f"completion-{secrets.token_hex(8)}"
            return Begun(name, b"", None), prompt
        begun = self._sessions.begin(asked.session, prompt)
        return begun, prompt if begun.known is None else replace(prompt, known=begun.known)

    def _ids(self, begun: Begun, n_known: int, new: Any) -> Any:
        """All ids of a prompt, int32 (tokens,), which are counted."""
        self.metrics.known_tokens.inc(n_known)
        if begun.known is not None and not n_known:
            self.metrics.drifts.inc()
        ids = np.concatenate([begun.known.ids, new]) if begun.known is not None and n_known else new
        self.metrics.prompt_tokens.inc(len(ids))
        return ids

    def _ended(self, begun: Begun, prompt: Prompt, ids: Any, answer: Answer, message: Mapping[str, Any]) -> Turn:
        """Remember and count an answer. Returns its turn."""
        self.metrics.answer_tokens.inc(len(answer.tokens))
        chosen = np.array(answer.tokens, np.int32)
        if prompt.messages is not None:
            self._sessions.remember(begun, message, np.concatenate([ids, chosen]))
            self.metrics.remembered.set(self._sessions.n_tokens)
        return Turn(
            session=begun.name,
            prompt=ids,
            answer=chosen,
            log_probs=np.array(answer.log_probs or [0.0] * len(chosen), np.float32),
            versions=np.array(answer.versions, np.int64),
            finish_reason=answer.finish_reason or "",
            number=answer.number,
        )

    def _record(self, turns: Sequence[Turn]) -> None:
        """Record the turns of a request, if somebody reads them."""
        if self.options.is_recorded:
            for turn in turns:
                self.recorder.add(turn)
            self.metrics.dropped.set(self.recorder.n_dropped)

    # --- replicas ---

    async def replicas(self) -> list[Replica]:
        """The state of each replica."""
        return list(await asyncio.gather(*[self._replica(number) for number in range(self.n_replicas)]))

    async def _replica(self, number: int) -> Replica:
        try:
            facts: EngineFacts = await self.group.facts.options(replica=number, timeout=PROBE_S)()
        except CallTimeout:
            return Replica("busy", None)
        except RemoteError as error:
            return Replica("unusable" if isinstance(error.__cause__, NotUsable | EngineDied) else "dead", None)
        except Exception:
            return Replica("dead", None)
        return Replica("ok" if facts.is_ready else "paused", facts.version)

    async def figures(self) -> dict[int, Mapping[str, float] | None]:
        """The figures of each engine; None of one that answers no requests."""
        return dict(enumerate(await asyncio.gather(*[self._figures(number) for number in range(self.n_replicas)])))

    async def _figures(self, number: int) -> Mapping[str, float] | None:
        if (await self._replica(number)).state not in ("ok", "paused"):
            return None
        try:
            found: Mapping[str, float] = await self.group.metrics.options(replica=number, timeout=PROBE_S)()
            return found
        except Exception:
            return None


class _Answered(NamedTuple):
    choices: list[Object]
    ids: Any
    n_known: int
    turns: list[Turn]


async def _by_a_living_engine(method: Any, *args: Any) -> Any:
    """Send a request, and once more if its engine has died: that one has reported so, and another one gets it."""
    try:
        return await method(*args)
    except RemoteError as error:
        if not is_death(error):
            raise
        return await method(*args)


def aborted() -> APIError:
    """The error of an answer that the engine was told to give up, which is none."""
    return APIError(
        503,
        "the engine was told to give up its requests; send it again",
        SERVER,
        code="aborted",
        headers={"Retry-After": "1"},
    )


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    """The values of coroutines that run beside each other. If one fails, the others are cancelled."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _merged(streams: Sequence[AsyncGenerator[Object, None]]) -> AsyncGenerator[Object, None]:
    """The items of streams that run beside each other, as they come."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield item
        return
    waiting = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(stream))] = stream
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
