"""The peers that work across hosts, by the names of their modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from harness.environments import KINDS, Found, PeerKind, find, installed

AGENTS, PLAIN, FLOOR = (f"on_hosts.{name}" for name in ("agents", "plain_ray", "floor"))
LOCAL, MONARCH = "bandmaster_local", "on_hosts.monarch"
ONE_EACH, EIGHT_EACH = "on_hosts.one_each", "on_hosts.eight_each"
TITLES = {
    AGENTS: "bandmaster, agents",
    PLAIN: "plain Ray",
    MONARCH: "Monarch",
    FLOOR: "floor: bare sockets",
    LOCAL: KINDS[LOCAL].title,
    ONE_EACH: "1 rank on each",
    EIGHT_EACH: "8 ranks on each",
}


def found(names: Sequence[str]) -> tuple[Found, ...]:
    """Peers, in this interpreter; Monarch in its own environment, or with the reason why it is not there."""
    return tuple(_monarch() if name == MONARCH else _here(name) for name in names)


def _here(name: str) -> Found:
    return Found(PeerKind(name, TITLES[name], "", ()), sys.executable)


def _monarch() -> Found:
    (there,) = find(["monarch"])
    return replace(there, kind=replace(there.kind, name=MONARCH))


def versions() -> str:
    """Of what the peers are made of."""
    here = installed(sys.executable) | _monarch().versions
    names = ("python", "bandmaster", "ray", "numpy", "torchmonarch")
    return ", ".join(f"{name} {here[name]}" for name in names if name in here)
