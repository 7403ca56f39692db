"""`TakesWeights`: the methods of engines by which `WeightSync` brings them weights.

::

    begin_weights ──► stage_weights ──► … ──► use_weights ──► confirm_weights
      discards what     a bucket, in           pause, load,       frees the old tensors
      was staged        memory beside          resume; on an
      and not used      the engine             error the old      revert_weights
                                               tensors again      back to the old tensors, or discards the staged ones
                        use_lent_weights ────►
                          reads the trainer's memory

All are requests, so that they reach an engine that is busy. `use_weights` holds the engine in one request from the
pause to the end, so that no other call has to come through to one that is paused. Tensors are copied in another thread
than that of the event loop, on which `load_weights` runs.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from bandmaster import Dispatch, UsageError, Worker, register, report
from bandmaster.rl.engine_weights.packing import Packed, Piece, pack_pieces, unpack_pieces
from bandmaster.rl.engine_weights.staged import Place, StagedWeights
from bandmaster.rl.layout import Spec
from bandmaster.rl.lent_weights import LentWeights, Memory, wait_for_copies

if TYPE_CHECKING:
    from torch import Tensor

PauseMode = Literal["keep", "wait", "abort"]
T = TypeVar("T")
CONTROL = 8  # requests of one caller that a replica runs at a time
UNUSABLE_LOAD = math.inf  # reported by a replica that answers nothing, so that requests go elsewhere
NO_VERSION = -(1 << 62)  # reported by it, so that requests with a `min_version` go elsewhere
LOG = logging.getLogger(__name__)


class NoBase(UsageError):
    """A replica does not have the weights that changes are for."""


class EngineDied(UsageError):
    """The engine of a replica has died, though its worker lives."""


class NotUsable(UsageError):
    """The engine of a replica has lost its weights, and answers nothing until it gets others."""


class Overtaken(UsageError):
    """Another sync to a replica has begun, or the replica was replaced."""


class Asleep(UsageError):
    """The engine is asleep, and so cannot take weights now."""


class Expected(NamedTuple):
    """The tensors that a replica takes.

    Attributes:
        specs: The tensors by name; None if it takes those that the source has.
    """

    specs: dict[str, Spec] | None


class HeldWeights(NamedTuple):
    """The weights that a replica has.

    Attributes:
        sync: Identifies the sync that has brought them.
        version: Their version.
        specs: Their tensors.
    """

    sync: int
    version: Any
    specs: dict[str, Spec]


class AwaitWeights(NamedTuple):
    """The state that `replace` gives to a new replica which is to answer nothing until it has weights.

    Attributes:
        version: The version of the weights that the other replicas have.
    """

    version: Any


class _Before(NamedTuple):
    """The weights that an engine had, and their version."""

    weights: StagedWeights | LentWeights | None
    version: Any


class TakesWeights(Worker):
    """Methods of engines that `WeightSync` calls; an engine implements `load_weights`.

    Attributes:
        weights_version: The version of the weights; None before the first sync.
    """

    weights_version: Any = None
    _used: StagedWeights | LentWeights | None = None  # those that the engine has; None before the first sync
    _incoming: StagedWeights | None = None  # those of a sync that is not over
    _copier: ThreadPoolExecutor | None = None
    _shares = False  # whether another rank of the host stages them
    _before: _Before | None = None  # those before a sync that was not confirmed
    _switch: asyncio.Task[None] | None = None  # to other weights, the last one
    _called_off: int | None = None  # the last sync that was reverted
    _latest: int | None = None  # the last sync that has begun to be used
    _unusable = ""  # why the engine answers nothing, until it has weights again
    _unusable_by: int | None = None  # the sync that may have left other ranks of the replica with other weights
    _arrived: asyncio.Event | None = None  # set when weights arrive for which requests wait

    # --- for implementers ---

    def load_weights(self, weights: Mapping[str, Tensor]) -> Awaitable[None] | None:
        """Have the engine use other weights from now on. It makes no tokens meanwhile. An override may be ``async``.

        Args:
            weights: Whole tensors by their names in a checkpoint, in the order of the checkpoint. They must not be
                changed. They are on the CPU, and stay as they are until the next call of this method has ended; or,
                by a sync with ``share=True``, those of the trainer, which may change once this call has ended.

        Raises:
            Exception: The engine does not take them. It then gets its earlier weights by another call.
        """
        raise UsageError(f"{type(self).__name__} takes no weights: define load_weights(self, weights)")

    def weights_specs(self) -> dict[str, Spec] | None:
        """Shape and dtype of each tensor that `load_weights` takes; None for all that a source has, in its dtypes."""
        return None

    def first_weights(self) -> Mapping[str, Tensor]:
        """The weights that the engine had before the first sync, to which it goes back if that fails.

        Raises:
            UsageError: They are not known.
        """
        raise UsageError("those before the first sync are not kept")

    def check_takes_weights(self) -> None:
        """Check that the engine can load weights now.

        Raises:
            EngineDied: It never can again.
            UsageError: It cannot.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Give up all requests that run; see `Engine.abort`."""

    @abstractmethod
    def held(self, in_flight: PauseMode) -> AbstractAsyncContextManager[None]:
        """Make no tokens within a block, and forget at its end what was cached of prompts.

        Args:
            in_flight: What becomes of requests that run; see `Engine.pause`.
        """

    async def load_staged(self, weights: Mapping[str, Tensor], version: Any) -> None:
        """Load weights, by default by `load_weights`.

        Args:
            weights: The weights; a `StagedWeights` or `LentWeights` unless they are the first ones.
            version: Their version.
        """
        loading = self.load_weights(weights)
        if inspect.isawaitable(loading):
            await loading
        if isinstance(weights, LentWeights):
            wait_for_copies()

    # --- requests of a sync ---

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def expected_weights(self) -> Expected:
        """Return the tensors that this replica takes."""
        return Expected(self.weights_specs())

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def weights_place(self) -> Place:
        """Return the process that stages weights for the ranks of this replica on its host."""
        return Place.here()

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def engine_memory(self) -> Memory:
        """Return the memory that `load_weights` can read without a copy."""
        return Memory.of(self)

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def takes_weights(self) -> None:
        """Check that the engine can load weights now; see `check_takes_weights`."""
        self.check_takes_weights()

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def begin_weights(self, sync: int, base: int | None, specs: Mapping[str, Spec], place: Place) -> None:
        """Make room for the weights of a sync; what an earlier sync has staged is discarded.

        Args:
            sync: Identifies the sync.
            base: The sync whose weights are to be changed; None for weights that come whole.
            specs: The tensors.
            place: The process that stages weights for the ranks of its host, such as the first rank of the replica.

        Raises:
            NoBase: This rank has other weights than those of ``base``.
            UsageError: The engine cannot load weights now.
        """
        self._incoming = None
        self.check_takes_weights()
        here = Place.here()
        self._shares = place.host == here.host and place.pid != here.pid
        if self._shares:
            return
        if base is None:
            self._incoming = StagedWeights(sync, specs)
        elif self._used is None or self._used.sync != base:
            raise NoBase("this rank does not have the weights that the changes are for")
        else:
            assert isinstance(self._used, StagedWeights), "no sync of lent weights is a base"
            self._incoming = await self._in_thread(self._used.copy, sync)

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def stage_weights(self, rows: Sequence[Packed], pieces: Sequence[Sequence[Piece]], sync: int) -> str:
        """Write pieces to their places in the weights of a sync, and check them.

        Args:
            rows: The row of each sender.
            pieces: The pieces in each row.
            sync: Identifies the sync.

        Returns:
            The address of the staged weights, for other ranks of the host.

        Raises:
            UsageError: Pieces differ from what was sent, or another sync has begun since.
        """
        if self._shares:
            return ""
        staged = self._of_sync(sync)
        await self._in_thread(_stage, staged, rows, pieces)
        return staged.address

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def use_weights(self, sync: int, version: Any, in_flight: PauseMode, address: str) -> None:
        """Have the engine use the staged weights. If it fails to, it gets its earlier ones.

        Args:
            sync: Identifies the sync.
            version: The version of the weights.
            in_flight: What becomes of requests that run; see `Engine.pause`.
            address: Of the weights that another rank of the host has staged.

        Raises:
            Exception: The error of the engine; it has its earlier weights, or says why it is unusable.
        """
        staged = StagedWeights.opened(address) if self._shares else self._of_sync(sync)
        await self._switch_to(staged, version, in_flight)

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def use_lent_weights(self, lent: LentWeights, version: Any, in_flight: PauseMode) -> None:
        """Have the engine read weights where they lie. If it fails to, it gets its earlier ones, if these are kept.

        Args:
            lent: The weights.
            version: Their version.
            in_flight: What becomes of requests that run; see `Engine.pause`.

        Raises:
            Exception: The error of the engine; it has its earlier weights, or says why it is unusable.
        """
        self.check_takes_weights()
        await self._switch_to(lent, version, in_flight)

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def confirm_weights(self, sync: int) -> None:
        """Free the weights before those of a sync, which all replicas use."""
        if self._used is not None and self._used.sync == sync:
            self._before = None

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def revert_weights(self, sync: int) -> None:
        """Go back to the weights before a sync, if they are not used or another replica failed to use them."""
        if self._incoming is not None and self._incoming.sync == sync:
            self._incoming = None
        self._called_off = sync
        self._switch = asyncio.create_task(self._go_back(sync, self._switch))
        await asyncio.shield(self._switch)

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def held_weights(self) -> HeldWeights | None:
        """Return which weights this replica has, and could give; None before the first sync, and if it keeps none."""
        used = self._used
        return HeldWeights(used.sync, self.weights_version, used.specs) if isinstance(used, StagedWeights) else None

    @register(Dispatch.REQUEST, concurrency=CONTROL)
    async def give_weights(self, names: Sequence[Sequence[str]], sync: int) -> list[Packed]:
        """Return rows with the tensors in use, for a replica that was replaced.

        Args:
            names: The tensors of each row.
            sync: Identifies the sync that has brought them.

        Raises:
            UsageError: This replica has the weights of another sync.
        """
        used = self._used
        if used is None or used.sync != sync:
            raise UsageError("this replica does not have the weights that are asked for, as a sync has ended since")
        return [await self._in_thread(pack_pieces, [(used[name], None) for name in some]) for some in names]

    def on_replace(self, rank: int, state: object) -> None:
        """Let a new replica answer nothing until it has weights, if the others have had a sync."""
        if rank == self.rank:
            self.on_restart(state)

    def on_restart(self, state: object) -> None:
        """Let all replicas answer nothing until they have weights, if there was a sync."""
        if isinstance(state, AwaitWeights):
            self.await_weights()

    # --- of the engine ---

    def await_weights(self) -> None:
        """Let requests wait until weights come."""
        self._arrived = self._arrived or asyncio.Event()
        report(self, load=UNUSABLE_LOAD)

    async def has_weights(self) -> None:
        """Wait until a replica that was replaced, or has dropped its weights, has some.

        Raises:
            NotUsable: The engine has lost its weights.
        """
        if self._arrived is not None:
            await self._arrived.wait()
        self.check_usable()

    def check_usable(self) -> None:
        """Raise `NotUsable` if the engine has no weights that could be used; an override may raise `EngineDied`."""
        if self._unusable:
            raise NotUsable(
                f"rank {self.rank} is not usable: {self._unusable}; sync again, or have it replaced by "
                f"group.replace({self.rank})"
            )

    async def _switch_to(self, weights: StagedWeights | LentWeights, version: Any, in_flight: PauseMode) -> None:
        """Take other weights. A cancel of the request, as another rank has failed, does not stop that half-way."""
        self._incoming, self._latest = None, weights.sync
        self._switch = asyncio.create_task(self._take_over(weights, version, in_flight))
        await asyncio.shield(self._switch)

    async def _take_over(self, weights: StagedWeights | LentWeights, version: Any, in_flight: PauseMode) -> None:
        """Load weights, and say so; if the engine does not take them, load those from before."""
        before = _Before(self._used, self.weights_version)
        async with self.held(in_flight):
            if self._called_off == weights.sync:  # while requests ended, for example
                raise UsageError("the sync was called off, as it has failed elsewhere or has taken too long")
            if self._latest != weights.sync:
                raise _overtaken()
            self.check_takes_weights()  # it may have gone to sleep since the sync began
            try:
                await self.load_staged(weights, version)
            except BaseException as error:
                await self._load_again(before, f"it could not load new weights: {error}")
                n_replicas = self.mesh.axis_size("dp") if "dp" in self.mesh.axis_names else 1
                if not self._unusable and self.world_size > n_replicas:
                    self._unusable_by = weights.sync
                    self._unusable = "it could not load new weights, which other ranks of the replica may have"
                raise
            self._before = before
            self._have(weights, version)
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None
            report(self, load=0)

    async def _go_back(self, sync: int, switch: asyncio.Task[None] | None) -> None:
        """Load the weights from before a sync, if the engine has those of the sync once its change is over."""
        if switch is not None:
            await asyncio.wait([switch])
            _ = switch.cancelled() or switch.exception()  # which its request has raised, unless it was cancelled
        if self._unusable_by == sync:
            self._unusable, self._unusable_by = "", None
        if self._used is not None and self._used.sync == sync and self._before is not None:
            before, self._before = self._before, None
            async with self.held("keep"):
                await self._load_again(before, "another replica could not load new weights")

    async def _load_again(self, before: _Before, why: str) -> None:
        """Load the weights from before. If that fails, the engine is unusable, and its requests are given up."""
        try:
            if isinstance(before.weights, LentWeights):
                raise UsageError("it had read them in the trainer's memory, and keeps no copy")
            weights = await self._in_thread(self.first_weights) if before.weights is None else before.weights
            await self.load_staged(weights, before.version)
        except Exception as error:
            LOG.error("rank %d could not go back to its earlier weights: %s", self.rank, str(error))
            self._unusable = f"{why}; nor could it load its earlier ones again: {error}"
            self._used, self._before, self.weights_version = None, None, None
            report(self, load=UNUSABLE_LOAD, version=NO_VERSION)
            await self.abort()
        else:
            self._have(before.weights, before.version)
            if type(before.version) is not int:
                report(self, version=NO_VERSION)  # not that of the sync which was taken back

    def _have(self, weights: StagedWeights | LentWeights | None, version: Any) -> None:
        """Note which weights the engine has, before it makes tokens with them."""
        if self._unusable and self._arrived is None:
            report(self, load=0)
        self._used, self._unusable, self._unusable_by, self.weights_version = weights, "", None, version
        if type(version) is int:
            report(self, version=version)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that takes long in a thread of this engine, one call at a time."""
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, "bandmaster-weights")
        return await asyncio.get_running_loop().run_in_executor(self._copier, function, *arguments)

    def _of_sync(self, sync: int) -> StagedWeights:
        if self._incoming is None or self._incoming.sync != sync:
            raise _overtaken()
        return self._incoming


def _overtaken() -> Overtaken:
    return Overtaken(
        "this rank does not have the earlier buckets of this sync: another sync to this group has begun since, or the "
        "rank was replaced. It keeps the weights that it uses; sync again, and let one rl.WeightSync to a group end "
        "before the next one begins"
    )


def _stage(staged: StagedWeights, rows: Sequence[Packed], pieces: Sequence[Sequence[Piece]]) -> None:
    from bandmaster.rl.layout import Box

    def place_of(piece: Piece) -> Tensor:
        name, box = piece
        whole = staged[name]
        return whole[box.slices(Box((0,) * whole.ndim, tuple(whole.shape)))]

    for row, some in zip(rows, pieces, strict=True):
        unpack_pieces(row, some, place_of)
