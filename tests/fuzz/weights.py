"""Random models whose weights are synced from group to group, and moved between the layouts of a hybrid engine.

A program draws tensors: shapes, dtypes, how each lies in memory, and along which dim each layout cuts it; then steps
that change, replace and move them. What each rank must have is arithmetic: every element is known from the number of
the tensor, its place and a version.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64"]
FSDP_DTYPES = ["float32", "float64", "bfloat16", "float16"]
KINDS = ["plain", "plain", "view", "flat", "transposed", "conj", "tied", "fsdp"]
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2)]  # of dp and tp
STEPS = ["sync", "sync", "fill", "fill", "rebind", "two syncs", "reverse", "rivals", "differ", "cancel"]
STEPS += ["plan", "enter", "leave"]
RIVAL = 40  # more than any version of the source: that of another source
LINES = {"enter": 150, "leave": 40}  # of the library, about as many as run then
BUCKETS = [64, 1000, 1 << 20]


@dataclass(frozen=True)
class Spec:
    """One tensor.

    Attributes:
        shape: Of the whole.
        dtype: As torch names it.
        kind: How it lies in memory, on the source; ``"fsdp"`` is a parameter that FSDP cuts there.
        cuts: The dim that tp cuts, in the source and in the target layout; None where all ranks have it whole.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    cuts: tuple[int | None, int | None]


@dataclass(frozen=True)
class Program:
    """What is done with some tensors between two groups, or in an engine.

    Attributes:
        is_engine: Whether the layouts are those of one engine.
        meshes: dp and tp of the source and of the target; an engine has the first, with gen_tp=1.
        specs: The tensors.
        steps: Some of `STEPS`.
        bucket_nbytes: Of the sync or engine.
        seed: What else is drawn depends on it.
    """

    is_engine: bool
    meshes: tuple[tuple[int, int], tuple[int, int]]
    specs: tuple[Spec, ...]
    steps: tuple[str, ...]
    bucket_nbytes: int
    seed: int


def program_of(seed):
    """The program of a seed."""
    rng = random.Random(seed)
    is_engine = rng.random() < 0.4
    specs = []
    for _ in range(rng.randint(1, 5)):
        shape = tuple(rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randint(1, 3)))
        cuts = tuple(rng.choice([None, *range(len(shape))]) for _ in range(2))
        kind = rng.choice(KINDS)
        cuts = 0 if kind == "fsdp" else cuts[0], None if is_engine else cuts[1]
        specs.append(Spec(shape, rng.choice(FSDP_DTYPES if kind == "fsdp" else DTYPES), kind, cuts))
    steps = tuple(rng.choice(STEPS) for _ in range(rng.randint(1, 5)))
    meshes = rng.choice(MESHES), rng.choice(MESHES)
    return Program(is_engine, meshes, tuple(specs), (*steps, "sync"), rng.choice(BUCKETS), seed)


def whole(spec, number, version):
    """All elements of a tensor."""
    n = torch.Size(spec.shape).numel()
    values = (torch.arange(n) * 7 + number * 31 + version * 13) % 101
    dtype = getattr(torch, spec.dtype)
    values = values % 2 == 0 if dtype is torch.bool else values.to(dtype)
    return (values * (1 + 2j) if dtype.is_complex else values).to(dtype).reshape(spec.shape)


