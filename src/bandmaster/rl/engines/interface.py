"""`Engine`: an inference engine as a worker, for batches of rows and for single requests."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from bandmaster import Dispatch, UsageError, register, report
from bandmaster.rl.engine_weights.target import CONTROL, Asleep, PauseMode, TakesWeights
from bandmaster.rl.engines.answers import Answer, columns_of, is_chat, prompts_of, seeds_of, token_ids
from bandmaster.rl.engines.completions import (
    Begun,
    Completion,
    CompletionPart,
    Conversation,
    EngineFacts,
    Prompt,
    PromptTooLong,
    begin,
)
from bandmaster.rl.engines.sampling import Sampling

CONCURRENCY = 256  # requests of one caller that a replica runs at a time; further ones wait in the caller
PAUSE_MODES = ("keep", "wait", "abort")
T = TypeVar("T")


class Engine(TakesWeights, ABC):
    """Base class of workers that are inference engines: token ids in, token ids out.

    A batch goes to all replicas by `generate`, a call that runs alone. Single prompts go to one replica each by
    `request` and `tokens`, many at a time. The methods that control an engine are requests, so that they reach one that
    is busy; ``group.pause.all("keep")`` reaches all replicas.

    An engine implements `answers`, `increments`, and the methods that control it. All run on the event loop of the
    worker, one at a time between two ``await``s. It overrides `is_ready` and `is_asleep` if it can be paused or put to
    sleep, `conversation` for servers, and `load_weights` to be a target of `WeightSync`.

    Attributes:
        vocab_size: Token ids of prompts are below this number. An engine sets it in its constructor.
        max_model_len: Most tokens of a prompt with its answer. An engine sets it in its constructor.
        weights_version: The version of the weights. Until there is one, answers have version 0.
    """

    vocab_size: int
    max_model_len: int
    _n_open = 0
    _n_pauses = 0  # calls of `pause`

    # --- for implementers ---

    @abstractmethod
    async def answers(self, prompt: list[int], sampling: Sampling) -> list[Answer]:
        """Answer a prompt, ``sampling.n`` times. A cancelled request is given up.

        Args:
            prompt: Token ids that were checked.
            sampling: How to choose tokens.
        """

    @abstractmethod
    def increments(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[Answer, None]:
        """Yield the parts of ``sampling.n`` answers as they come; closing the generator gives the answers up.

        Args:
            prompt: Token ids that were checked.
            sampling: How to choose tokens.
        """

    async def answer_all(self, prompts: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Answer]:
        """Answer each prompt once, in order. By default one `answers` for each, all at a time.

        Args:
            prompts: Token ids that were checked.
            samplings: How to choose the tokens of each answer; ``n`` is 1.
        """
        asked = [self.answers(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
        return [answers[0] for answers in await _all(asked)]

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that chat messages make, as token ids.

        Raises:
            UsageError: The engine has no chat template.
        """
        raise UsageError(f"{type(self).__name__} has no chat template; give it token ids")

    def conversation(self, prompt: Prompt) -> Conversation:
        """Make the `Conversation` that renders a prompt of messages or a text, and reads its answers.

        Raises:
            UsageError: The engine has no tokenizer.
        """
        raise UsageError(f"{type(self).__name__} has no tokenizer; give it token ids")

    @property
    def model_name(self) -> str:
        """The name of the model, by which clients ask for it."""
        return type(self).__name__

    def check_sampling(self, sampling: Sampling) -> None:
        """Check that the engine can do what is asked for.

        Raises:
            UsageError: It cannot.
        """

    def check_request(self) -> None:
        """Check that the engine answers requests.

        Raises:
            UsageError: It does not, as one that spans several ranks may.
        """

    @property
    def is_ready(self) -> bool:
        """Whether the engine makes tokens: it is neither paused nor asleep."""
        return True

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has given up the memory of its weights, so that it cannot take new ones."""
        return False

    @property
    def version(self) -> int:
        """The version of the weights, as answers have it."""
        return self.weights_version if type(self.weights_version) is int else 0

    # --- batches ---

    @register(Dispatch.THREE_D_ALL_MICRO_DP)
    async def generate(self, rows: Any, sampling: Sampling = Sampling()) -> dict[str, Any]:  # noqa: B008  # frozen
        """Answer the prompts of rows, each once, in order. It begins when the requests before it have ended.

        Args:
            rows: A dict, TensorDict or DataFrame with a column ``prompt`` of token ids: a list of lists, arrays or
                tensors, a nested tensor, or an array or tensor (rows, tokens), of which a column ``prompt_mask`` may
                say which tokens count. A column ``seed`` has the seed of each answer.
            sampling: How to choose tokens, with ``n=1``.

        Returns:
            A row for each row: ``answer``, the token ids, int64, and ``log_probs``, float32, unless there are to be
            none, and ``versions`` of the weights, int64, are lists of an array (tokens,) for each row, see `padded`;
            ``n_tokens``, int64 (rows,); ``finish_reason``, a list of strings. See `Answer`.

        Raises:
            UsageError: Before the engine does anything: a prompt is not valid, which the message names by its number
                among the rows of this replica; or the sampling is not; or the engine is paused or asleep.
        """
        if not self.is_ready:  # what ends that is a request, which would wait behind this call
            raise UsageError("the engine is paused or asleep; call resume.all() or wake.all() before generate")
        if self._arrived is not None:
            raise UsageError(
                f"rank {self.rank} has no weights, as it was replaced or has dropped them; generate after the next sync"
            )
        self.check_usable()
        prompts, seeds = prompts_of(rows), seeds_of(rows)
        self._check(sampling)
        if sampling.n > 1 or sampling.logprobs:
            raise UsageError(
                f"generate answers each row once, with the log-probabilities of its tokens alone, got {sampling}; "
                "repeat the rows instead of n, and use requests for logprobs above 0"
            )
        for number, prompt in enumerate(prompts):
            self._check_prompt(prompt, f"prompt {number}")
        samplings = [sampling] * len(prompts) if seeds is None else [replace(sampling, seed=seed) for seed in seeds]
        return columns_of(self._checked(await self.answer_all(prompts, samplings)), sampling.logprobs is not None)

    # --- requests ---

    @register(Dispatch.REQUEST, concurrency=CONCURRENCY, is_idempotent=True)
    async def request(self, prompt: Any, sampling: Sampling = Sampling()) -> list[Answer]:  # noqa: B008  # frozen
        """Answer one prompt. Cancelling the request gives it up in the engine.

        Args:
            prompt: Token ids, or chat messages such as ``[{"role": "user", "content": "2 + 2"}]``.
            sampling: How to choose tokens.

        Returns:
            ``sampling.n`` answers.

        Raises:
            UsageError: Before the engine does anything: the prompt or the sampling is not valid.
        """
        ids = self._prompt(prompt, sampling)
        with self._counted():
            await self.has_weights()
            return self._checked(await self.answers(ids, sampling))

    @register(Dispatch.REQUEST, concurrency=CONCURRENCY)
    async def tokens(self, prompt: Any, sampling: Sampling = Sampling()) -> AsyncGenerator[Answer, None]:  # noqa: B008
        """Yield the parts of the answers to one prompt as they come. Closing the stream gives them up in the engine.

        Args:
            prompt: Token ids, or chat messages.
            sampling: How to choose tokens.

        Raises:
            UsageError: Before the engine does anything: the prompt or the sampling is not valid.
        """
        ids = self._prompt(prompt, sampling)
        with self._counted():
            await self.has_weights()
            parts = self.increments(ids, sampling)
            try:
                async for part in parts:
                    yield part
            finally:
                await parts.aclose()

    # --- requests of servers: a prompt of messages or a text in, messages and the ids of the prompt out ---

    @register(Dispatch.REQUEST, concurrency=CONCURRENCY, is_idempotent=True)
    async def complete(self, prompt: Prompt, sampling: Sampling = Sampling()) -> Completion:  # noqa: B008  # frozen
        """Answer a prompt, as `request` does, and return what a server needs to know of it.

        Args:
            prompt: Messages, a text or token ids.
            sampling: How to choose tokens.

        Returns:
            The ids of the prompt, and ``sampling.n`` answers with the messages that they make.

        Raises:
            UsageError: Before the engine does anything: the prompt or the sampling is not valid.
        """
        begun, sampling = await self._begin(prompt, sampling)
        with self._counted():
            await self.has_weights()
            version = self.version
            return begun.completion(self._checked(await self.answers(begun.ids, sampling)), version)

    @register(Dispatch.REQUEST, concurrency=CONCURRENCY)
    async def completion_parts(
        self,
        prompt: Prompt,
        sampling: Sampling = Sampling(),  # noqa: B008  # frozen
    ) -> AsyncGenerator[CompletionPart, None]:
        """Yield the parts of the answers to a prompt as they come, the first one with the ids of the prompt.

        Args:
            prompt: Messages, a text or token ids.
            sampling: How to choose tokens.

        Raises:
            UsageError: Before the engine does anything: the prompt or the sampling is not valid.
        """
        begun, sampling = await self._begin(prompt, sampling)
        with self._counted():
            await self.has_weights()
            parts = self.increments(begun.ids, sampling)
            try:
                async for part in parts:
                    yield begun.part(part)
            finally:
                await parts.aclose()

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def facts(self) -> EngineFacts:
        """The facts about the engine that its clients need.

        Raises:
            NotUsable: The engine has lost its weights.
            EngineDied: It has died, though its worker lives.
        """
        self.check_usable()
        return EngineFacts(self.model_name, self.max_model_len, self.vocab_size, self.version, self.is_ready)

    # --- control: requests, which reach an engine that is busy ---

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    @abstractmethod
    async def pause(self, mode: PauseMode = "abort") -> None:
        """Let the engine make no more tokens until `resume`. Requests that come meanwhile wait for it.

        Args:
            mode: ``"keep"`` holds the requests that run, and goes on with them later; ``"wait"`` waits until they have
                ended; ``"abort"`` gives them up: they return the tokens that they have, with finish reason "abort".

        An override calls this, which checks the mode.

        Raises:
            UsageError: The mode is unknown.
        """
        if mode not in PAUSE_MODES:
            raise UsageError(f"the mode of pause must be one of {', '.join(map(repr, PAUSE_MODES))}, got {mode!r}")
        self._n_pauses += 1

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    @abstractmethod
    async def resume(self) -> None:
        """Go on after `pause`; does nothing to an engine that is not paused."""

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    @abstractmethod
    async def abort(self) -> None:
        """Give up all requests that run: they return the tokens that they have, with finish reason "abort"."""

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    @abstractmethod
    async def sleep(self) -> None:
        """Free the memory of the device, for a trainer on the same one. Requests wait until `wake`."""

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    @abstractmethod
    async def wake(self) -> None:
        """Take the memory back after `sleep`; the weights are those from before. Does nothing to one that is awake."""

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    @abstractmethod
    async def reset_cache(self) -> None:
        """Forget what is cached of prompts, as after a change of the weights."""

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def metrics(self) -> dict[str, float]:
        """Figures of the engine by name.

        Returns:
            ``n_open`` of the requests that were sent to this replica and have not ended, ``n_running`` and
            ``n_waiting`` of those in the engine, ``version`` of the weights, and others that each kind of engine has.
        """
        return {"n_open": self._n_open, "n_running": self._n_open, "n_waiting": 0, "version": self.version}

    # --- checks and load ---

    async def _begin(self, prompt: Prompt, sampling: Sampling) -> tuple[Begun, Sampling]:
        """A prompt that is about to be answered, and the sampling that it needs; both were checked."""
        self.check_request()
        if not isinstance(prompt, Prompt):
            raise UsageError(f"complete takes a rl.Prompt, got {type(prompt).__name__}; request takes token ids")
        self._check(sampling)
        is_read = prompt.ids is None or prompt.wants_texts
        conversation = self.conversation(prompt) if is_read else None
        begun = await begin(prompt, conversation)
        self._check_prompt(begun.ids, "the prompt")
        return begun, sampling if conversation is None else conversation.adjusted(sampling)

    def _prompt(self, prompt: Any, sampling: Sampling) -> list[int]:
        """The token ids of the prompt of a request, which were checked, as was the sampling."""
        self.check_request()
        self._check(sampling)
        ids = self.chat_token_ids(prompt) if is_chat(prompt) else token_ids(prompt)
        self._check_prompt(ids, "the prompt")
        return ids

    def _check(self, sampling: object) -> None:
        if not isinstance(sampling, Sampling):
            raise UsageError(f"sampling must be a rl.Sampling, got {sampling!r}")
        self.check_sampling(sampling)

    def _checked(self, answers: list[Answer]) -> list[Answer]:
        """The answers that the subclass has made, if they are what a trainer can learn from."""
        for answer in answers:
            if not isinstance(answer, Answer):
                raise UsageError(
                    f"{type(self).__name__}.answers must return a list of rl.Answer, got one of {type(answer).__name__}"
                )
            for name, values in (("log_probs", answer.log_probs), ("versions", answer.versions)):
                if values is not None and len(values) != len(answer.tokens):
                    raise UsageError(
                        f"{type(self).__name__} has answered {len(answer.tokens)} tokens with {len(values)} {name}; "
                        "an rl.Answer has one for each token"
                    )
        return answers

    def _check_prompt(self, prompt: Sequence[int], what: str) -> None:
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong(
                f"{what} has {len(prompt)} tokens, but the engine takes {self.max_model_len} with the answer "
                "(max_model_len); shorten the prompt"
            )
        if not prompt:
            raise UsageError(f"{what} is empty; give the model at least one token to begin with")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise UsageError(f"{what} has the token id {wrong}, but those of the model are 0 to {self.vocab_size - 1}")

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request as open, and report how many are."""
        self._n_open += 1
        self._report_load()
        try:
            yield
        finally:
            self._n_open -= 1
            self._report_load()

    def _report_load(self) -> None:
        if self._arrived is None and not self._unusable:
            report(self, load=self._n_open)

    # --- weights ---

    def check_takes_weights(self) -> None:
        """Check that the engine can load weights now.

        Raises:
            Asleep: It is asleep.
        """
        if self.is_asleep:
            raise Asleep("the engine is asleep; call wake.all() before new weights come")

    @asynccontextmanager
    async def held(self, in_flight: PauseMode) -> AsyncIterator[None]:
        """Pause the engine within a block, unless it is paused, and forget at its end what was cached of prompts.

        Engines whose `load_weights` is not async need no more than this; of others, `resume` must not go on within it.

        Args:
            in_flight: The mode of `pause`.
        """
        is_paused_here = self.is_ready
        n_pauses = self._n_pauses
        try:
            if is_paused_here:
                await self.pause(in_flight)
            try:
                yield
            finally:
                await self.reset_cache()
        finally:
            if is_paused_here and self._n_pauses <= n_pauses + 1:  # else the user has paused it meanwhile
                await self.resume()


async def _all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The values of coroutines that run beside each other. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
