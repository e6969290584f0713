"""The gateway as a process: light to import, and plain about an address it can't have."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.support.processes.nats import nats_server


def test_nothing_heavy_is_imported() -> None:
    program = """
import sys
import services.gateway.app, shared.text.load
heavy = {"torch", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_a_port_that_is_taken_is_a_configuration_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with nats_server() as server:
            command = [sys.executable, "-m", "services.gateway", "--nats-url", server.url, "--port", port]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: ASYNC221
    assert done.returncode == 78
    assert port in done.stderr
