"""A rendezvous port for ``torch.distributed`` that no other process can take between its choice and its use.

::

    rank 0's process                                        the other ranks
    listening socket, open before its port is announced ◄── connect, and wait in its backlog
      └─ torch's store is started on that socket when torch.distributed is loaded
           └─ init_process_group() finds the store in its own process and shares it

This module does not import torch by itself, and sets no unusual variables, so that processes which a worker starts
behave as always. Once the process group is initialized, it alone owns the store: destroying the group ends the store,
and a later `init_process_group()` makes a new one on the same port.

Source: ``master_listen_fd`` and ``multi_tenant`` of ``torch.distributed.TCPStore``.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from bandmaster.platform.after_import import AfterImport

_MODULE = "torch.distributed.rendezvous"  # once it is loaded, stores can be made


def listening_socket(host: str) -> socket.socket:
    """Open a socket for `Rendezvous` that listens on a free port of ``host``, an address of this host.

    The caller owns the socket.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the next store on this port
    sock.bind((host, 0))
    sock.listen(4096)
    return sock


def rendezvous_environment(host: str, port: int) -> dict[str, str]:
    """The environment variables by which ``init_process_group()`` finds the rendezvous."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


class Rendezvous:
    """The rendezvous of one group, held by its rank 0.

    Args:
        sock: A socket from `listening_socket`, which the rendezvous owns from now on. The other ranks connect to it.
        after: The functions that are called after each method, `Executor.after`: one is among them as long as there is
            a store to hand over.

    Attributes:
        port: Port of the rendezvous.
    """

    def __init__(self, sock: socket.socket, after: list[Any]) -> None:
        self._store: Any = None
        self._after = after
        self._socket: socket.socket | None = sock
        self._host, self.port = sock.getsockname()
        self._hook = AfterImport(_MODULE, self._start_store)

    def _hand_over(self, *_: object) -> None:
        """Leave the store to the process group, if it is initialized."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            self._store = None
            self._after.remove(self._hand_over)

    def close(self) -> None:
        """Close the store and the socket, unless the store was handed over."""
        self._store = None
        self._hook.cancel()
        if self._socket is not None:
            self._socket.close()

    def _start_store(self) -> None:
        from torch.distributed import TCPStore

        assert self._socket is not None, "the store is started once"
        self._store = TCPStore(
            self._host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=self._socket.detach(),
        )
        self._socket = None
        self._after.append(self._hand_over)