class Weights(rl.HoldsWeights):
    """Has the tensors of a program in one of its two layouts, or in both for an engine."""

    def tensor_of(self, spec, number, version, side):
        """The part of this rank, as a parameter that lies in memory as the spec says."""
        full, cut, n_parts = whole(spec, number, version), spec.cuts[side], self.mesh.axis_size("tp")
        if cut is None or n_parts == 1:
            return _laid(full, spec.kind)
        parts = full.chunk(n_parts, cut)
        rank = self.coordinates["tp"]
        own = parts[rank] if rank < len(parts) else full.narrow(cut, 0, 0)
        own = _laid(own.clone(), spec.kind)
        return DTensor.from_local(own, self.torch_mesh, [Shard(cut)], shape=full.shape, stride=full.stride())

    @register(Dispatch.ONE_TO_ALL)
    def build(self, specs, side, version):
        """Make the model anew."""
        if self.world_size > 1 and not hasattr(self, "torch_mesh"):
            self.torch_mesh = rl.device_mesh(self, "tp")
        self.specs, self.side = specs, side
        self.model = self.module(side, version)

    def module(self, side, version):
        module = nn.Module()
        module.fsdp = nn.Module()
        for number, spec in enumerate(self.specs):
            if spec.kind == "fsdp":
                spec = spec if side else replace(spec, cuts=(None, None))  # which is cut below
                held = nn.Parameter(self.tensor_of(spec, number, version, side), requires_grad=False)
                module.fsdp.register_parameter(f"t{number}", held)
                continue
            tensor = self.tensor_of(spec, number, version, side)
            is_parameter = tensor.is_floating_point() or tensor.is_complex()
            held = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            if is_parameter:
                module.register_parameter(f"t{number}", held)
            else:
                module.register_buffer(f"t{number}", held)
            if spec.kind == "tied" and is_parameter:
                module.register_parameter(f"t{number}_tied", held)
        if not side and self.mesh.axis_size("tp") > 1:
            fully_shard(module.fsdp, mesh=self.torch_mesh)
        return module

    @register(Dispatch.ONE_TO_ALL)
    def fill(self, version, is_rebound):
        """Give the tensors of the model other values: in place, or by ``data``."""
        for number, spec in enumerate(self.specs):
            held = getattr(self.model.fsdp if spec.kind == "fsdp" else self.model, f"t{number}")
            own = rl.local_tensors.local_tensor(held)
            new = rl.local_tensors.local_tensor(self.tensor_of(spec, number, version, self.side))
            if is_rebound and not isinstance(held, DTensor):
                held.data = new
            else:
                own.copy_(new)

    @register(Dispatch.ONE_TO_ALL)
    def spoil(self, rank, version):
        """Give the tensors of one rank other values; whether there were any."""
        if self.rank == rank:
            self.fill(version, False)
        return any(rl.local_tensors.local_tensor(held).numel() for held in self.model.state_dict().values())

    @register(Dispatch.ONE_TO_ALL)
    def wrong(self, version):
        """The tensors of this rank that differ from what they must be at a version."""
        return self._wrong(self.model, self.side, version)

    def _wrong(self, module, side, version):
        found = []
        for name, held in module.state_dict().items():
            number = int(name.removeprefix("fsdp.")[1:].split("_")[0])
            own = rl.local_tensors.local_tensor(held)
            must = rl.local_tensors.local_tensor(self.tensor_of(self.specs[number], number, version, side))
            if own.dtype != must.dtype or own.shape != must.shape or not torch.equal(own, must):
                found.append(
                    f"{name} {self.specs[number]}: {own.flatten()[:5].tolist()}, not {must.flatten()[:5].tolist()}"
                )
        return found

    @register(Dispatch.ONE_TO_ALL)
    def build_engine(self, specs, bucket_nbytes):
        """A training and a generation model, and an engine of both."""
        self.build(specs, 0, 0)
        rollout = copy.copy(self)
        rollout.specs = [spec if spec.kind in ("tied", "fsdp") else replace(spec, kind="plain") for spec in specs]
        self.rollout = rollout.module(1, 0)
        self.engine = rl.HybridEngine(self, self.model, self.rollout, bucket_nbytes)

    @register(Dispatch.ONE_TO_ALL)
    def switch(self, version):
        """What is wrong in the generation layout, and then in the training layout again."""
        with self.engine:
            found = [f"generation: {one}" for one in self._wrong(self.rollout, 1, version)]
        return found + [f"training: {one}" for one in self._wrong(self.model, 0, version)]

    @register(Dispatch.ONE_TO_ALL)
    def enter_interrupted(self, version, number):
        """Press Ctrl-C as the layout is entered: in a line of the library or, of several ranks, as one exchanges."""
        if self.world_size == 1:
            with contextlib.suppress(KeyboardInterrupt):
                sys.settrace(pressing(number))
                with self.engine:
                    sys.settrace(None)
            return self._wrong(self.model, 0, version)
        exchange, rank = torch.distributed.batch_isend_irecv, number % self.world_size

        def late(operations):
            if self.rank == rank:
                signal.raise_signal(signal.SIGINT)
            return exchange(operations)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        patch = mock.patch.object(torch.distributed, "batch_isend_irecv", late)
        with contextlib.suppress(KeyboardInterrupt), patch, self.engine:
            pass
        signal.signal(signal.SIGINT, before)
        return self._wrong(self.model, 0, version)

    @register(Dispatch.ONE_TO_ALL)
    def leave_interrupted(self, version, number):
        """Press Ctrl-C on all ranks, in a line of the library, as the layout is left."""
        with contextlib.suppress(KeyboardInterrupt), self.engine:
            sys.settrace(pressing(number))
        sys.settrace(None)
        return self._wrong(self.model, 0, version)


