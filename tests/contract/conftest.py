from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.fakes.bus_house import House, memory_house, nats_house


@pytest.fixture(params=[memory_house, nats_house], ids=["memory", "nats"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    """Each implementation of the bus in turn."""
    async with request.param() as house:
        yield house
