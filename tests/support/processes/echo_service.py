"""The smallest service, run as a process by tests. Answers on a subject, slowly if asked to; can be told to fail."""

from __future__ import annotations

import asyncio
import time

from msgspec import Struct

from shared.io.config import BaseConfig
from shared.io.service import Context, run
from shared.protocol.cluster import NodeInfo, NodeLoad, Stage
from shared.protocol.errors import Invalid
from shared.protocol.ids import NodeRef

SUBJECT = "test.echo"


class Echo(Struct, frozen=True, tag="echo"):
    text: str
    after_s: float = 0.0


class EchoConfig(BaseConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fail: str = ""
    """How to fail: `start`, `config`, `thread` or `later`. Empty: do not fail."""
    pool_bytes: int = 0
    """The same field as on a cache node; has no effect here."""
    api_key: str = ""
    """A secret that must not appear in any log."""


class EchoApp:
    def __init__(self, context: Context, config: EchoConfig) -> None:
        self._context = context
        self._config = config
        self._stage: Stage = "starting"
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def info(self) -> NodeInfo:
        ref = NodeRef(self._context.node, self._context.incarnation)
        return NodeInfo(ref, "cache", self._stage)

    def load(self, seq: int) -> NodeLoad:
        context = self._context
        return NodeLoad(context.node, context.incarnation, "cache", seq, self._stage, running=self._running)

    async def start(self) -> None:
        if self._config.fail == "config":
            raise Invalid("the model folder is empty", param="model")
        if self._config.fail == "start":
            raise OSError("no such device")
        if self._config.fail == "thread":
            self._stage = "loading"
            await self._context.announce_now()
            await asyncio.to_thread(time.sleep, 3600)
        if self._config.fail == "later":
            self._context.tasks.create_task(self._fail())
        await self._context.bus.subscribe(SUBJECT, Echo, self._on_echo)
        self._stage = "ready"
        await self._context.announce_now()

    async def drain(self, grace_s: float) -> None:
        self._stage = "draining"
        await self._context.announce_now()
        await self._idle.wait()

    async def close(self) -> None: ...

    async def _on_echo(self, echo: Echo) -> Echo:
        self._running += 1
        self._idle.clear()
        self._context.heartbeat_soon()
        await asyncio.sleep(echo.after_s)
        self._running -= 1
        if not self._running:
            self._idle.set()
        return echo

    async def _fail(self) -> None:
        await asyncio.sleep(0.05)
        raise ZeroDivisionError("a bug")


if __name__ == "__main__":
    run(EchoConfig, "cache", EchoApp)
