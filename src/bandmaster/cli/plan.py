"""``bandmaster plan``: a pool and its mesh on paper. Starts and reserves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from bandmaster.errors import MeshError, UsageError
from bandmaster.lifecycle.checks import checked_mesh
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.preview import plan
from bandmaster.plan.render import text_table
from bandmaster.pool import ResourcePool

__all__ = ["plan_pool"]

GENERATION_AXES = ("gen_pp", "gen_tp")


def plan_pool(places: str, has_gpus: bool, axes: str | None, protocol: str | None, rows: int | None) -> int:
    """Print which rank is where, and under a protocol who gets which rows.

    Args:
        places: On each node, as in ``4,4``.
        has_gpus: Whether every place has a GPU.
        axes: The mesh as in ``pp=2,dp=2,tp=2``, one axis ``dp`` by default; ``gen_pp`` and ``gen_tp`` refine it.
        protocol: Name of a transfer protocol.
        rows: Of the batch under the protocol; as many as ranks by default.

    Returns:
        0.

    Raises:
        UsageError: Any of them makes no sense.
    """
    if rows is not None and protocol is None:
        raise UsageError("--rows says how many rows are planned under a --protocol; give one, such as 3D_PROTO")
    sizes = [_number(size) for size in places.split(",")]
    pool = ResourcePool(sizes, use_gpu=has_gpus)  # type: ignore[arg-type]  # it says itself what is no size
    mesh = checked_mesh(None if axes is None else _mesh(axes), pool.world_size, pool)
    transfer = None if protocol is None else plan(protocol, mesh, mesh.size if rows is None else rows)
    coordinates = mesh.axis_names if axes is not None else ()
    title = f"{pool!r}" + (f" on {mesh!r}" if axes is not None else "")
    table = [[*slot, *(mesh.coordinates(rank)[axis] for axis in coordinates)] for rank, slot in enumerate(_slots(pool))]
    print(text_table(title, ["rank", "node", "local rank", "device", *coordinates], table))
    if has_gpus:
        print("a GPU's number counts those that the pool takes on the node; its worker sees it alone, as cuda:0")
    if transfer is not None:
        print(f"\n{transfer}")
    return 0


def _slots(pool: ResourcePool) -> Iterator[tuple[int, int, int, str]]:
    """Rank, node, local rank and device of each place."""
    rank = 0
    for node, size in enumerate(pool.process_on_nodes):
        for local_rank in range(size):
            yield rank, node, local_rank, f"GPU {local_rank}" if pool.use_gpu else "cpu"
            rank += 1


def _mesh(axes: str) -> Mesh:
    sizes: dict[str, object] = {}
    for axis in axes.split(","):
        name, equals, size = (part.strip() for part in axis.partition("="))
        if not (name.isidentifier() and equals):
            raise UsageError(f"axes are given as name=size with commas between, as in pp=2,dp=2,tp=2, not {axis!r}")
        if name in sizes:
            raise MeshError(f"axis {name!r} is given twice in {axes!r}; name each axis once")
        sizes[name] = _number(size)
    generation = {name: sizes.pop(name) for name in GENERATION_AXES if name in sizes}
    mesh = Mesh(**sizes)  # type: ignore[arg-type]  # it says itself what is no size
    return mesh.refine(**generation) if generation else mesh  # type: ignore[arg-type]  # likewise


def _number(text: str) -> object:
    """A number, if it is one: what else there is, the pool or mesh names in its error."""
    try:
        return int(text)
    except ValueError:
        return text.strip()
