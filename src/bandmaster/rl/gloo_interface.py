"""The network interface by which gloo reaches the ranks of other hosts."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

ADDRESS_OF_INTERFACE = 0x8915  # the ioctl SIOCGIFADDR
NAME_NBYTES = 16  # of an interface, in the struct ifreq that the ioctl takes


def choose_interface(address: str) -> None:
    """Have gloo use the interface that leads to an address, where it would use the loopback interface.

    Gloo listens on the address that the host's name has. Where that name has none, or one of the loopback network as in
    the ``/etc/hosts`` that Debian writes, ranks on other hosts could not connect. A name with another address is left
    to gloo, and so is everything if the environment has ``GLOO_SOCKET_IFNAME``.

    Args:
        address: An address of a host of the group, such as ``MASTER_ADDR``.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or _is_loopback(address) or not _is_loopback(socket.gethostname()):
        return
    name = _interface_to(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _is_loopback(host: str) -> bool:
    """Whether a host's name or address leads to the loopback network, or nowhere."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return True


def _interface_to(address: str) -> str | None:
    """The name of the interface that has the address which this host uses towards another one; None if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing, and has the kernel choose
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[: NAME_NBYTES - 1])
            try:
                found = fcntl.ioctl(probe.fileno(), ADDRESS_OF_INTERFACE, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == own:
                return name
    return None
