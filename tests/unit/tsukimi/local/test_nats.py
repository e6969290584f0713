from __future__ import annotations

import socket
from pathlib import Path

from tests.support.processes.nats import nats_server
from tsukimi.local.nats import HOST, PORTS, answers, can_bind, find_binary, free_port


def test_a_port_in_use_cannot_be_bound() -> None:
    with socket.socket() as s:
        s.bind((HOST, 0))
        s.listen()
        assert not can_bind(HOST, s.getsockname()[1])


def test_the_port_lies_below_those_of_outgoing_connections() -> None:
    port = free_port()
    assert port in PORTS
    assert can_bind(HOST, port)
    assert PORTS.stop <= 32768  # where Linux begins by default


def test_the_wheel_brings_the_binary() -> None:
    assert Path(find_binary()).exists()


async def test_a_server_greets_and_nobody_does_not() -> None:
    async with nats_server() as server:
        assert await answers(server.port)
        server.kill()
        assert not await answers(server.port)
