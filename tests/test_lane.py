"""How workers that the controller did not fork get their lanes, whoever else connects."""

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from clock import idle_time

from bandmaster.single_controller.ray.listener import LaneListener, connect

ANOTHER_USER = 65533
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's processes")


@pytest.fixture
def listener():
    with LaneListener() as listener:
        yield listener


@pytest.fixture
def connected(listener):
    """Sockets that are connected to the listener, and have said something or nothing."""
    with contextlib.ExitStack() as close_all:

        def connected(said=b""):
            sock = close_all.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.connect(f"\0{listener.name}")
            if said:
                sock.send(said)
            return sock

        yield connected


def close(lanes):
    for lane in lanes.values():
        lane.close()


def talk(listener, worker, rank):
    """Whether a worker's end and the controller's end of its rank are of one lane."""
    lanes = listener.accept([rank], timeout_s=20)
    worker.send(b"hello")
    said = lanes[rank].recv(10)
    close(lanes)
    return said == b"hello"


@pytest.mark.parametrize("n_silent", [1, 300])
def test_connections_that_say_nothing_hold_no_worker_up(listener, connected, n_silent):
    silent = [connected() for _ in range(n_silent)]
    start = idle_time()
    with connect(listener.name, listener.introduction(3)) as worker:
        assert talk(listener, worker, 3)
    assert idle_time() - start < 2
    assert len(silent) == n_silent


def test_who_does_not_know_the_secret_is_not_let_in(listener, connected):
    wrong = [connected(said) for said in (b"x", bytes(20), listener.introduction(0)[:-1] + b"\x05", bytes(64))]
    with pytest.raises(TimeoutError, match=r"1 of 1 workers have not connected in 0\.05 s"):
        listener.accept([0], timeout_s=0.05)
    assert [sock.recv(1) for sock in wrong] == [b""] * 4, "they were hung up on"


def test_workers_that_cannot_connect_are_not_waited_for(listener):
    with connect(listener.name, listener.introduction(0)):
        lanes = listener.accept([0, 1, 2], timeout_s=20, refusing=lambda: [1, 2])
        assert list(lanes) == [0]
        close(lanes)


def test_nothing_answers_where_nobody_listens(listener):
    assert connect(listener.name + "x", b"") is None


def of_another_user(program, *args):
    """A process of another user that has printed a line."""
    begin = f"import os, socket, sys\nos.setgroups([]); os.setgid({ANOTHER_USER}); os.setuid({ANOTHER_USER})\n"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", begin + program, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline()
    return process


@is_root
def test_connections_of_another_user_are_closed_whatever_they_say(listener, caplog):
    program = """
socks = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
for sock in socks:
    sock.connect("\\0" + sys.argv[1])
    sock.send(bytes.fromhex(sys.argv[2]))
print("connected", flush=True)
for sock in socks:
    try:
        print(sock.recv(1))
    except ConnectionResetError:  # what it has said was not even read
        print("reset")
"""
    with of_another_user(program, listener.name, listener.introduction(0).hex()) as stranger:
        with connect(listener.name, listener.introduction(0)) as worker:
            assert talk(listener, worker, 0)
        assert stranger.stdout.read() == "reset\n" * 3
    listener.__exit__()
    assert "3 connections of other users" in caplog.text


@is_root
def test_a_worker_does_not_connect_to_another_user_who_has_taken_the_name(caplog):
    program = """
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind("\\0" + sys.argv[1])
sock.listen()
print("listens", flush=True)
print(sock.accept()[0].recv(10))
"""
    with of_another_user(program, f"bandmaster-test-{os.getpid()}") as stranger:
        assert connect(f"bandmaster-test-{os.getpid()}", b"the secret") is None
        assert stranger.stdout.read() == "b''\n"
    assert "another user now owns the name" in caplog.text
