"""What type checkers say of typed groups. A line that ends with ``# error`` is wrong, and no other is."""

from __future__ import annotations

from typing_extensions import assert_type

import bandmaster as bm
from bandmaster import Broadcast, Concat, Dispatch, Execute, Gather, Mesh, Reduce, Split, TransferProtocol, register


class Actor(bm.Worker):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @register(Dispatch.DP_PROTO)
    def act(self, rows: list[str], times: int = 2) -> list[str]:
        """Repeat each row."""
        assert_type(self.where(), int)  # in the worker a method is itself
        return [row * times for row in rows]

    @register(Dispatch.ONE_TO_ALL)
    def where(self) -> int:
        return self.rank

    @register("3D_PP_ONLY")
    def stage(self, name: str) -> bytes:
        return name.encode()

    @register("3D_PROTO")
    async def later(self, rows: list[int]) -> list[int]:
        return rows

    @register(Dispatch.ALL_TO_ALL)
    def each(self, seed: int) -> float:
        return self.scale * seed

    @register(Dispatch.DP_PROTO, execute_mode=Execute.RANK_ZERO)
    def save(self, path: str) -> bool:
        return bool(path)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def start(self, step: int) -> int:
        return step

    @register(TransferProtocol(Split("dp"), Concat("dp")))
    def rows(self, rows: list[int]) -> list[int]:
        return rows

    @register(TransferProtocol(Broadcast(), Gather("dp")))
    def listed(self) -> str:
        return "one"

    @register(TransferProtocol(Split("dp"), Reduce("mean", weights="rows")))
    def loss(self, rows: list[int]) -> float:
        return sum(rows) / len(rows)

    @register(Dispatch.REQUEST, concurrency=8)
    async def chat(self, text: str, end: str = "") -> str:
        return text + end

    @register(Dispatch.REQUEST)
    def length(self, text: str) -> int:
        return len(text)

    def helper(self) -> int:
        return self.where() + 1


class ActorGroup(bm.GroupOf[Actor], Actor): ...


def correct(pool: bm.ResourcePool) -> None:
    with ActorGroup(pool, Actor, scale=2.0, mesh=Mesh(dp=2)) as actor:
        assert_type(actor.act(["a"], times=3), list[str])
        assert_type(actor.act.submit(["a"]), bm.Future[list[str]])
        assert_type(actor.act.submit(["a"]).result(), list[str])
        assert_type(actor.act.options(timeout=5, grace=None)(["a"]), list[str])
        assert_type(actor.where(), list[int])
        assert_type(actor.stage("last"), list[bytes])
        assert_type(actor.later([1]), list[int])
        assert_type(actor.each([1, 2]), list[float])
        assert_type(actor.save("here"), bool)
        assert_type(actor.start(1), bm.Future[list[int]])
        assert_type(actor.start.submit(1), bm.Future[list[int]])
        assert_type(actor.rows([1]), list[int])
        assert_type(actor.listed(), list[str])
        assert_type(actor.loss([1]), float)
        assert_type(actor.chat("a", end="!"), bm.Future[str])
        assert_type(actor.chat.options(key="a", retries=2, min_version=3).submit("a"), bm.Future[str])
        assert_type(actor.chat.all("a"), bm.Future[list[str]])
        assert_type(actor.length("a").result(), int)
        actor.chat.map(["a", "b"], "!", in_flight=4).result()
        # Rows by handle
        kept = actor.act.submit(["a"])
        assert_type(actor.act(kept, times=3), list[str])
        assert_type(actor.act.submit(kept.shuffle(seed=1), 3), bm.Future[list[str]])
        assert_type(actor.loss(bm.concat([kept, kept])), float)
        assert_type(actor.chat.all(kept), bm.Future[list[str]])
        assert_type(actor.chat(kept), bm.Future[str])
        assert_type(actor.rows.stream(kept), bm.Stream)
        assert_type(actor.world_size, int)
        actor.restart()


def incorrect(actor: ActorGroup) -> None:
    actor.atc(["a"])  # error
    actor.act()  # error
    actor.act("a", "b")  # error
    actor.act(["a"], tims=3)  # error
    actor.act.options(timout=5)  # error
    actor.act.options(timeout="5")  # error
    actor.where(1)  # error
    actor.start("1")  # error
    actor.chat(1)  # error
    actor.chat.all()  # error
    actor.chat.options(keys="a")  # error
    actor.act.map(["a"])  # error
    actor.act.options(retries=2)  # error
    number: int = actor.where()  # error
    text: str = actor.act.submit(["a"]).result()  # error
    print(number, text)


def untyped(pool: bm.ResourcePool) -> None:
    group = bm.WorkerGroup(pool, Actor, scale=1.0)
    group.whatever(3)