def pressing(number):
    """A trace function that presses Ctrl-C in a line of the library, by its number, but in no finalizer."""
    lines = itertools.count()

    def trace(frame, event, argument):
        is_library = "bandmaster" in frame.f_code.co_filename
        if is_library and next(lines) == number and all(one.f_code.co_name != "__del__" for one in _frames(frame)):
            raise KeyboardInterrupt  # tracing ends with that
        return trace

    return trace


def _frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back


def plan_wrong(specs, seed):
    """What is wrong with a plan from random rectangles of tensors, which have all of them, to other rectangles."""
    rng = random.Random(seed)
    tensors = {f"t{number}": (spec.shape, spec.dtype) for number, spec in enumerate(specs)}
    parts = [{} for _ in range(rng.randint(1, 3))]
    for name, (shape, _) in tensors.items():
        ends = [0, *sorted(rng.choices(range(shape[0] + 1), k=len(parts) - 1)), shape[0]]
        for held, (start, stop) in zip(parts, itertools.pairwise(ends), strict=True):
            held[name] = rl.Box((start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:]))

    def drawn(n):
        return [
            {name: _box(rng, shape) for name, (shape, _) in tensors.items() if rng.random() < 0.7} for _ in range(n)
        ]

    source = rl.Layout(tensors, parts + drawn(rng.randint(0, 2)))
    target = rl.Layout(tensors, drawn(rng.randint(1, 5)))
    near = [[range(source.n_ranks)], [[rank] for rank in range(source.n_ranks)]]
    plan = rl.reshard(source, target, rng.choice([None, *near * (source.n_ranks == target.n_ranks)]))
    times = [{name: torch.zeros(box.shape, dtype=int) for name, box in boxes.items()} for boxes in target.boxes]
    for move in (move for moves in plan.buckets(rng.choice(BUCKETS)) for move in moves):
        if source.boxes[move.sender][move.name] & move.box != move.box:
            return f"{move}, which the sender does not have"
        times[move.receiver][move.name][move.box.slices(target.boxes[move.receiver][move.name])] += 1
    wrong = [(rank, name) for rank, found in enumerate(times) for name, n in found.items() if not (n == 1).all()]
    return f"{wrong} do not come once, from {source} to {target}" if wrong else None


def _box(rng, shape):
    start = tuple(rng.randrange(size) for size in shape)
    return rl.Box(start, tuple(rng.randint(0, size - first) for size, first in zip(shape, start, strict=True)))


def _laid(tensor, kind):
    """The same elements in memory of another form."""
    if kind == "view" and tensor.numel():
        larger = tensor.new_zeros(tensor.shape[0] + 2, *tensor.shape[1:])
        larger[1:-1] = tensor
        return larger[1:-1]
    if kind == "flat":
        return torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(tensor.shape)
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "conj" and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    return tensor.clone()


def shrink(program, fails):
    """The smallest program that is found, with fewer tensors and steps.

    Args:
        program: One that fails.
        fails: Returns what is wrong with a program, or None.
    """
    for name in ("specs", "steps"):
        for i in reversed(range(len(getattr(program, name)))):
            kept = getattr(program, name)
            less = replace(program, **{name: kept[:i] + kept[i + 1 :]})
            if less.specs and less.steps and fails(less):
                program = less
    return program


