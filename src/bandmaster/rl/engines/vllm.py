"""`VLLM`: vLLM as a worker.

::

    one rank for each replica                        several ranks for each, along tp
    worker: VLLM                                     workers of a replica: each a VLLM with an engine of its own
      AsyncLLM: requests in, outputs out               LLM, "external_launcher": all get the same rows, choose the
        ▲ sockets of vLLM                              same tokens, and add up what they compute over torch.distributed
        ▼
      a child process: scheduler, model, KV cache

vLLM is imported in workers alone. `docs/design/` lists what of vLLM this module relies on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bandmaster import Dispatch, Mesh, UsageError, register, report
from bandmaster.rl.engine_weights.checkpoint import as_engine_has_them, checkpoint_specs
from bandmaster.rl.engine_weights.staged import StagedWeights
from bandmaster.rl.engine_weights.target import CONTROL, UNUSABLE_LOAD, EngineDied, PauseMode
from bandmaster.rl.engines import vllm_start
from bandmaster.rl.engines.answers import Answer
from bandmaster.rl.engines.completions import Conversation, Prompt
from bandmaster.rl.engines.interface import Engine
from bandmaster.rl.engines.sampling import Sampling
from bandmaster.rl.engines.vllm_checkpoint import checkpoint_weights, model_folder
from bandmaster.rl.engines.vllm_plugin import WEIGHTS
from bandmaster.rl.engines.vllm_values import DEFAULT_VERSION, answers_of, metrics_of, sampling_params
from bandmaster.rl.layout import Spec, in_buckets
from bandmaster.rl.lent_weights import LentWeights, Memory

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from bandmaster.rl.engines.vllm_chat import ChatFormat

AT_A_TIME_NBYTES = 256 << 20  # of the weights that are loaded in one call of vLLM
MEMORY = frozenset(("weights", "kv_cache"))  # the tags of what sleep gives up


class VLLM(Engine):
    """A worker that runs vLLM.

    Each coordinate along ``dp`` is a replica with an engine. Ranks along ``tp`` share one model: such a replica answers
    batches (`generate`) alone. For requests to a model that needs several devices, let one rank have them:
    ``ResourcePool([2], use_gpu=True, gpus_per_worker=4)`` and ``tensor_parallel_size=4``.

    Sampling, LoRA and stop conditions are hooks of subclasses: `sampling_params`, `lora_request`, `is_stopped`.

    Args:
        model: A model's hub name or local path.
        seed: Of the random numbers of engines; replicas draw different ones from it.
        tool_parser: The name of vLLM's parser for the model's tool calls, such as ``"hermes"``; see
            `bandmaster.serve`. ``reasoning_parser`` is an option of ``EngineArgs``.
        chat_template: A chat template instead of the tokenizer's.
        **options: The options of vLLM's ``EngineArgs``, such as ``dtype``, ``max_model_len``,
            ``kv_cache_memory_bytes``, ``gpu_memory_utilization``, ``enable_lora`` and ``enable_sleep_mode``.

    Raises:
        UsageError: An option belongs to the mesh, or the ranks of a replica do not follow each other; or vLLM has no
            such parser.
        ImportError: vLLM is not installed.

    Example::

        with bm.ResourcePool([2], use_gpu=True) as pool:
            rollout = bm.WorkerGroup(pool, rl.VLLM, "Qwen/Qwen3-0.6B", mesh=bm.Mesh(dp=2), max_model_len=4096)
            rows = rollout.generate({"prompt": [[1, 2, 3], [4, 5]]}, rl.Sampling(max_tokens=64))
            (answer,) = rollout.request([1, 2, 3], rl.Sampling(temperature=0)).result()
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        tool_parser: str | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        self._chat: ChatFormat | None = None  # made when it is first needed
        self._chat_options = {
            "tool_parser": tool_parser,
            "chat_template": chat_template,
            "reasoning_parser": options.get("reasoning_parser"),
        }
        self._replica = vllm_start.Replica.of(self)
        self._numbers = itertools.count()
        self._open: set[str] = set()  # the requests in the engine, by vLLM's names
        self._is_paused = self._is_held = False
        self._sleeping: frozenset[str] = frozenset()  # the tags of the memory that it has given up
        self._changing = asyncio.Lock()  # held while the engine is paused, put to sleep, or gets weights
        options = {"model": model, "seed": seed + self._replica.number, **options}
        self._engine: Any = None
        self._llm: Any = None
        if self._replica.n_ranks > 1:
            self._llm = vllm_start.llm_of_ranks(self, self._replica, options)
            self._config = self._llm.llm_engine.vllm_config
        else:
            self._engine = vllm_start.async_llm(options, tool_parser)
            self._config = self._engine.vllm_config
        self._is_text = not self._config.model_config.skip_tokenizer_init
        self.vocab_size = self._config.model_config.get_vocab_size()
        self.max_model_len = self._config.model_config.max_model_len
        report(self, load=0, version=self.version)

    @classmethod
    def why_not_replaced(cls, mesh: Mesh) -> str:
        """The reason why no rank can be replaced: the ranks of a replica join one process group for good."""
        axis = vllm_start.axis_of_ranks(mesh)
        return (
            f"the {mesh.axis_size(axis)} ranks of an engine along {axis} start together, so that none can be replaced "
            "alone; restart() the whole group"
            if axis
            else ""
        )

    # --- hooks ---

    def sampling_params(self, sampling: Sampling) -> SamplingParams:
        """The parameters that vLLM gets for a request.

        Override it to set what `Sampling` does not have. A subclass of `Sampling` brings values along with a request::

            @dataclass(frozen=True, kw_only=True)
            class Penalized(rl.Sampling):
                penalty: float = 1.0

            class Rollout(rl.VLLM):
                def sampling_params(self, sampling):
                    params = super().sampling_params(sampling)
                    params.repetition_penalty = sampling.penalty
                    return params
        """
        return sampling_params(sampling, is_text=self._is_text)

    def lora_request(self, sampling: Sampling) -> LoRARequest | None:
        """The adapter with which a request is answered; by default none. The engine needs ``enable_lora=True``."""
        return None

    def is_stopped(self, answer: Answer, sampling: Sampling) -> bool:
        """Whether an answer ends here, with finish reason "stop".

        An override is called with each answer as it grows, which costs a message for each of its tokens; it is for
        requests and batches of replicas of one rank.

        Args:
            answer: The answer so far.
            sampling: How its tokens are chosen.
        """
        return False

    # --- the engine ---

    async def answers(self, prompt: list[int], sampling: Sampling) -> list[Answer]:
        """Answer a prompt by vLLM's ``AsyncLLM``."""
        if type(self).is_stopped is not VLLM.is_stopped:
            return await self._whole(prompt, sampling)
        output = None
        async for output in self._outputs(prompt, sampling, is_streaming=False):  # noqa: B007  # the last one has all
            pass
        assert output is not None, "vLLM yields at least the last output"
        return sorted(self._answers_of(output, sampling, self.version), key=lambda answer: answer.number)

    async def increments(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[Answer, None]:
        """Yield the tokens of answers as vLLM's ``AsyncLLM`` makes them."""
        has_stop = type(self).is_stopped is not VLLM.is_stopped
        if has_stop and sampling.n > 1:
            raise UsageError(f"is_stopped of {type(self).__name__} ends one answer, got n={sampling.n}; ask for one")
        whole: list[Answer] = []
        outputs = self._as_they_come(self._outputs(prompt, sampling, is_streaming=True))
        try:
            async for output, version in outputs:
                for part in self._answers_of(output, sampling, version):
                    if has_stop and part.finish_reason is None:
                        whole = [Answer.joined([*whole, part])]
                        if self.is_stopped(whole[0], sampling):
                            yield part._replace(finish_reason="stop")
                            return
                    yield part
        finally:
            await outputs.aclose()

    async def answer_all(self, prompts: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Answer]:
        """Answer prompts: all at a time, or by the engines of all ranks of a replica together."""
        if self._llm is None:
            return await super().answer_all(prompts, samplings)
        return self._answer_together(prompts, samplings)

    def _answer_together(self, prompts: Sequence[list[int]], samplings: Sequence[Sampling]) -> list[Answer]:
        """Answer prompts on all ranks of the replica.

        It holds up the event loop, so that no cancel has ranks stop at different steps.
        """
        if not prompts:
            return []
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            [self.sampling_params(sampling) for sampling in samplings],
            lora_request=[self.lora_request(sampling) for sampling in samplings],
            use_tqdm=False,
        )
        return [self._answers_of(*one, self.version)[0] for one in zip(outputs, samplings, strict=True)]

    def _answers_of(self, output: Any, sampling: Sampling, version: int) -> list[Answer]:
        return answers_of(output, sampling, version, is_text=self._is_text)

    async def _whole(self, prompt: list[int], sampling: Sampling) -> list[Answer]:
        """The answer to a prompt, which a stop condition may end."""
        return [Answer.joined([part async for part in self.increments(prompt, sampling)])]

    async def _as_they_come(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[tuple[Any, int], None]:
        """Yield outputs, each with the version of the weights at the moment when it came.

        A task reads them, as the reader of a stream may take them much later, when weights have changed.
        """
        read: asyncio.Queue[tuple[Any, int] | BaseException | None] = asyncio.Queue()

        async def read_all() -> None:
            try:
                async for output in outputs:
                    read.put_nowait((output, self.version))
            except Exception as error:
                read.put_nowait(error)
            read.put_nowait(None)

        task = asyncio.create_task(read_all())
        try:
            while (item := await read.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await outputs.aclose()

    async def _outputs(self, prompt: list[int], sampling: Sampling, is_streaming: bool) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs: parts as they come, or the whole.

        Raises:
            UsageError: vLLM refuses the request; or the replica has several ranks.
            EngineDied: vLLM's process has died.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        params = self.sampling_params(sampling)
        params.output_kind = RequestOutputKind.DELTA if is_streaming else RequestOutputKind.FINAL_ONLY
        name = str(next(self._numbers))
        outputs = self._engine.generate(tokens_input(prompt), params, name, lora_request=self.lora_request(sampling))
        self._open.add(name)
        try:
            async for output in outputs:
                yield output
        except VLLMClientError as error:
            raise UsageError(f"vLLM refuses the request: {error}") from error
        except EngineDeadError as error:
            raise self._died() from error
        finally:
            self._open.discard(name)
            await outputs.aclose()

    def _report_load(self) -> None:
        if self._engine is None or not self._engine.errored:  # else it stays what was reported of its death
            super()._report_load()

    def _died(self) -> EngineDied:
        """Report that requests are to go elsewhere, and return the error that says why."""
        report(self, load=UNUSABLE_LOAD)
        return EngineDied(
            f"the vLLM engine of rank {self.rank} has died; its output says why; have the rank replaced by "
            "group.replace(rank), or restart the group"
        )

    # --- control ---

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Make no more tokens until `resume`, by ``AsyncLLM.pause_generation``; the prefix cache is kept."""
        await super().pause(mode)
        async with self._changing:
            self._is_paused = True
            if self._engine is not None:
                await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """Go on after `pause`."""
        if self._engine is not None and not (self._sleeping or self._is_held):
            await self._engine.resume_generation()
        self._is_paused = False

    async def abort(self) -> None:
        """Give up all requests that run or wait in the engine."""
        if self._engine is not None:
            await self._engine.abort(list(self._open))

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of the device; requests that run are given up, as by `abort`, and further ones wait.

        Does nothing to an engine that sleeps. On CPUs, vLLM frees nothing; the engine sleeps all the same.

        Args:
            level: 1 keeps the weights in the host's memory; 2 drops them, so that all wait for the next sync.

        Raises:
            UsageError: The level is unknown; or a part of the memory was not taken back after the last sleep; or the
                engine was made without ``enable_sleep_mode=True``.
        """
        if level not in (1, 2):
            raise UsageError(f"the level of sleep must be 1 or 2, got {level!r}")
        if self.device != "cpu" and not self._config.model_config.enable_sleep_mode:
            raise UsageError("an engine that is to sleep frees memory only with enable_sleep_mode=True; make it so")
        async with self._changing:
            if self._sleeping == MEMORY:
                return
            if self._sleeping:
                asleep = ", ".join(self._sleeping)
                raise UsageError(f"{asleep} of the engine still sleeps; call wake.all() before sleep")
            if self._engine is not None:
                await self._engine.sleep(level, mode="abort")
            else:
                self._llm.sleep(level)
            self._sleeping = MEMORY
            if level == 2:
                self.await_weights()

    async def wake(self, *tags: str) -> None:
        """Take the memory back after `sleep`, and go on, unless `pause` was called.

        Args:
            *tags: What to take back, ``"weights"`` or ``"kv_cache"``; all by default. The engine gets new weights once
                it has memory for them, and goes on when it has all.

        Raises:
            UsageError: A tag is unknown.
        """
        if unknown := set(tags) - MEMORY:
            raise UsageError(f"memory of an engine has the tags {', '.join(sorted(MEMORY))}, got {unknown.pop()!r}")
        async with self._changing:
            woken = self._sleeping & set(tags or MEMORY)
            if woken and self._engine is not None:
                await self._engine.wake_up(sorted(woken))
                if self._is_paused and woken == self._sleeping:
                    await self._engine.pause_generation(mode="keep", clear_cache=False)
            elif woken:
                self._llm.wake_up(sorted(woken))
            self._sleeping -= woken

    async def reset_cache(self) -> None:
        """Drop the prefix cache."""
        if self._engine is not None:
            await self._engine.reset_prefix_cache()
        else:
            self._llm.reset_prefix_cache()

    async def metrics(self) -> dict[str, float]:
        """Figures of the engine by name.

        Returns:
            Those of `Engine.metrics`, and all counters and gauges of vLLM by their names, such as
            ``vllm:kv_cache_usage_perc``.
        """
        found = metrics_of()
        running, waiting = found.get("vllm:num_requests_running", 0), found.get("vllm:num_requests_waiting", 0)
        return {**found, **await super().metrics(), "n_running": running, "n_waiting": waiting}

    # --- weights ---

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def engine_memory(self) -> Memory:
        """Return the GPU of vLLM's process, which can read no other memory of its worker.

        Raises:
            UsageError: The replica has several ranks.
        """
        if self._llm is not None:
            raise UsageError(
                f"share=True is for engines with all their devices in one rank, and this replica has "
                f"{self._replica.n_ranks} ranks along tp; leave it out, so that weights are copied"
            )
        memory = Memory.of(self)
        return memory._replace(place=memory.place._replace(pid=0))

    def weights_specs(self) -> dict[str, Spec] | None:
        """The tensors of the model's safetensors files, in the engine's dtype; None if there are no such files."""
        found = self._checkpoint()
        return None if found is None else found[1]

    def _checkpoint(self) -> tuple[Path, dict[str, Spec]] | None:
        """The folder of the model's safetensors files, and their tensors in the engine's dtype; None without files."""
        config = self._config.model_config
        folder = model_folder(config)
        specs = None if folder is None else checkpoint_specs(folder)
        if folder is None or specs is None:
            return None
        return folder, as_engine_has_them(specs, str(config.dtype).removeprefix("torch."))

    def first_weights(self) -> StagedWeights:
        """The weights of the model's safetensors files.

        Raises:
            UsageError: There are no such files.
        """
        found = self._checkpoint()
        if found is None:
            raise UsageError(f"{self._config.model_config.model} has no safetensors files to load again")
        return checkpoint_weights(*found)

    def check_takes_weights(self) -> None:
        """Check that the engine can load weights now.

        Raises:
            Asleep: It is asleep.
            EngineDied: vLLM's process has died.
            UsageError: The engine was made with another ``weight_transfer_config``.
        """
        super().check_takes_weights()
        self._check_lives()
        backend = getattr(self._config.weight_transfer_config, "backend", None)
        if backend != WEIGHTS:
            raise UsageError(
                f"the engine was made with a weight_transfer_config for {backend!r}; leave it out, so that weights "
                "can come by rl.WeightSync"
            )

    @asynccontextmanager
    async def held(self, in_flight: PauseMode) -> AsyncIterator[None]:
        """Make no tokens within a block. Requests that are kept compute again what they have, with the new weights."""
        async with self._changing:
            if self._engine is None:
                yield
                self._llm.reset_prefix_cache()
                return
            self._is_held = True
            try:
                await self._engine.pause_generation(mode="keep" if self._is_paused else in_flight, clear_cache=True)
                yield
            finally:
                self._is_held = False
                if not (self._is_paused or self._sleeping):  # by the user
                    await self._engine.resume_generation()

    async def load_staged(self, weights: Mapping[str, Any], version: Any) -> None:
        """Load weights by vLLM's weight transfer API, each time some of them."""
        assert isinstance(weights, StagedWeights | LentWeights), "the first weights of this engine are staged as well"
        label = str(version) if type(version) is int else DEFAULT_VERSION
        rpc = self._rpc if self._engine is None else self._engine.collective_rpc
        await rpc("start_weight_update")
        try:
            for names in in_buckets(weights.specs, AT_A_TIME_NBYTES):
                await rpc("update_weights", kwargs={"update_info": {"address": weights.address, "names": names}})
        except BaseException:
            if self._engine is not None and self._config.parallel_config.world_size > 1:
                with contextlib.suppress(Exception):  # the processes that have failed have ended the update
                    await rpc("finish_weight_update")
            raise
        await rpc("finish_weight_update")
        if self._engine is None:
            self._llm.llm_engine.set_weight_version(label)
        else:
            await self._engine.update_weight_version(label)

    async def _rpc(self, method: str, **options: Any) -> None:
        """A call of this rank's process of a replica of several ranks; others may cancel between two of them."""
        self._llm.collective_rpc(method, **options)
        await asyncio.sleep(0)

    # --- checks ---

    @property
    def is_ready(self) -> bool:
        """Whether the engine makes tokens: it is neither paused nor asleep."""
        return not (self._is_paused or self._sleeping)

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has given up the memory of its weights."""
        return "weights" in self._sleeping

    def check_usable(self) -> None:
        """Raise `EngineDied` if vLLM's process has died, and `NotUsable` if the engine has no weights to use."""
        self._check_lives()
        super().check_usable()

    def _check_lives(self) -> None:
        if self._engine is not None and self._engine.errored:
            raise self._died()

    def check_request(self) -> None:
        """Check that the engine answers requests.

        Raises:
            UsageError: The replica has several ranks.
        """
        if self._llm is not None:
            n = self._replica.n_ranks
            raise UsageError(
                f"this replica is {n} ranks along tp with an engine each, which have to get the same prompts in the "
                f"same order, so it answers batches alone: call generate; or let one rank have the devices, by "
                f"ResourcePool(..., use_gpu=True, gpus_per_worker={n}), a mesh without tp, and tensor_parallel_size={n}"
            )

    def check_sampling(self, sampling: Sampling) -> None:
        """Check that texts that end answers can be found.

        Raises:
            UsageError: The engine has no tokenizer.
        """
        if sampling.stop and not self._is_text:
            raise UsageError(f"stop={sampling.stop!r} needs a tokenizer, which this engine has not; use stop_token_ids")

    @property
    def model_name(self) -> str:
        """The name of the model: a hub name, or the path as it was given."""
        return str(self._config.model_config.model)

    def conversation(self, prompt: Prompt) -> Conversation:
        """Make a conversation that renders a prompt, and reads its answers, as vLLM's own server does.

        Raises:
            UsageError: The engine has no tokenizer.
        """
        if self._chat is None:
            from bandmaster.rl.engines.vllm_chat import ChatFormat

            if not self._is_text or self._engine is None:
                raise UsageError("this engine has no tokenizer; give it token ids")
            self._chat = ChatFormat(self._config, self._engine.renderer, **self._chat_options)
        return self._chat.conversation(prompt)

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that the chat template makes of messages.

        Raises:
            UsageError: The engine has no tokenizer, or the tokenizer no chat template, or that refuses the messages.
        """
        engine = self._llm if self._engine is None else self._engine
        tokenizer = engine.get_tokenizer() if self._is_text else None
        template = self._chat_options["chat_template"]
        if tokenizer is None or not (template or getattr(tokenizer, "chat_template", None)):
            raise UsageError("the model's tokenizer has no chat template; give token ids instead of messages")
        try:
            text = tokenizer.apply_chat_template(
                list(messages), chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise UsageError(f"the model's chat template refuses the messages: {error}") from error
        return list(tokenizer.encode(text, add_special_tokens=False))
