"""The handshake by which both ends of a new connection between hosts prove that they know a secret.

::

    client ── magic, nonce ──────────────────────────► server       what is not this long, or not this, is closed
           ◄── nonce, HMAC(secret, "server", nonces) ──              the server knows the secret
           ── HMAC(secret, "client", purpose, nonces), purpose ──►   so does the client; each end derives its keys

With encryption, TLS comes first. It has no certificates: its keys are agreed upon by an anonymous Diffie-Hellman
exchange, and the proofs cover what `ssl` calls the channel binding, so that nobody in the middle can pass them on. That
is what SCRAM-PLUS does (RFC 5802); the group is ffdhe2048 of RFC 7919.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import ssl
import tempfile
from dataclasses import dataclass, field
from functools import cache

from bandmaster.platform.deadline import Deadline
from bandmaster.platform.settings import is_link_encrypted

MAGIC = b"bandmaster-link-6"  # another number whenever the format of frames changes
NONCE_NBYTES = PROOF_NBYTES = 32
HANDSHAKE_TIMEOUT_S = 5.0
_CIPHERS = "ADH-AES128-GCM-SHA256:@SECLEVEL=0"  # OpenSSL counts ciphers without certificates as level 0

# For key exchanges without certificates: public, and the same for everybody (RFC 7919).
_FFDHE2048 = """\
-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz+8yTnc4kmz75
fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a87VXE15/V8k1mE8McODmi3fi
pona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W
7edjcrsZCwenyO4KbXCeAvzhzffi7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8
vC7CIAXFjvGDfRaDssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


class Refused(Exception):
    """Raised when the other end has not proved that it knows the secret."""


@dataclass(frozen=True)
class Secret:
    """The secret that both ends have to know.

    Attributes:
        key: Random bytes.
        is_encrypted: Whether what is sent is encrypted.
    """

    key: bytes = field(repr=False)
    is_encrypted: bool = False

    @classmethod
    def new(cls) -> Secret:
        """A new secret; `bandmaster.platform.settings` says whether links are encrypted."""
        return cls(secrets.token_bytes(32), is_link_encrypted())


@dataclass(frozen=True)
class Keys:
    """Keys of one connection.

    Attributes:
        sends: Of what this end sends.
        receives: Of what it receives.
    """

    sends: bytes = field(repr=False)
    receives: bytes = field(repr=False)


def greet(sock: socket.socket, secret: Secret, purpose: int) -> tuple[socket.socket, Keys]:
    """The client's part. Returns the socket, which is another one with encryption, and the keys.

    Args:
        sock: A new connection.
        secret: The secret.
        purpose: What the connection is for: one byte.

    Raises:
        Refused: The server does not know the secret.
        OSError: The connection failed, or the server did not answer in time.
    """
    deadline = Deadline(HANDSHAKE_TIMEOUT_S)
    sock, binding = _secured(sock, secret, False, deadline)
    nonce = secrets.token_bytes(NONCE_NBYTES)
    sock.sendall(MAGIC + nonce)
    said = _exactly(sock, NONCE_NBYTES + PROOF_NBYTES, deadline)
    nonces = binding + nonce + said[:NONCE_NBYTES]
    if not hmac.compare_digest(said[NONCE_NBYTES:], _proof(secret, b"server", nonces)):
        raise Refused("the agent does not know the secret of this controller")
    sock.sendall(_proof(secret, b"client" + bytes([purpose]), nonces) + bytes([purpose]))
    return sock, Keys(_proof(secret, b"from client", nonces), _proof(secret, b"from server", nonces))


def welcome(sock: socket.socket, secret: Secret) -> tuple[socket.socket, Keys, int]:
    """The server's part. Returns the socket, the keys, and what the connection is for.

    Raises:
        Refused: The client does not know the secret, or is no client of ours.
        OSError: The connection failed, or the client did not say who it is in time.
    """
    deadline = Deadline(HANDSHAKE_TIMEOUT_S)
    sock, binding = _secured(sock, secret, True, deadline)
    said = _exactly(sock, len(MAGIC) + NONCE_NBYTES, deadline)
    if not said.startswith(MAGIC):
        raise Refused("what came is not the beginning of a link")
    nonce = secrets.token_bytes(NONCE_NBYTES)
    nonces = binding + said[len(MAGIC) :] + nonce
    sock.sendall(nonce + _proof(secret, b"server", nonces))
    said = _exactly(sock, PROOF_NBYTES + 1, deadline)
    if not hmac.compare_digest(said[:PROOF_NBYTES], _proof(secret, b"client" + said[PROOF_NBYTES:], nonces)):
        raise Refused("the client does not know the secret")
    return sock, Keys(_proof(secret, b"from server", nonces), _proof(secret, b"from client", nonces)), said[-1]


def _proof(secret: Secret, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret.key, role + b"\0" + nonces, "sha256")


def _exactly(sock: socket.socket, n_bytes: int, deadline: Deadline) -> bytes:
    """So many bytes, which come before the deadline."""
    said = b""
    while len(said) < n_bytes:
        sock.settimeout(_left(deadline))
        more = sock.recv(n_bytes - len(said))
        if not more:
            raise ConnectionResetError("the other end hung up during the handshake, as one of another version does")
        said += more
    return said


def _left(deadline: Deadline) -> float:
    left = deadline.left()
    if not left:
        raise TimeoutError(f"the other end has not completed the handshake within {HANDSHAKE_TIMEOUT_S:g} s")
    return left


def _secured(sock: socket.socket, secret: Secret, is_server: bool, deadline: Deadline) -> tuple[socket.socket, bytes]:
    """The socket, encrypted if it has to be, and what the proofs are bound to."""
    sock.settimeout(_left(deadline))
    if not secret.is_encrypted:
        return sock, b""
    try:
        wrapped = _context(is_server).wrap_socket(sock, server_side=is_server)
    except ssl.SSLError as error:
        raise Refused(f"no encryption could be agreed upon: {error}") from error
    binding = wrapped.get_channel_binding("tls-unique")
    if not binding:
        raise Refused("the encryption has no channel binding")
    return wrapped, binding


@cache
def _context(is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    if not is_server:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # there are no certificates: the proofs take their place
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2  # of which ssl knows the binding
    context.set_ciphers(_CIPHERS)
    if is_server:
        with tempfile.NamedTemporaryFile("w", suffix=".pem") as file, contextlib.suppress(FileNotFoundError):
            file.write(_FFDHE2048)
            file.flush()
            context.load_dh_params(file.name)
    return context
