"""Lists the nodes of a running Ray cluster. Never starts a cluster, and disconnects from one that it has joined."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bandmaster.backends import get_backend
from bandmaster.backends.ray.session import running_cluster
from bandmaster.plan.placement import Node

REACHABLE_WITHIN_S = 5.0
STARTED_WITHIN_S = 60.0  # for the listening process on another host


class NotThere(Exception):
    """There is no reachable Ray cluster; the message says why."""


def links_and_nodes(address: str) -> list[tuple[Node, str | None]]:
    """Return the living nodes of a cluster, each with the reason why this host cannot connect to it; None if it can.

    Args:
        address: ``"host:port"`` of the cluster, or ``"auto"`` for the one that a pool would join.

    Raises:
        NotThere: There is no cluster, or this process cannot join it.
    """
    with _joined(address):
        try:
            nodes = get_backend("ray").inventory()
            return list(zip(nodes, _links([node.key for node in nodes]), strict=True))
        except Exception as error:  # Ray raises many kinds when a cluster ends
            raise NotThere(f"cannot list the nodes of the Ray cluster: {_first_line(error)}") from error


def _links(nodes: Sequence[str]) -> list[str | None]:
    """The reason why this host cannot connect to a process on each node; None for a node where it can."""
    listeners = [
        ray.remote(_Listener)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote()
        for node in nodes
    ]
    asked = [listener.address.remote() for listener in listeners]
    found: list[str | None] = []
    for reference in asked:
        try:
            host, port = ray.get(reference, timeout=STARTED_WITHIN_S)
            socket.create_connection((host, port), timeout=REACHABLE_WITHIN_S).close()
            found.append(None)
        except (RayError, OSError) as error:
            found.append(_first_line(error))
    return found


class _Listener:
    """A process on a node that listens on the same address and port range as an agent."""

    def address(self) -> tuple[str, int]:
        """Open the listening socket, and return its host and port."""
        self._socket = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = self._socket.getsockname()[:2]
        return host, port


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    if ray.is_initialized():  # by a Python program that calls this function
        yield
        return
    found = running_cluster() if address == "auto" else address
    if not found or found == "local":  # ray.init would start a cluster
        raise NotThere("no Ray cluster runs on this machine, and RAY_ADDRESS names none")
    if found != "auto":
        _check_reachable(found)
    try:
        ray.init(found, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # other versions of Ray or Python, and more
        raise NotThere(f"cannot join the Ray cluster at {found}: {_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHABLE_WITHIN_S).close()
    except (OSError, ValueError) as error:
        raise NotThere(f"no Ray cluster answers at {address!r}: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
