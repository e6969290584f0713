from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engine.model import small_model  # noqa: F401
from tests.support.processes.nats import NatsServer


@pytest.fixture
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A running nats-server of this test's own; `nats.url` is where."""
    folder: Path = tmp_path_factory.mktemp("nats")
    server = NatsServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
