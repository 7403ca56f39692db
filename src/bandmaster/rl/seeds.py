"""Random numbers of ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import numpy as np

from bandmaster import Worker


def seed(worker: Worker, number: int, alike: Sequence[str] = ()) -> int:
    """Seed Python's, numpy's and torch's random numbers of a rank.

    Args:
        worker: The worker, that is ``self``.
        number: The seed of the group, 0 or more.
        alike: Axes of its mesh: ranks that differ only in these axes draw the same numbers. By default all ranks draw
            different numbers.

    Returns:
        The seed of the rank, below 2**32, which depends only on ``number`` and the rank's place on the other axes.

    Raises:
        MeshError: The mesh does not have an axis of ``alike``, or these overlap.

    Example:
        >>> import bandmaster as bm
        >>> from bandmaster import rl
        >>> class Sampler(bm.Worker):
        ...     @bm.register(bm.Dispatch.ONE_TO_ALL)
        ...     def seed(self): return rl.seed(self, 0, alike=["tp"])
        >>> with bm.ResourcePool([4], backend="inprocess") as pool:
        ...     a, b, c, d = bm.WorkerGroup(pool, Sampler, mesh=bm.Mesh(dp=2, tp=2)).seed()
        >>> a == b, c == d, a == c
        (True, True, False)
    """
    groups = worker.mesh.groups(*alike)
    place = next(index for index, ranks in enumerate(groups) if worker.rank in ranks)
    own = int(np.random.SeedSequence([number, place]).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)
    torch = sys.modules.get("torch")
    if torch is not None:  # else this process has not imported torch, which starts from a seed of its own
        torch.manual_seed(own)
    return own
