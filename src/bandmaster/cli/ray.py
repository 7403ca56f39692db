"""Lists the nodes of a running Ray cluster. Never starts a cluster, and disconnects from one that it has joined."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import ray

from bandmaster.backends import get_backend
from bandmaster.backends.ray import _running_cluster
from bandmaster.plan.placement import Node

__all__ = ["NotThere", "nodes_of"]

REACHABLE_WITHIN_S = 5.0


class NotThere(Exception):
    """There is no reachable Ray cluster; the message says why."""


def nodes_of(address: str) -> tuple[Node, ...]:
    """Return the living nodes of a cluster.

    Args:
        address: ``"host:port"`` of the cluster, or ``"auto"`` for the one that a pool would join.

    Raises:
        NotThere: There is no cluster, or this process cannot join it.
    """
    with _joined(address):
        try:
            return tuple(get_backend("ray").inventory())
        except Exception as error:  # Ray raises many kinds when a cluster ends
            raise NotThere(f"cannot list the nodes of the Ray cluster: {_first_line(error)}") from error


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    if ray.is_initialized():  # by a Python program that calls this function
        yield
        return
    found = _running_cluster() if address == "auto" else address
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
