"""A group of `bandmaster.rl.Engine` as the rollout of verl's trainers.

::

    actor_rollout_ref.model.external_lib=bandmaster.compat.verl_rollout
    actor_rollout_ref.rollout.name=bandmaster
    actor_rollout_ref.rollout.agent.agent_loop_manager_class=bandmaster.compat.verl_rollout.AgentLoops

    trainer (controller)          AgentLoops ──── a call for each batch ────► agent loops: a group of workers
        └── Fleet: a group of engines, one rank for each replica ◄── requests by lanes or links, sticky ──┘
                   ▲ weights, from each training worker that leads a replica, by requests

verl's own agent loops run as they are. A request goes straight from an agent loop to a replica, in place of a task of
Ray to the load balancer's actor, one to the server's and one back to the balancer's. A replica that dies is replaced,
and gets the weights of another one; its requests go elsewhere.

Options are keys of ``actor_rollout_ref.rollout``: ``custom.engine``, the full name of the engine's class, by default
``bandmaster.rl.VLLM``; ``custom.timeout``, seconds for each request; ``custom.retries``, how often a request is sent
again whose replica has died, 2 by default; ``engine_kwargs.bandmaster``, arguments for the engine.

Only verl's public plug-in points are used: the registries of replicas and of rollouts, and the class of the agent-loop
manager. Without that class, verl's own client sends the requests, after asking verl's own load balancer.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import ray
import torch
from verl.experimental.agent_loop import AgentLoopManager
from verl.utils.ray_utils import auto_await
from verl.workers.rollout import base
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

import bandmaster as bm
from bandmaster import rl
from bandmaster.errors import UsageError
from bandmaster.rl.engine_weights.healing import Healing
from bandmaster.rl.engine_weights.packing import pack_pieces
from bandmaster.rl.engine_weights.peers import BUCKET_NBYTES, PeerWeights, whole_box
from bandmaster.rl.engine_weights.target import Overtaken
from bandmaster.rl.layout import Spec

__all__ = ["AgentLoops", "EngineReplica", "ServerAdapter"]

NAME = "bandmaster"  # of the rollout, in verl's configuration
RETRIES = 2
OF_THE_BALANCER = ("priority", "mm_processor_output")  # arguments of requests that have no meaning here
NEUTRAL = {"repetition_penalty": 1.0}  # parameters of sampling that verl always passes, and what they are without


# --- requests ---


class Engines(NamedTuple):
    """A group of engines with a replica for each rank, as agent loops and training workers get it.

    Attributes:
        group: The group.
        limits: Options of requests.
        prompt_length: Most tokens of a prompt of the data.
        response_length: Most tokens of an answer.
    """

    group: Any
    limits: Mapping[str, Any]
    prompt_length: int
    response_length: int

    async def answer(self, prompt_ids: Any, params: Mapping[str, Any], **where: Any) -> TokenOutput:
        """Answer a prompt.

        Args:
            prompt_ids: Token ids.
            params: verl's parameters of sampling.
            **where: Options of the request that say which replica gets it.
        """
        ids = [int(token) for token in prompt_ids]
        sampling = self._sampling(params, len(ids))
        options = {**self.limits, **where}
        if "replica" in options:
            options.pop("retries", None)  # which would be sent to another one
        (answer,) = await self.group.request.options(**options)(ids, sampling)
        versions = answer.versions or [None]
        return TokenOutput(
            token_ids=answer.tokens,
            log_probs=answer.log_probs,
            stop_reason="aborted" if answer.finish_reason == "abort" else "completed",
            extra_fields={
                "global_steps": versions[-1],
                "min_global_steps": versions[0],
                "max_global_steps": versions[-1],
                "num_cached_tokens": None,
            },
        )

    def _sampling(self, given: Mapping[str, Any], n_prompt: int) -> rl.Sampling:
        """The sampling that verl's parameters ask for."""
        params = {name: value for name, value in given.items() if NEUTRAL.get(name, ...) != value}
        limits = [params.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        most = min(self.response_length, self.prompt_length + self.response_length - n_prompt)
        known = {
            "max_tokens": max(1, next((int(one) for one in limits if one is not None), most)),
            "top_k": max(0, params.pop("top_k", 0)),  # -1 sets no limit
            "logprobs": 0 if params.pop("logprobs", False) else None,
        }
        for name in ("temperature", "top_p", "min_p", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed"):
            if params.get(name) is not None:
                known[name] = params[name]
            params.pop(name, None)
        return rl.Sampling(**known, extra=params)


def _check_text(request: Mapping[str, Any]) -> None:
    """Refuse what engines do not take.

    Raises:
        UsageError: The request has images, videos or sounds, or an option that is unknown.
    """
    more = [name for name, value in request.items() if name not in OF_THE_BALANCER and value not in (None, {}, [])]
    if more:
        raise UsageError(
            f"the rollout {NAME!r} takes prompts of text, and this one comes with {', '.join(sorted(more))}; use "
            "verl's own rollout for it"
        )


class EngineClient(LLMServerClient):  # type: ignore[misc]
    """Sends the requests of an agent loop to the least busy replica, and all turns of one conversation to the same."""

    def __init__(self, config: Any, engines: Engines) -> None:
        super().__init__(config)
        self._engines = engines

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        """Answer a prompt; see `LLMServerClient.generate`."""
        _check_text(more)
        return await self._engines.answer(prompt_ids, sampling_params, key=str(request_id))


class ResumingClient(FullyAsyncLLMServerClient, EngineClient):  # type: ignore[misc]
    """An `EngineClient` that continues answers which were given up for new weights, as verl's client does."""

    def __init__(self, config: Any, engines: Engines, only_hybrid: bool) -> None:
        EngineClient.__init__(self, config, engines)
        self._only_hybrid = only_hybrid


class _Remote(NamedTuple):
    """A function that is called as a method of an actor of Ray."""

    function: Callable[..., Awaitable[Any]]

    def remote(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Call it. The result can be awaited."""
        return self.function(*args, **kwargs)


class EngineHandle(NamedTuple):
    """One replica, as verl's load balancer hands it out in place of the actor of a server.

    Attributes:
        engines: The engines.
        replica: The number of the replica among them.
    """

    engines: Engines
    replica: int

    @property
    def generate(self) -> _Remote:
        """The method that answers a prompt."""
        return _Remote(self._generate)

    async def _generate(
        self, request_id: str, prompt_ids: Any, sampling_params: Mapping[str, Any], **more: Any
    ) -> TokenOutput:
        _check_text(more)
        try:
            return await self.engines.answer(prompt_ids, sampling_params, replica=self.replica)
        except bm.WorkerDied:  # the balancer does not know it
            return await self.engines.answer(prompt_ids, sampling_params, key=request_id)


# --- the training worker's side ---


class _Lead(NamedTuple):
    """The replica whose weights a training worker brings."""

    engines: Engines
    replica: int


_leads: dict[int, _Lead] = {}  # by the number of the replica, as verl counts


def _note_lead(worker: object, replica_rank: int, lead: _Lead) -> None:
    """Tell a training worker, in its process, of the replica that it leads."""
    _leads[replica_rank] = lead


class ServerAdapter(base.BaseRollout):  # type: ignore[misc]
    """Brings the weights of a training worker to the replica on its devices, and has the replica sleep and wake.

    The first worker of each replica does so; the others only take part in gathering the weights. If the replica dies,
    the worker goes on: the one that takes its place is awake, and gets the weights of the others.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        n_ranks = _n_ranks(self.config)
        rank = int(os.environ["RANK"])
        self._replica_rank = rank // n_ranks if replica_rank == -1 else replica_rank
        self._is_first = rank % n_ranks == 0
        self._n_syncs = 0
        self._specs: dict[str, Spec] | None = None  # of the tensors that are sent, once they are known

    async def resume(self, tags: Sequence[str]) -> None:
        """Take the memory of the replica's device back, with the first of its parts that verl asks for."""
        if "weights" in tags:
            with _said_if_it_dies():
                await self._ask("wake")

    async def release(self) -> None:
        """Free the memory of the replica's device."""
        with _said_if_it_dies():
            await self._ask("sleep")

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **more: Any
    ) -> None:
        """Bring weights to the replica, which uses them when it has all.

        Raises:
            UsageError: The weights are changes, or those of an adapter.
        """
        if wire_format != "named_tensors" or more.get("peft_config") is not None:
            raise UsageError(
                f"the rollout {NAME!r} takes whole weights, got "
                f"{'those of an adapter' if wire_format == 'named_tensors' else wire_format}; set "
                "model.lora.merge=True, and checkpoint_engine.backend to one that sends whole tensors"
            )
        self._n_syncs += 1
        tensors = _each(weights)
        if self._is_first:
            with _said_if_it_dies():
                await self._send(tensors, 0 if global_steps is None else global_steps)
        async for _ in tensors:  # on all ranks, as each tensor is gathered from all
            pass

    async def _send(self, tensors: AsyncIterator[tuple[str, torch.Tensor]], version: int) -> None:
        wanted = (await self._ask("expected_weights")).specs
        first: list[tuple[str, torch.Tensor]] = []
        specs = wanted or self._specs
        if specs is None:  # then the engine takes all that there are
            first = [(name, tensor.detach().cpu()) async for name, tensor in tensors]
            specs = {name: (tuple(tensor.shape), _dtype(tensor)) for name, tensor in first}
        self._specs, sync = specs, self._n_syncs
        await self._ask("begin_weights", sync, None, specs, await self._ask("weights_place"))
        some: dict[str, torch.Tensor] = {}
        nbytes, address, lacking = 0, "", dict(specs)
        async for name, tensor in _chained(first, tensors):
            if name in specs and specs[name][0] == tuple(tensor.shape):
                lacking.pop(name, None)
                some[name] = tensor.detach().to("cpu", getattr(torch, specs[name][1])).contiguous()
                nbytes += some[name].nbytes
            if nbytes >= BUCKET_NBYTES:
                address = await self._stage(some, specs, sync)
                some, nbytes = {}, 0
        if lacking:  # their places have zeros
            told = ", ".join(f"{name!r} of shape {shape}" for name, (shape, _) in [*lacking.items()][:5])
            raise UsageError(
                f"the training worker did not send {told}{', …' if len(lacking) > 5 else ''}, which replica "
                f"{self._replica_rank} of the rollout {NAME!r} takes; it keeps its weights. Give trainer and rollout "
                "the same model"
            )
        address = await self._stage(some, specs, sync) if some else address
        await self._ask("use_weights", sync, version, "keep", address)
        await self._ask("confirm_weights", sync)

    async def _stage(self, some: Mapping[str, torch.Tensor], specs: Mapping[str, Spec], sync: int) -> str:
        packed = await asyncio.to_thread(pack_pieces, [(tensor, None) for tensor in some.values()])
        address: str = await self._ask("stage_weights", [packed], [[(n, whole_box(specs[n])) for n in some]], sync)
        return address

    async def _ask(self, method: str, *args: Any) -> Any:
        """Send a request to the replica, if this is the first of its workers."""
        if not self._is_first:
            return None
        if self._replica_rank not in _leads:
            raise UsageError(f"replica {self._replica_rank} of the rollout {NAME!r} was not started yet")
        engines, replica = _leads[self._replica_rank]
        return await getattr(engines.group, method).options(replica=replica)(*args)


@contextlib.contextmanager
def _said_if_it_dies() -> Iterator[None]:
    """Report the death of a replica, or that it was replaced, and go on: it gets the weights of the others."""
    try:
        yield
    except (bm.WorkerDied, bm.RemoteError) as error:
        if not isinstance(error, bm.WorkerDied) and not isinstance(error.__cause__, Overtaken):
            raise
        print(f"bandmaster: {error}; training goes on, as the replica is replaced", file=sys.stderr)


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    """Yield what a generator yields, async or not."""
    if hasattr(weights, "__aiter__"):
        async for one in weights:
            yield one
    else:
        for one in weights:
            yield one


async def _chained(first: Iterable[Any], rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    for one in first:
        yield one
    async for one in rest:
        yield one


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _n_ranks(config: Any) -> int:
    """The training workers of one replica."""
    return int(config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size)


# --- the trainer's side ---


class _Place(NamedTuple):
    """The host and the devices of a training worker."""

    host: str
    devices: str


def _place_of(worker: object) -> _Place:
    return _Place(ray.util.get_node_ip_address(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))


class Fleet:
    """The engines of the replicas of one of verl's managers.

    Attributes:
        engines: The group, once all replicas have joined.
        weights: Brings replicas the weights of the others.
        healing: Replaces replicas that die.

    Args:
        n: The number of replicas.
    """

    engines: Engines
    weights: PeerWeights
    healing: Healing

    def __init__(self, n: int) -> None:
        self._n = n
        self._replicas: dict[int, EngineReplica] = {}
        self._is_made: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def join(self, replica: EngineReplica) -> int:
        """Have a replica run in the group, which starts with the last of them. Returns its number there."""
        self._replicas[replica.replica_rank] = replica
        if len(self._replicas) == self._n:
            try:
                await self._make()
                self._is_made.set_result(None)
            except BaseException as error:
                self._is_made.set_exception(error)
        await self._is_made
        return self._order.index(replica.replica_rank)

    async def _make(self) -> None:
        """Start the group on the hosts of the training workers, and tell these of it."""
        numbers = sorted(self._replicas)
        places: dict[int, list[_Place]] = {}
        for number in numbers:
            asked = [worker.__ray_call__.remote(_place_of) for worker in self._replicas[number].workers]
            places[number] = [await one for one in asked]
        hosts = list(dict.fromkeys(places[number][0].host for number in numbers))
        self._order = sorted(numbers, key=lambda number: hosts.index(places[number][0].host))
        sizes = [sum(places[number][0].host == host for number in numbers) for host in hosts]
        devices = [",".join(place.devices for place in places[number]) for number in self._order]
        self.engines = await asyncio.to_thread(self._started, hosts, sizes, devices)
        self.weights = PeerWeights(self.engines.group, self._n)
        self.healing = Healing(self.weights)
        for index, number in enumerate(self._order):
            lead = _Lead(self.engines, index)
            await asyncio.gather(
                *[worker.__ray_call__.remote(_note_lead, number, lead) for worker in self._replicas[number].workers]
            )

    def _started(self, hosts: Sequence[str], sizes: Sequence[int], devices: Sequence[str]) -> Engines:
        replica = self._replicas[self._order[0]]
        config, options = replica.config, dict(replica.config.custom or {})
        kind = _class_named(options.pop("engine", "bandmaster.rl.VLLM"))
        limits = {"timeout": options.pop("timeout", None), "retries": options.pop("retries", RETRIES)}
        if options:
            raise UsageError(f"rollout.custom takes engine, timeout and retries, got {', '.join(sorted(options))}")
        arguments = {**_arguments(kind, replica), **dict(config.engine_kwargs.get(NAME) or {})}
        pool = bm.ResourcePool(sizes, backend="ray", nodes=list(hosts), cpus_per_worker=0, name_prefix="rollout")
        mesh = bm.Mesh(dp=self._n)
        try:
            group = bm.WorkerGroup(pool, _on_devices(kind), list(devices), arguments, mesh=mesh, name="rollout")
        except BaseException:
            pool.close()
            raise
        known = {name: value for name, value in limits.items() if value is not None}
        return Engines(group, known, config.prompt_length, config.response_length)

    async def control(self, replica: int, method: str, *args: Any) -> None:
        """Send a request to a replica; if it has died, to the one in its place."""
        ask = getattr(self.engines.group, method).options(replica=replica)
        try:
            await ask(*args)
        except bm.WorkerDied:
            await asyncio.to_thread(self.healing.wait)
            await ask(*args)

    def level(self) -> None:
        """Wait until no replica is being replaced, and bring the last weights to replicas that have missed them."""
        self.healing.wait()
        self.weights.level()


class EngineReplica(RolloutReplica):  # type: ignore[misc]
    """One replica of a rollout; see `Fleet`."""

    fleet: Fleet
    _n = 1  # replicas that are started with this one
    _gathering: ClassVar[dict[tuple[Any, ...], Fleet]] = {}

    async def init_hybrid(self, worker_group: Any) -> None:
        """Start beside training workers, whose devices it shares."""
        self._n = worker_group.world_size // self.world_size
        await super().init_hybrid(worker_group)

    async def init_standalone(self) -> None:
        """Start on devices of its own."""
        self._n = self.config.n_gpus_per_node * self.config.nnodes // self.world_size
        await super().init_standalone()

    async def launch_servers(self) -> None:
        """Start the engine, with those of the other replicas."""
        key = self.rollout_mode, self._n, self.name_suffix, self.is_reward_model, self.is_teacher_model
        fleet = self._gathering.get(key) or self._gathering.setdefault(key, Fleet(self._n))
        try:
            self._number = await fleet.join(self)
        finally:
            self._gathering.pop(key, None)
        self.fleet = fleet
        self._server_handle = EngineHandle(fleet.engines, self._number)
        self._server_address = f"{fleet.engines.group.name}/{self._number}"
        self.servers = [self._server_handle]
        if fleet not in _fleets and not (self.is_reward_model or self.is_teacher_model):
            _fleets.append(fleet)

    async def sleep(self) -> None:
        """Free memory for the trainer."""
        if self.config.free_cache_engine:
            await self.fleet.control(self._number, "sleep")

    async def wake_up(self) -> None:
        """Take memory back."""
        await self.fleet.control(self._number, "wake")

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Give up what runs, and let what comes wait for `resume_generation`."""
        await self.fleet.control(self._number, "pause", "abort")

    async def resume_generation(self) -> None:
        """Go on."""
        await self.fleet.control(self._number, "resume")

    async def clear_kv_cache(self) -> None:
        """Forget what is cached of prompts."""
        await self.fleet.control(self._number, "reset_cache")

    async def release_kv_cache(self) -> None:
        """Do nothing: weights come to the memory of the host, and the cache is dropped as they are loaded."""

    async def resume_kv_cache(self) -> None:
        """Do nothing; see `release_kv_cache`."""

    async def start_profile(self, **options: Any) -> None:
        """Do nothing: `bandmaster.trace` shows the requests."""

    async def stop_profile(self) -> None:
        """Do nothing; see `start_profile`."""


class LoopsWorker(bm.Worker):
    """Runs one of verl's agent-loop workers.

    Args:
        kind: Its class.
        *args: The arguments of its constructor.
    """

    def __init__(self, kind: type, *args: Any) -> None:
        self._loops: Any = kind(*args)

    @bm.register(bm.Dispatch.REQUEST, concurrency=64)
    async def generate_sequences(self, batch: Any) -> Any:
        """Play the agent loops of a batch."""
        return await self._loops.generate_sequences(batch)


class _LoopsHandle(NamedTuple):
    """One worker of agent loops, as verl's manager calls it."""

    group: Any
    rank: int

    def begin(self, batch: Any) -> bm.Future[Any]:
        """Have it play a batch."""
        begun: bm.Future[Any] = self.group.generate_sequences.options(replica=self.rank)(batch)
        return begun

    @property
    def generate_sequences(self) -> _Remote:
        """The method that plays a batch."""
        return _Remote(self.begin)


class _ByLanes(AgentLoopManager):  # type: ignore[misc]
    """A manager whose agent loops are workers of a group, which send their requests by lanes."""

    def __init__(self, config: Any, llm_client: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, _client(llm_client), *args, **kwargs)

    async def _init_agent_loop_workers(self) -> None:
        n = self.rollout_config.agent.num_workers
        n_hosts = min(n, sum(node["Alive"] for node in ray.nodes()))
        sizes = [len(range(host, n, n_hosts)) for host in range(n_hosts)]
        self._pool = bm.ResourcePool(sizes, backend="ray", cpus_per_worker=0, name_prefix="agents")
        kind = self.agent_loop_workers_class.__ray_actor_class__
        given = self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        group = await asyncio.to_thread(bm.WorkerGroup, self._pool, LoopsWorker, kind, *given, name="agent_loops")
        self.agent_loop_workers = [_LoopsHandle(group, rank) for rank in range(n)]


class _Manager(_ByLanes):
    """The manager of verl's trainers before V1."""

    @auto_await  # type: ignore[untyped-decorator]
    async def generate_sequences(self, prompts: Any) -> Any:
        """Play the agent loops of a batch."""
        await asyncio.to_thread(_level)
        return await super().generate_sequences(prompts)


def _v1_manager() -> type:
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ

    class ManagerV1(_ByLanes, AgentLoopManagerTQ):  # type: ignore[misc]
        """The manager of verl's V1 trainers, whose agent loops put what they have played into the TransferQueue."""

        def generate_sequences(self, prompts: Any) -> None:
            """Have agent loops begin with a batch."""
            _level()
            workers = self.agent_loop_workers
            chunks = zip(workers, prompts.chunk(len(workers)), strict=False)
            for begun in [worker.begin(chunk) for worker, chunk in chunks]:
                begun.result()

    return ManagerV1


class AgentLoops:
    """verl's agent-loop manager, by ``rollout.agent.agent_loop_manager_class``."""

    @staticmethod
    def create(config: Any, **given: Any) -> Any:
        """Make the manager that the trainer needs; see `AgentLoopManager.create`."""
        kind: Any = _v1_manager() if config.trainer.use_v1 else _Manager
        return kind.create(config=config, **given)


_fleets: list[Fleet] = []  # of this process, those whose replicas are rollouts


def _level() -> None:
    for fleet in _fleets:
        fleet.level()


def _client(theirs: Any) -> Any:
    """The client that sends by lanes; verl's own where replicas of several fleets take turns, as its balancer knows."""
    if len(_fleets) != 1:
        return theirs
    if isinstance(theirs, FullyAsyncLLMServerClient):
        return ResumingClient(theirs.config, _fleets[0].engines, theirs._only_hybrid)
    return EngineClient(theirs.config, _fleets[0].engines)


def _class_named(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"rollout.custom.engine is {name!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, rl.Engine)):
        raise UsageError(f"rollout.custom.engine is {name!r}, which is no class derived from bandmaster.rl.Engine")
    return found


def _on_devices(kind: type) -> type:
    """The class of engines whose ranks use the devices of the training workers beside them."""

    class OnDevices(kind):  # type: ignore[misc]
        def __init__(self, devices: Sequence[str], arguments: Mapping[str, Any]) -> None:
            if devices[self.rank]:
                os.environ["CUDA_VISIBLE_DEVICES"] = devices[self.rank]
            super().__init__(**arguments)

    OnDevices.__name__ = OnDevices.__qualname__ = kind.__name__
    return OnDevices


def _arguments(kind: type, replica: EngineReplica) -> dict[str, Any]:
    """The arguments of an engine's constructor that follow from verl's configuration."""
    config, model = replica.config, replica.model_config
    path = model.path if hasattr(model, "path") else model["path"]
    if not issubclass(kind, rl.VLLM):
        return {}
    return {
        "model": path,
        "seed": config.seed,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len or config.prompt_length + config.response_length,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": _n_ranks(config),
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_sleep_mode": config.free_cache_engine,
    }


base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"
RolloutReplicaRegistry.register(NAME, lambda: EngineReplica)
