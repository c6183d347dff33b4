"""Ports that are chosen now and listened on later."""

import random
import socket
from pathlib import Path


def free_port(address: str = "127.0.0.1") -> int:
    """One that is free, below those that connections begin at: of these any program could have got it meanwhile, even
    who knocks at the port itself."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, min(first, 30_000))
        with socket.socket() as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
            return port
