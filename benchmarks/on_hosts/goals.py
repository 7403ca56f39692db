"""What calls to other hosts are to reach."""

from __future__ import annotations

from harness.targets import Target

from on_hosts.peers import AGENTS, EIGHT_EACH, FLOOR, LOCAL, ONE_EACH, PLAIN

NOOP = ("noop", "1 to each, and back", 16)
SENT = "sent by the controller's host"
GOALS = [
    Target("no-op, 16 ranks of 2 other hosts: agents over bandmaster local", NOOP, AGENTS, 3, LOCAL),
    Target("no-op, 16 ranks of 2 other hosts: plain Ray over agents", NOOP, PLAIN, 8, AGENTS, is_at_least=True),
    Target(
        "256 MiB to each of 16 ranks: bytes sent by the controller's host",
        ("broadcast", f"256 MiB: {SENT}", 16),
        AGENTS,
        2.05,
    ),
    Target(
        "256 MiB split to 8, +1, concatenated: plain Ray over agents",
        ("split", "256 MiB", 8),
        PLAIN,
        2,
        AGENTS,
        is_at_least=True,
    ),
    Target("256 MiB split to 8, +1, concatenated: agents over floor", ("split", "256 MiB", 8), AGENTS, 1.5, FLOOR),
    Target(
        "rows from host to host: bytes sent by the host that made them",
        ("chain", "64 MiB: sent by the host that made them", 2),
        AGENTS,
        1.05,
    ),
    Target(
        "rows from host to host: bytes through the controller's host",
        ("chain", "64 MiB: through the controller's host", 2),
        AGENTS,
        0.01,
    ),
    Target("controller's processor time, 128 hosts with 8 ranks each", ("many", "128 hosts", 128), EIGHT_EACH, 0.005),
    Target(
        "controller's processor time, 128 hosts: 8 ranks on each over 1",
        ("many", "128 hosts", 128),
        EIGHT_EACH,
        1.2,
        ONE_EACH,
    ),
    Target("16 ranks idle", ("idle", "20 s of nothing", 16), AGENTS, 0.5),
]
