"""Where each peer is installed: its own environment in `.bench`, or this interpreter."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ENVIRONMENTS = BENCHMARKS.parent / ".bench"


@dataclass(frozen=True)
class PeerKind:
    """A peer as the benchmarks know it.

    Attributes:
        name: Its module in `peers`.
        title: As people call it.
        environment: Its folder in `.bench`.
        packages: What has to be installed for it, the one whose version is shown first.
    """

    name: str
    title: str
    environment: str
    packages: tuple[str, ...]


KINDS = {
    kind.name: kind
    for kind in (
        PeerKind("floor", "floor", "bandmaster", ("numpy",)),
        PeerKind("bandmaster_local", "bandmaster local", "bandmaster", ("bandmaster",)),
        PeerKind("bandmaster_ray", "bandmaster ray", "bandmaster", ("bandmaster", "ray")),
        PeerKind("plain_ray", "plain Ray", "bandmaster", ("ray",)),
        PeerKind("monarch", "Monarch", "monarch", ("torchmonarch",)),
        PeerKind("verl", "verl", "verl", ("verl", "ray", "tensordict")),
    )
}


@dataclass(frozen=True)
class Found:
    """A peer and the interpreter that has it; without one, why not."""

    kind: PeerKind
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    why_not: str = ""


def find(names: Sequence[str], only_here: bool = False) -> list[Found]:
    """Look for peers, in `.bench` first unless ``only_here``. Those that are not installed say so."""
    return [_find(KINDS[name], only_here) for name in names]


def _find(kind: PeerKind, only_here: bool) -> Found:
    pythons = [] if only_here else [str(ENVIRONMENTS / kind.environment / "bin" / "python")]
    missing = kind.packages
    for python in [*pythons, sys.executable]:
        if Path(python).exists():
            versions = installed(python)
            missing = tuple(package for package in kind.packages if package not in versions)
            if not missing:
                shown = {name: versions[name] for name in (*kind.packages, "numpy", "torch") if name in versions}
                return Found(kind, python, {"python": versions["python"], **shown})
    return Found(kind, why_not=f"not installed: {', '.join(missing)}")


@functools.cache
def installed(python: str) -> dict[str, str]:
    """Versions of the packages that an interpreter has, and its own."""
    program = (
        "import importlib.metadata, json, platform;"
        "found = {d.metadata['Name'].lower(): d.version for d in importlib.metadata.distributions()};"
        "print(json.dumps({**found, 'python': platform.python_version()}))"
    )
    return json.loads(subprocess.run([python, "-c", program], check=True, capture_output=True).stdout)
