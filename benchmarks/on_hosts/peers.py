"""The peers that work across hosts, by the names of their modules."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.environments import KINDS, Found, PeerKind, installed

AGENTS, RAY_PATH, PLAIN, FLOOR = (f"on_hosts.{name}" for name in ("agents", "ray_path", "plain_ray", "floor"))
LOCAL = "bandmaster_local"
ONE_EACH, EIGHT_EACH = "on_hosts.one_each", "on_hosts.eight_each"
TITLES = {
    AGENTS: "bandmaster, agents",
    RAY_PATH: "bandmaster, through Ray",
    PLAIN: "plain Ray",
    FLOOR: "floor: bare sockets",
    LOCAL: KINDS[LOCAL].title,
    ONE_EACH: "1 rank on each",
    EIGHT_EACH: "8 ranks on each",
}


def found(names: Sequence[str]) -> tuple[Found, ...]:
    """Peers, in this interpreter."""
    return tuple(Found(PeerKind(name, TITLES[name], "", ()), sys.executable) for name in names)


def versions() -> str:
    """Of what the peers are made of."""
    here = installed(sys.executable)
    return ", ".join(f"{name} {here[name]}" for name in ("python", "bandmaster", "ray", "numpy") if name in here)
