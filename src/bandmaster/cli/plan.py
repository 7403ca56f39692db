"""``bandmaster plan``: previews a pool, its mesh and a transfer protocol. Starts and reserves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from bandmaster.errors import MeshError, UsageError
from bandmaster.lifecycle.checks import checked_mesh
from bandmaster.plan.mesh import Mesh
from bandmaster.plan.preview import plan
from bandmaster.plan.render import text_table
from bandmaster.pool import ResourcePool

GENERATION_AXES = ("gen_pp", "gen_tp")


def plan_pool(places: str, has_gpus: bool, axes: str | None, protocol: str | None, rows: int | None) -> int:
    """Print where each rank would be, and, given a protocol, which rows each rank would get.

    Args:
        places: Slots on each node, such as ``4,4``.
        has_gpus: Whether every slot has a GPU.
        axes: The mesh, such as ``pp=2,dp=2,tp=2``; ``gen_pp`` and ``gen_tp`` refine it. One axis ``dp`` by default.
        protocol: Name of a transfer protocol, or None for none.
        rows: Rows of the batch that the protocol transfers; by default one per rank.

    Returns:
        The exit status 0.

    Raises:
        UsageError: An argument is malformed, or the arguments do not fit each other.
    """
    if rows is not None and protocol is None:
        raise UsageError("--rows needs a transfer protocol; add one, such as --protocol 3D_PROTO")
    sizes = [_number(size) for size in places.split(",")]
    pool = ResourcePool(sizes, use_gpu=has_gpus)  # type: ignore[arg-type]  # the pool refuses what is not a size
    mesh = checked_mesh(None if axes is None else _mesh(axes), pool.world_size, pool)
    transfer = None if protocol is None else plan(protocol, mesh, mesh.size if rows is None else rows)
    coordinates = mesh.axis_names if axes is not None else ()
    title = f"{pool!r}" + (f" on {mesh!r}" if axes is not None else "")
    table = [[*slot, *(mesh.coordinates(rank)[axis] for axis in coordinates)] for rank, slot in enumerate(_slots(pool))]
    print(text_table(title, ["rank", "node", "local rank", "device", *coordinates], table))
    if has_gpus:
        print("GPUs are numbered among the pool's GPUs on each node; a worker sees only its own, as cuda:0")
    if transfer is not None:
        print(f"\n{transfer}")
    return 0


def _slots(pool: ResourcePool) -> Iterator[tuple[int, int, int, str]]:
    """Rank, node, local rank and device of each slot."""
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
            raise UsageError(
                f"--axes must be name=size pairs with commas between, such as pp=2,dp=2,tp=2, got {axis!r}"
            )
        if name in sizes:
            raise MeshError(f"axis {name!r} is given twice in {axes!r}; name each axis once")
        sizes[name] = _number(size)
    generation = {name: sizes.pop(name) for name in GENERATION_AXES if name in sizes}
    mesh = Mesh(**sizes)  # type: ignore[arg-type]  # Mesh refuses what is not a size
    return mesh.refine(**generation) if generation else mesh  # type: ignore[arg-type]  # refine checks them too


def _number(text: str) -> object:
    """The text as an integer if it is one; otherwise the text itself, which the pool or mesh refuses by name."""
    try:
        return int(text)
    except ValueError:
        return text.strip()