class Worlds:
    """Groups by mesh, on which programs run one after the other."""

    def __init__(self, backend="local"):
        self._backend, self._groups = backend, {}

    def group(self, role, dp, tp):
        """The group of a role, ``"source"``, ``"target"`` or ``"engine"``, with a mesh."""
        if (role, dp, tp) not in self._groups:
            mesh = Mesh(dp=dp, tp=tp)
            pool = bm.ResourcePool([mesh.size], backend=self._backend)
            self._groups[role, dp, tp] = bm.WorkerGroup(pool, Weights, mesh=mesh)
            self._groups[role, dp, tp].set_default_options(timeout=30)
        return self._groups[role, dp, tp]

    def close(self):
        """Close all groups."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def run(program, worlds):
    """Run a program; what is wrong, or None."""
    try:
        if "plan" in program.steps and (wrong := plan_wrong(program.specs, program.seed)):
            return f"plan: {wrong}"
        return _run_engine(program, worlds) if program.is_engine else _run_sync(program, worlds)
    except bm.BandmasterError as error:
        worlds.close()
        return f"{type(error).__name__}: {error}"


def _run_sync(program, worlds):
    source = worlds.group("source", *program.meshes[0])
    target = worlds.group("target", *program.meshes[1])
    version = there = 0
    source.build(program.specs, 0, version)
    target.build(program.specs, 1, -1)
    sync = rl.WeightSync(source, target, program.bucket_nbytes)
    back = rl.WeightSync(target, source, program.bucket_nbytes)
    sync(version=0)
    for number, step in enumerate(program.steps):
        if step in ("fill", "rebind"):
            version += 1
            source.fill(version, step == "rebind")
        elif step == "two syncs":
            first, second = sync.submit(version="a"), sync.submit(version="b")
            first.exception()
            second.result()
            there = version
        elif step == "reverse":
            target.fill(there, False)
            back(version="back")
            version = there
        elif step == "rivals":
            there = _race(program, worlds, target, sync, version)
        elif step == "differ" and program.meshes[0][0] > 1:
            if (wrong := _differ(source, sync, version)) is not None:
                return f"step {number} {step}: {wrong}"
            source.fill(version, False)
        elif step == "cancel":
            given_up = sync.submit(version="given up")
            given_up.cancel()
            given_up.exception()
            sync(version=number)
            there = version
        else:
            sync(version=number)
            there = version
        for group, must in ((source, version), (target, there)):
            for rank, found in enumerate(group.wrong(must)):
                if found:
                    of = "source" if group is source else "target"
                    return f"step {number} {step}: rank {rank} of the {of}: {found}"
    return None


def _race(program, worlds, target, sync, version):
    """Sync from two sources at once, one of which may be refused; the version that the target has then."""
    rival = worlds.group("rival", *program.meshes[0])
    rival.build(program.specs, 0, RIVAL)
    other = rl.WeightSync(rival, target, program.bucket_nbytes)
    with ThreadPoolExecutor(2) as threads:
        syncs = [threads.submit(one, version="rivals") for one in (sync, other)]
    errors = [one.exception() for one in syncs]
    refused = [error for error in errors if error is not None]
    if len(refused) == 2 or any("another sync to this group" not in str(error) for error in refused):
        raise refused[0]
    return version if errors[0] is None and not any(target.wrong(version)) else RIVAL


def _differ(source, sync, version):
    """Sync while the replicas of the source differ; what is wrong about that."""
    last = source.world_size - 1
    if not source.spoil(last, version + 1)[last]:
        return None
    try:
        sync(version="differ")
    except bm.RemoteError as error:
        says = "a replica differ" in str(error) and list(error.failures) == [last]
        return None if says else f"not rank {last} and its weights: {error}"
    return "replicas that differ were synced"


def _run_engine(program, worlds):
    group = worlds.group("engine", *program.meshes[0])
    version = 0
    group.build_engine(program.specs, program.bucket_nbytes)
    for number, step in enumerate(program.steps):
        if step in ("fill", "rebind"):
            version += 1
            group.fill(version, step == "rebind")
        elif step == "cancel" and group.world_size == 1:  # others may wait in a collective, which only their end ends
            given_up = group.switch.submit(version)
            given_up.cancel()
            given_up.exception()
        else:
            interrupted = {"enter": group.enter_interrupted, "leave": group.leave_interrupted}.get(step)
            done = interrupted and interrupted.options(timeout=10)(version, program.seed % LINES[step])
            for rank, found in enumerate(done or group.switch(version)):
                if found:
                    return f"step {number} {step}: rank {rank}: {found}"
    return None
