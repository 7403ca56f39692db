"""The floor: what sockets and shared memory of the standard library can do, with nothing built on them.

Forked workers, a socket pair each, pickled tuples. Arrays lie in memfd segments that are made once and reused, passed
as descriptors; readers map them privately, so that they could write. Nothing is guarded: no errors, no deadlines, no
account of who still reads a segment. Whatever carries calls between processes in Python costs at least this.
"""

from __future__ import annotations

import heapq
import mmap
import os
import pickle
import socket
from functools import cached_property

import numpy as np

from peers.desk import Desk

MESSAGE_NBYTES = 65536
MAX_FDS = 16  # in one message
INLINE_NBYTES = 16 * 1024  # smaller arrays are pickled into the message


class Peer:
    """Workers forked from this process."""

    def start(self, n_workers: int) -> None:
        self._sockets: list[socket.socket] = []
        self._pids: list[int] = []
        self._segments: dict[int, Segment] = {}  # by size
        self._results: list[dict[int, mmap.mmap]] = [{} for _ in range(n_workers)]
        for rank in range(n_workers):
            self._sockets.append(self._fork(rank))

    def noop(self) -> list[int]:
        return self._call_all(pickle.dumps(("noop", (1,))))

    def load_torch(self) -> list[bool]:
        return self._call_all(pickle.dumps(("load_torch", ())))

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

    def chain(self, nbytes: int, token: int) -> list[float]:
        n, m = len(self._sockets), len(self._others)
        each, part = n // m, nbytes // n
        for sock in self._sockets:
            sock.send(pickle.dumps(("make", [], part, token)))
        made = [self._receive_passed(sock) for sock in self._sockets]
        for i, other in enumerate(self._others):
            self._pass(other, "increment_joined", made[each * i : each * (i + 1)], 0, each * part)
        changed = [self._receive_passed(other) for other in self._others]
        for rank, sock in enumerate(self._sockets):
            self._pass(sock, "exact_sum", [changed[rank // each]], rank % each * part, part)
        return [pickle.loads(sock.recv(MESSAGE_NBYTES)) for sock in self._sockets]

    def hold(self, nbytes: int, n_rows: int, is_each_an_object: bool = False) -> None:
        parts = np.array_split(np.arange(n_rows), len(self._sockets))
        for sock, part in zip(self._sockets, parts, strict=True):
            message = ("make_numbered", [], nbytes // len(parts), (len(part), int(part[0])))
            sock.send(pickle.dumps(message))
        made = [self._receive_passed(sock) for sock in self._sockets]
        for sock in self._sockets:
            socket.send_fds(sock, [pickle.dumps(("hold", [shape for _, _, shape in made]))], [fd for fd, _, _ in made])
        for fd, _, _ in made:
            os.close(fd)

    def mini_batch(self, numbers: np.ndarray) -> list[float]:
        for sock, share in zip(self._sockets, np.array_split(numbers, len(self._sockets)), strict=True):
            sock.send(pickle.dumps(("mini_batch", share)))
        return [pickle.loads(sock.recv(MESSAGE_NBYTES)) for sock in self._sockets]

    def long_tail(self, seconds: np.ndarray) -> np.ndarray:
        """As one would who knew how long each row takes: the longest first, each to who has least to do."""
        loads = [(0.0, rank, []) for rank in range(len(self._sockets))]
        for row in np.argsort(-seconds):
            load, rank, rows = heapq.heappop(loads)
            heapq.heappush(loads, (load + seconds[row], rank, [*rows, row]))
        result = np.empty_like(seconds)
        for _, rank, rows in loads:
            self._sockets[rank].send(pickle.dumps(("rest", (seconds[rows],)), 5))
        for _, rank, rows in loads:
            result[rows] = self._receive(rank)
        return result

    long_tail_split = long_tail

    @cached_property
    def _others(self) -> list[socket.socket]:
        """Half as many workers."""
        return [self._fork(rank) for rank in range(max(1, len(self._sockets) // 2))]

    def _receive_passed(self, sock: socket.socket) -> tuple[int, int, tuple[int, ...]]:
        """Descriptor, size and shape of rows that lie in a worker's segment."""
        data, fds, _, _ = socket.recv_fds(sock, MESSAGE_NBYTES, 1)
        return (fds[0], *pickle.loads(data))

    def _pass(self, sock: socket.socket, method: str, rows: list, start: int, nbytes: int) -> None:
        """Pass rows on: some bytes of one segment, or all of several."""
        places = [(size, shape) for _, size, shape in rows]
        socket.send_fds(sock, [pickle.dumps((method, places, start, nbytes))], [fd for fd, _, _ in rows])
        if start + nbytes == sum(size for _, size, _ in rows):  # nobody else needs them
            for fd, _, _ in rows:
                os.close(fd)

    def stop(self) -> None:
        for sock in [*self._sockets, *self.__dict__.get("_others", ())]:
            sock.close()
        for pid in self._pids:
            os.waitpid(pid, 0)

    def _fork(self, rank: int) -> socket.socket:
        """A worker, by the socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for inherited in (*self._sockets, ours):
                inherited.close()
            _serve(theirs, Desk(rank))
        theirs.close()
        self._pids.append(pid)
        return ours

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


def _serve_passed(
    sock: socket.socket, desk: Desk, method: str, fds: list[int], places: list, start: int, nbytes: int
) -> None:
    """Rows that others have made come as descriptors; those that are made here go as one."""
    if method == "make":
        value = desk.make(start, nbytes)  # bytes and token
    elif method == "make_numbered":
        value = desk.make_numbered(start, *nbytes)
    else:
        maps = []
        for fd, (size, _) in zip(fds, places, strict=True):
            maps.append(mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
            os.close(fd)
        parts = [np.frombuffer(one, np.float32).reshape(shape) for one, (_, shape) in zip(maps, places, strict=True)]
        if method == "exact_sum":
            (rows,) = parts
            sock.send(pickle.dumps(desk.exact_sum(rows.reshape(-1)[start // 4 : (start + nbytes) // 4])))
            return
        value = desk.increment_joined(parts)
    segment = _free_segment(value.nbytes)
    segment.array(value.dtype)[:] = value.reshape(-1)
    socket.send_fds(sock, [pickle.dumps((value.nbytes, value.shape))], [segment.fd])


_passed: list[Segment] = []  # of this worker, by turns: the one before may still be read


def _free_segment(nbytes: int) -> Segment:
    if len(_passed) < 2 or _passed[0].nbytes != nbytes:
        if _passed and _passed[0].nbytes != nbytes:
            _passed.clear()
        _passed.append(Segment(nbytes))
        return _passed[-1]
    _passed.append(_passed.pop(0))
    return _passed[-1]


class _Held:
    """Rows that lie in the segments of all workers, mapped once."""

    def __init__(self, fds: list[int], shapes: list[tuple[int, ...]]) -> None:
        self.parts = []
        for fd, shape in zip(fds, shapes, strict=True):
            memory = mmap.mmap(fd, 4 * int(np.prod(shape)), prot=mmap.PROT_READ)
            self.parts.append(np.frombuffer(memory, np.float32).reshape(shape))
            os.close(fd)
        self.starts = np.cumsum([0, *[len(part) for part in self.parts]])

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        owners = np.searchsorted(self.starts, numbers, "right") - 1
        found = [self.parts[owner][number] for owner, number in zip(owners, numbers - self.starts[owners], strict=True)]
        return np.stack(found)


def _serve(sock: socket.socket, desk: Desk) -> None:
    """The worker: answer until the other end is closed."""
    maps: dict[int, mmap.mmap] = {}
    result, held = Segment(1), None
    while True:
        data, fds, _, _ = socket.recv_fds(sock, MESSAGE_NBYTES, MAX_FDS)
        if not data:
            os._exit(0)
        method, *rest = pickle.loads(data)
        if method == "hold":
            held = _Held(fds, *rest)
            continue
        if method == "mini_batch":
            sock.send(pickle.dumps(desk.first_sum(held.rows(*rest))))
            continue
        if method in ("make", "make_numbered", "increment_joined", "exact_sum"):
            _serve_passed(sock, desk, method, fds, *rest)
            continue
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
