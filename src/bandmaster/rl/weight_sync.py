"""`WeightSync`: brings the weights of a group to another group of models, or to the replicas of an inference engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bandmaster import Future, UsageError
from bandmaster.plan.numbers import as_whole
from bandmaster.rl.engine_weights.healing import Healing
from bandmaster.rl.engine_weights.sync import EngineSync, SyncFuture
from bandmaster.rl.engine_weights.target import PauseMode
from bandmaster.rl.group_sync import GroupSync
from bandmaster.rl.resharding import Resharding
from bandmaster.rl.shared_sync import SharedSync

BUCKET_NBYTES = 64 << 20


class WeightSync:
    """Moves the weights of one group to another; made once by the controller, and called for each version.

    The target is a group of models in any layout, or of engines such as `VLLM`; see below.

    The constructor asks both groups for their layouts, and `reshard` plans the moves between them.
    The bytes stay on the workers: senders leave them where they are made, and each receiver reads its own there. They
    come in buckets, so that little extra memory is needed: at most two buckets on each sender, and on each receiver its
    own weights once more, as it changes to the new ones in one call: a method runs with all the old weights or with all
    the new ones, also if a worker dies half-way. Receivers keep the staged tensors of a failed sync until the next one.

    Ranks of the source that have the same part of a tensor share the sending, so each sync compares checksums of these
    parts first. If replicas differ, nothing is changed, and the error names rank and tensors. That reads the replicas'
    weights once, about six times as fast as a copy.

    If another thread or controller begins a sync to the same target before one is over, the earlier one fails, and the
    receivers get all weights of the later one. Syncs that are submitted one after the other follow each other.

    If the weights come in several buckets, and another thread has a method change the weights of the source during a
    sync, the receivers may get buckets of both versions.

    A sync is for weights of the shapes that they had when it was made, and between models of the same dtypes. One that
    finds others on a rank fails, and changes nothing there; make a new one.

    **Engines.** Each replica gets whole tensors, by the names and in the dtypes that its loader expects, to which the
    source casts them. They are staged in memory beside the running engine, with a checksum of each. When all replicas
    have all of them, each one pauses, loads them, forgets what was cached of prompts, and goes on. If one cannot load
    them, all go back to those from before. Of each replica, the host holds the weights in use once more, and twice
    during a sync.

    Args:
        source: The group that has the weights; its workers are `HoldsWeights`.
        target: The group that gets them; its workers are `HoldsWeights`, too, or `Engine`. It may be the source, if
            ranks are given.
        bucket_nbytes: Bytes that a rank sends or receives at a time.
        from_ranks: The ranks of the source that send; by default all.
        to_ranks: The ranks of the target that receive; by default all. Others keep their weights: a worker that was
            replaced gets them from its peers by ``WeightSync(group, group, from_ranks=[0, 2], to_ranks=[1])``.
        is_compared: Whether to compare replicas of the source. Without, tensors that differ on them come from any.
        delta: Send engines only the elements that have changed since the last sync, after the cast. Replicas that lack
            the last weights, as they were replaced, get all in the same call. The source keeps a copy of what it has
            sent, on the CPU, spread over its ranks.
        heals: Replace replicas of engines that die, and give them the last weights, in the background. A sync leaves
            them out meanwhile. The source keeps a copy as with ``delta``, for the case that all replicas die.
        share: Have the target read the source's tensors where they lie, on the GPU that both are on or in their common
            process, in place of copies through the host. A rank of the source there must have all that a rank or
            replica of the target needs. Do not change the weights of the source during a sync, and do not begin two
            at a time to one target. No copy is kept: an engine that fails in a sync, or whose source fails, answers
            nothing until the next one; ranks of a model that fail keep the old weights while others have the new.

    Raises:
        UsageError: The workers of a group are not `HoldsWeights`; or a rank would both send and receive; or no rank
            is chosen; or an option is for engines, and the target is none.
        RemoteError: A tensor of the target cannot be written to, since it is expanded.
        LayoutError: The target has a tensor that the source does not have, or of another shape or dtype.

    Example:
        >>> import torch, bandmaster as bm
        >>> from bandmaster import rl
        >>> class Policy(rl.HoldsWeights):
        ...     def __init__(self, value):
        ...         self.model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        ...         self.set(value)
        ...     @bm.register(bm.Dispatch.ONE_TO_ALL)
        ...     def set(self, value): torch.nn.init.constant_(self.model.weight, value)
        ...     @bm.register(bm.Dispatch.ONE_TO_ALL)
        ...     def value(self): return float(self.model.weight), self.weights_version
        >>> with bm.ResourcePool([2], backend="inprocess") as a, bm.ResourcePool([1], backend="inprocess") as b:
        ...     trainer, rollout = bm.WorkerGroup(a, Policy, 1.0), bm.WorkerGroup(b, Policy, 0.0)
        ...     sync = rl.WeightSync(trainer, rollout)
        ...     sync(version=7)
        ...     rollout.value()
        [(1.0, 7)]
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        bucket_nbytes: int = BUCKET_NBYTES,
        from_ranks: Iterable[int] | None = None,
        to_ranks: Iterable[int] | None = None,
        is_compared: bool = True,
        delta: bool = False,
        heals: bool = False,
        share: bool = False,
    ) -> None:
        self._healing: Healing | None = None
        is_engine = callable(getattr(target, "use_weights", None))
        if is_engine and to_ranks is not None:
            raise UsageError(
                f"to_ranks={[*to_ranks]} chooses ranks of a model, but {target.name} is an engine, of which all "
                "replicas get the weights; leave it out, or call restore(replica) for one that was replaced"
            )
        for name in [name for name, is_set in (("delta", delta), ("heals", heals)) if is_set]:
            if share:
                raise UsageError(f"{name}=True needs copies of the weights, and with share=True there are none")
            if not is_engine:
                raise UsageError(
                    f"{name}=True is for groups of engines, which {getattr(target, 'name', target)!r} is not"
                )
        self._sync: EngineSync | GroupSync | SharedSync
        if share:
            self._sync = SharedSync(source, target, from_ranks, to_ranks, is_compared, is_engine)
        elif is_engine:
            is_kept = delta or heals
            self._sync = EngineSync(source, target, bucket_nbytes, from_ranks, is_compared, delta, is_kept, heals)
            if heals:
                self._healing = Healing(self._sync)
        else:
            self._sync = GroupSync(source, target, bucket_nbytes, from_ranks, to_ranks, is_compared)

    @property
    def plan(self) -> Resharding:
        """The moves between the groups, printable; with engines, from the source to each replica."""
        return self._sync.plan

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the ranks of the source have sent in the last sync to engines, however many replicas read them."""
        return self._of_engines("sent_nbytes").sent_nbytes

    def __call__(self, version: Any = None, in_flight: PauseMode | None = None) -> None:
        """Move the weights, and wait until they are in use.

        Args:
            version: The receivers' new ``weights_version``; a whole number, if answers of engines are to have it.
            in_flight: What becomes of the requests that an engine runs as it changes to the new weights: ``"keep"``
                goes on with them afterwards, by default; ``"wait"`` waits until they have ended; ``"abort"`` returns
                their tokens so far.

        Raises:
            WorkerDied: A worker died. The other receivers have the old weights. If it died as the receivers changed to
                the new ones, they have all the new or all the old ones: ``weights_version`` says which.
            UsageError: ``in_flight`` is given for a group that is no engine.
            RemoteError: A weight has another shape than when the sync was made, or between models another dtype.
            Exception: All errors of calls. Receivers have the old weights; see ``share`` for the exception.
        """
        self._sync.run(_pythons(version), in_flight)

    def submit(self, version: Any = None, in_flight: PauseMode | None = None) -> Future[Any] | SyncFuture:
        """Move the weights without waiting: as they are after the calls to the source that were submitted before.

        All buckets may be in transit at once, so that the senders' weights are in memory twice until they are received.
        With engines, it waits for an earlier sync to end.

        Args:
            version: As for a call.
            in_flight: As for a call.

        Returns:
            A future that is done when the new weights are in use, and can be awaited. If a call fails before the
            receivers change to the new weights, the future has that error, and the receivers have the old weights.

        Raises:
            UsageError: The sync was made with ``share=True``.
        """
        return self._sync.submit(_pythons(version), in_flight)

    def restore(self, replica: int) -> None:
        """Bring the weights of the last sync to a replica of an engine that was replaced.

        They come from another replica, or else from the copy that the source keeps with ``delta`` or ``heals``.

        Args:
            replica: The number of the replica.

        Raises:
            UsageError: There was no sync; or no other replica has the weights, and the source keeps no copy.
        """
        engines = self._of_engines("restore")
        if not 0 <= replica < engines.n_replicas:
            raise UsageError(f"{engines.target.name} has replicas 0 to {engines.n_replicas - 1}, got {replica}")
        with engines.lock:
            engines.restore(replica)

    def wait_until_healed(self, timeout: float | None = None) -> bool:
        """Wait until no replica is being replaced, or is known to have died.

        Returns False if that takes longer than ``timeout`` seconds. Do not call it from an ``on_death`` callback, since
        the replacement begins when these callbacks have returned.

        Raises:
            BandmasterError: A replica could not be replaced.
            UsageError: The sync was made without ``heals=True``.
        """
        if self._healing is None:
            raise UsageError("this rl.WeightSync replaces no replicas; make it with heals=True")
        return self._healing.wait(timeout)

    def _of_engines(self, what: str) -> EngineSync:
        if not isinstance(self._sync, EngineSync):
            raise UsageError(
                f"{what} is for copies of weights that engines get; the target of this rl.WeightSync is a group of "
                "models, or it was made with share=True"
            )
        return self._sync


def _pythons(version: Any) -> Any:
    """A version that receivers report, as an int if it is a whole number of NumPy."""
    whole = as_whole(version)
    return version if whole is None else whole
