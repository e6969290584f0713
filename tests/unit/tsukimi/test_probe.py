from __future__ import annotations

from tests.support.processes.nats import nats_server
from tests.unit.tsukimi.gateway_double import gateway_double
from tsukimi.probe import http_status, node_stage


async def test_http_status() -> None:
    with gateway_double() as gateway:
        assert await http_status("127.0.0.1", gateway.server_port, "/live") == 200
        gateway.status = 503
        assert await http_status("127.0.0.1", gateway.server_port, "/live") == 503
    assert await http_status("127.0.0.1", gateway.server_port, "/live") == 0


async def test_a_node_that_does_not_answer_has_no_stage() -> None:
    async with nats_server() as server:
        assert await node_stage(server.url, "decode-0", timeout_s=0.2) == ""
