"""The floor: what sockets and shared memory of the standard library can do, with nothing built on them.

Forked workers, a socket pair each, pickled tuples. Arrays lie in memfd segments that are made once and reused, passed
as descriptors; readers map them privately, so that they could write. Nothing is guarded: no errors, no deadlines, no
account of who still reads a segment. Whatever carries calls between processes in Python costs at least this.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket

import numpy as np

from peers.desk import Desk

MESSAGE_NBYTES = 65536
INLINE_NBYTES = 16 * 1024  # smaller arrays are pickled into the message


class Peer:
    """Workers forked from this process."""

    def start(self, n_workers: int) -> None:
        self._sockets: list[socket.socket] = []
        self._pids: list[int] = []
        self._segments: dict[int, Segment] = {}  # by size
        self._results: list[dict[int, mmap.mmap]] = [{} for _ in range(n_workers)]
        for rank in range(n_workers):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for inherited in (*self._sockets, ours):
                    inherited.close()
                _serve(theirs, Desk(rank))
            theirs.close()
            self._sockets.append(ours)
            self._pids.append(pid)

    def noop(self) -> list[int]:
        return self._call_all(pickle.dumps(("noop", (1,))))

    def load(self, module: str) -> list[bool]:
        return self._call_all(pickle.dumps(("load", (module,))))

    def broadcast(self, array: np.ndarray) -> list[float]:
        return self._broadcast("read", array)

    def broadcast_read_all(self, array: np.ndarray) -> list[float]:
        return self._broadcast("read_all", array)

    def split_inc_concat(self, array: np.ndarray) -> np.ndarray:
        parts = np.array_split(array, len(self._sockets))
        if parts[0].nbytes <= INLINE_NBYTES:
            for sock, part in zip(self._sockets, parts, strict=True):
                sock.send(pickle.dumps(("increment", (part,)), 5))
        else:
            segment = self._segment(array.nbytes)
            start = 0
            for sock, part in zip(self._sockets, parts, strict=True):  # one is at work while the next is written
                place = (start, start + part.nbytes)
                segment.array(array.dtype)[start // 4 : place[1] // 4] = part.reshape(-1)
                self._send_segment(sock, segment, ("increment", place, part.shape))
                start = place[1]
        return np.concatenate([self._receive(rank) for rank in range(len(parts))])

    def gather(self, nbytes: int, token: int) -> list[np.ndarray]:
        return self._call_all(pickle.dumps(("give", (nbytes, token))))

    def stop(self) -> None:
        for sock in self._sockets:
            sock.close()
        for pid in self._pids:
            os.waitpid(pid, 0)

    def _call_all(self, body: bytes) -> list:
        for sock in self._sockets:
            sock.send(body)
        return [self._receive(rank) for rank in range(len(self._sockets))]

    def _broadcast(self, method: str, array: np.ndarray) -> list[float]:
        if array.nbytes <= INLINE_NBYTES:
            return self._call_all(pickle.dumps((method, (array,)), 5))
        segment = self._segment(array.nbytes)
        segment.array(array.dtype)[:] = array.reshape(-1)
        for sock in self._sockets:
            self._send_segment(sock, segment, (method, (0, array.nbytes), array.shape))
        return [self._receive(rank) for rank in range(len(self._sockets))]

    def _segment(self, nbytes: int) -> Segment:
        if nbytes not in self._segments:
            for size in [size for size in self._segments if size > 1 << 24]:
                del self._segments[size]  # the big ones one at a time
            self._segments[nbytes] = Segment(nbytes)
        return self._segments[nbytes]

    def _send_segment(self, sock: socket.socket, segment: Segment, message: tuple) -> None:
        fds = [] if sock in segment.sent_to else [segment.fd]
        segment.sent_to.add(sock)
        socket.send_fds(sock, [pickle.dumps((*message, segment.nbytes))], fds)

    def _receive(self, rank: int) -> object:
        data, fds, _, _ = socket.recv_fds(self._sockets[rank], MESSAGE_NBYTES, 1)
        answer = pickle.loads(data)
        if not isinstance(answer, ArrayInSegment):
            return answer
        maps = self._results[rank]
        if fds:
            maps.clear()
            maps[answer.nbytes] = mmap.mmap(
                fds[0], answer.nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
            os.close(fds[0])
        return np.frombuffer(maps[answer.nbytes], np.float32).reshape(answer.shape)


class Segment:
    """Shared memory without a name, as its writer has it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("floor")
        os.ftruncate(self.fd, nbytes)
        self.memory = mmap.mmap(self.fd, nbytes)
        self.sent_to: set[socket.socket] = set()

    def array(self, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(self.memory, dtype)

    def __del__(self) -> None:
        os.close(self.fd)


class ArrayInSegment:
    """What an answer says of a large array: it lies in the worker's segment."""

    def __init__(self, nbytes: int, shape: tuple[int, ...]) -> None:
        self.nbytes = nbytes
        self.shape = shape


def _serve(sock: socket.socket, desk: Desk) -> None:
    """The worker: answer until the other end is closed."""
    maps: dict[int, mmap.mmap] = {}
    result = Segment(1)
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MESSAGE_NBYTES, 1)
        if not data:
            os._exit(0)
        method, *rest = pickle.loads(data)
        if len(rest) == 1:
            value = getattr(desk, method)(*rest[0])
        else:
            (start, stop), shape, nbytes = rest
            if fds:
                for size in [size for size in maps if size > 1 << 24]:
                    del maps[size]
                maps[nbytes] = mmap.mmap(fds[0], nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                os.close(fds[0])
            value = getattr(desk, method)(
                np.frombuffer(maps[nbytes], np.float32)[start // 4 : stop // 4].reshape(shape)
            )
        if not isinstance(value, np.ndarray) or value.nbytes <= INLINE_NBYTES:
            sock.send(pickle.dumps(value, 5))
            continue
        is_new = result.nbytes != value.nbytes
        if is_new:
            result = Segment(value.nbytes)
        result.array(value.dtype)[:] = value.reshape(-1)
        socket.send_fds(sock, [pickle.dumps(ArrayInSegment(value.nbytes, value.shape))], [result.fd] if is_new else [])
