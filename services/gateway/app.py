"""Wires the gateway to its fronts and to the life of a service."""

from __future__ import annotations

import asyncio
import os
from functools import partial

from services.gateway.config import GatewayConfig
from services.gateway.fronts.http import HttpServer, listen, routes
from services.gateway.fronts.nats import NatsFront
from services.gateway.generation.gateway import Gateway
from shared.io.service import Context
from shared.protocol.cluster import NodeInfo, NodeLoad, Stage
from shared.protocol.ids import NodeRef
from shared.text.load import load_text

LAST_WORDS_S = 1.0
"""Seconds for streams to send their error event after their time is up."""


class GatewayApp:
    def __init__(self, context: Context, config: GatewayConfig) -> None:
        self._context = context
        self._config = config
        self._stage: Stage = "starting"
        self._listener = listen(config.bind, config.port, config.stalled_s)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{config.advertise if config.advertise != config.bind else host}:{port}"
        load = partial(load_text, own_model=config.model)
        self.gateway = Gateway(
            context.bus, config, context.incarnation, context.tasks, load, context.recorder
        )
        self._nats = NatsFront(self.gateway, context.bus)
        self._server = HttpServer(routes(self.gateway), self._listener, config.max_body_bytes)
        self._serving: asyncio.Task[None] | None = None

    def info(self) -> NodeInfo:
        ref = NodeRef(self._context.node, self._context.incarnation, host=self._context.host)
        return NodeInfo(
            ref=ref,
            role="gateway",
            stage=self._stage,
            detail="waiting for a model to be announced" if self._stage == "loading" else "",
            pid=os.getpid(),
            max_running=self._config.max_running,
            http=self.address,
        )

    def load(self, seq: int) -> NodeLoad:
        return NodeLoad(
            node=self._context.node,
            incarnation=self._context.incarnation,
            role="gateway",
            seq=seq,
            stage=self._stage,
            running=self.gateway.choices_running,
            counters=self.gateway.metrics.totals(),
        )

    async def start(self) -> None:
        await self.gateway.start()
        await self._nats.start()
        self._serving = self._context.tasks.create_task(self._server.run_until_closed())
        self._stage = "loading"
        await self._context.announce_now()
        await self.gateway.cluster.some_model.wait()
        self._stage = "ready"
        await self._context.announce_now()

    async def drain(self, grace_s: float) -> None:
        self._stage = "draining"
        await self._context.announce_now()
        await self.gateway.drain(max(0.0, grace_s - LAST_WORDS_S))
        await self.gateway.wait_idle(LAST_WORDS_S)

    async def close(self) -> None:
        self.gateway.end_all("the gateway is shutting down")
        if self._serving is None:
            self._listener.close()
        else:
            self._server.stop()
            await asyncio.wait([self._serving])
