"""A real service's app, started alone over a bus in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from shared.io.config import BaseConfig
from shared.io.memory_bus import MemoryBroker
from shared.io.presence import Presence
from shared.io.service import App, Context
from shared.protocol.ids import Role, new_incarnation
from tests.support.fakes.fake_cluster import Tasks


@contextlib.asynccontextmanager
async def solo_node(
    build: Callable[[Context, Any], App], role: Role, config: BaseConfig, *, start: bool = True
) -> AsyncIterator[App]:
    """The app, ready if `start`. All that it holds is freed at the end."""
    broker, tasks = MemoryBroker(), Tasks()
    bus, incarnation = broker.connect(), new_incarnation()
    presence = Presence(bus, role, config.node, incarnation, config.heartbeat_s)
    app = build(Context(bus, config, incarnation, cast(asyncio.TaskGroup, tasks), presence, None), config)
    try:
        if start:
            await app.start()
        yield app
    finally:
        await app.close()
        await tasks.end()
        await bus.close()
