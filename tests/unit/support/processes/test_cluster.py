"""The test cluster itself, with the smallest service in the place of cache nodes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.protocol.ids import Role
from tests.support.processes.cluster import Cluster, cluster
from tests.support.processes.echo_service import SUBJECT, Echo


@contextlib.contextmanager
def echoes(folder: Path, count: int = 2) -> Iterator[Cluster]:
    modules: dict[Role, str] = {"cache": "tests.support.processes.echo_service"}
    with cluster(folder, gateway=0, conductor=0, prefill=0, decode=0, cache=count, modules=modules) as c:
        yield c


def test_it_starts_kills_restarts_and_leaves_nothing(tmp_path: Path) -> None:
    with echoes(tmp_path) as c:
        pids = {c.pid(node) for node in (*c.nodes("cache"), "nats")}
        assert c.observer.request(SUBJECT, Echo("hello"), Echo) == Echo("hello")
        first = c.infos["cache-0"].ref.incarnation
        c.kill("cache-0")
        assert not c.running("cache-0")
        c.start("cache-0")
        c.wait_ready()
        assert c.infos["cache-0"].ref.incarnation != first
        assert c.term("cache-1") == 0
        c.wait_for(lambda: "cache-1" not in c.infos, 10.0, "cache-1 said that it left")
        c.restart("nats")
        c.start("cache-1")
        c.wait_ready()
        c.wait_idle()
        pids |= {c.pid(node) for node in (*c.nodes("cache"), "nats")}
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_service_that_ends_wrong_is_told_with_its_log(tmp_path: Path) -> None:
    def spoil(c: Cluster) -> None:
        c.observer.publish(SUBJECT, Echo("long", after_s=60.0))
        c.wait_for(lambda: c.loads["cache-0"].running == 1, 10.0, "it runs")
        c.send_signal("cache-0", signal.SIGTERM)
        c.wait_for(lambda: c.infos["cache-0"].stage == "draining", 10.0, "it drains")

    with pytest.raises(AssertionError, match="second_signal"), echoes(tmp_path, 1) as c:
        spoil(c)
