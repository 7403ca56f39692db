"""A rendezvous port for ``torch.distributed`` that no other process takes between its choice and its use.

::

    rank 0's process                                        the other ranks
    listening socket, open before its port is announced ◄── connect, and wait in its backlog
      └─ torch's store is started on that socket when torch.distributed is loaded
           └─ init_process_group() finds the store in its own process and shares it

This module does not import torch by itself, and sets no unusual variables, so that processes which a worker starts
behave as always. Once the process group is initialized, it alone owns the store: destroying the group ends the store,
and a later `init_process_group()` makes a new one on the same port. Until then a second socket, which is bound to the
port and never listens, keeps Linux from giving the port to a connection or a server that does not care which it gets.

Source: ``master_listen_fd`` and ``multi_tenant`` of ``torch.distributed.TCPStore``.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence
from typing import Any

from bandmaster.platform.after_import import AfterImport

_MODULE = "torch.distributed.rendezvous"  # once it is loaded, stores can be made


def rendezvous_sockets(host: str) -> tuple[socket.socket, socket.socket]:
    """Open two sockets for `Rendezvous` on one free port of ``host``, an address of this host.

    The first keeps the port, and the second listens on it. The caller owns them.
    """
    with contextlib.ExitStack() as if_it_fails:
        keeps, listens = sockets = [if_it_fails.enter_context(socket.socket()) for _ in range(2)]
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that both can be bound to one port
        keeps.bind((host, 0))
        listens.bind(keeps.getsockname())
        listens.listen(4096)
        if_it_fails.pop_all()
    return keeps, listens


def rendezvous_environment(host: str, port: int) -> dict[str, str]:
    """The environment variables by which ``init_process_group()`` finds the rendezvous."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


class Rendezvous:
    """The rendezvous of one group, held by its rank 0.

    Args:
        sockets: Those of `rendezvous_sockets`, which the rendezvous owns from now on. The other ranks connect to the
            second.
        after: The functions that are called after each method, `Executor.after`: one is among them as long as there is
            a store to hand over.

    Attributes:
        port: Port of the rendezvous.
    """

    def __init__(self, sockets: Sequence[socket.socket], after: list[Any]) -> None:
        self._store: Any = None
        self._after = after
        self._keeps, self._listens = sockets
        self._host, self.port = self._keeps.getsockname()
        self._hook = AfterImport(_MODULE, self._start_store)

    def _hand_over(self, *_: object) -> None:
        """Leave the store to the process group, if it is initialized."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            self._store = None
            self._after.remove(self._hand_over)

    def close(self) -> None:
        """Close the sockets, and the store unless it was handed over."""
        self._store = None
        self._hook.cancel()
        self._listens.close()
        self._keeps.close()

    def _start_store(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore(
            self._host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=self._listens.detach(),
        )
        self._after.append(self._hand_over)
