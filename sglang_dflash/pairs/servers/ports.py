"""Free ports, chosen so that no two processes of this package use the same one."""

import socket
from argparse import ArgumentTypeError

from sglang_dflash.pairs.servers.errors import ServerError

HOST = "127.0.0.1"
LAST = 65535


def port_number(text: str) -> int:
    """Parse the number of a port."""
    if not text.isdecimal() or not 0 < int(text) <= LAST:
        raise ArgumentTypeError(f"{text!r} is no port; give a number from 1 to {LAST}")
    return int(text)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Connections of an earlier server in TIME_WAIT must not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


# UDP sockets by port. A server begins to listen some seconds after its port was chosen. Until then a socket on the UDP
# port of the same number, which is otherwise unused, marks the port as taken. The socket closes when the process ends.
CLAIMS: dict[int, socket.socket] = {}


def claim(port: int) -> bool:
    """Reserve `port` for this process. Returns False if another process holds the port."""
    if port not in CLAIMS:
        udp = socket.socket(type=socket.SOCK_DGRAM)
        try:
            udp.bind((HOST, port))
        except OSError:
            udp.close()
            return False
        CLAIMS[port] = udp
    return True


def free_port(start: int) -> int:
    """Return the first free port from `start` on, claimed by this process until it ends.

    Raises:
        ServerError: none of a hundred ports is free, or none is left.
    """
    if start > LAST:
        raise ServerError(f"the ports up to {LAST} are used up; start lower with --port")
    tried = range(start, min(start + 100, LAST + 1))
    for port in tried:
        if claim(port) and port_is_free(port):
            return port
    raise ServerError(f"found no free port in {tried[0]}..{tried[-1]}; choose another start with --port")
