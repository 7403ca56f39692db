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

import importlib.machinery
import importlib.util
import socket
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

__all__ = ["Rendezvous", "listening_socket", "rendezvous_environment"]

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

    Attributes:
        port: Port of the rendezvous.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._store: Any = None
        self._socket: socket.socket | None = sock
        self._host, self.port = sock.getsockname()
        self._hook: _AfterImport | None = None
        if _MODULE in sys.modules:
            self._start_store()
        else:
            self._hook = _AfterImport(_MODULE, self._start_store)
            sys.meta_path.insert(0, self._hook)

    def hand_over(self) -> bool:
        """Leave the store to the process group, if it is initialized. Cheap enough to call after every method.

        Returns:
            Whether the store was handed over.
        """
        distributed = sys.modules.get("torch.distributed")
        if self._store is None or distributed is None or not distributed.is_initialized():
            return False
        self._store = None
        return True

    def close(self) -> None:
        """Close the store and the socket, unless the store was handed over."""
        self._store = None
        if self._hook in sys.meta_path:
            sys.meta_path.remove(self._hook)
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


class _AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module = module
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThenCall(spec.loader, self._function)
        return spec


class _LoaderThenCall(Loader):
    def __init__(self, loader: Loader, function: Callable[[], None]) -> None:
        self._loader = loader
        self._function = function

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._function()
