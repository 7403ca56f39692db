"""The running Ray cluster, whose first host has no CPUs for workers."""

from __future__ import annotations

import ray


def join() -> None:
    """Connect to the cluster that RAY_ADDRESS names."""
    ray.init("auto", log_to_driver=False, logging_level="ERROR")


def other_nodes() -> list[str]:
    """Ray's ids of the nodes that workers can be on, in the order of their addresses."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    return [node["NodeID"] for node in sorted(nodes, key=lambda node: node["NodeManagerAddress"])]
