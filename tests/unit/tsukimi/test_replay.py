from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.core.conductor.events import (
    BlocksChanged,
    ConductorConfig,
    LoadReported,
    NodeAnnounced,
    PlaceAsked,
)
from shared.core.conductor.machine import ConductorMachine
from shared.core.machine import BusFound, BusLost, Ticked
from shared.io.driver import Driver
from shared.io.recorder import Recorder
from shared.protocol.cluster import BlockEvents, NodeInfo, NodeLoad
from shared.protocol.requests import PlaceRequest
from tests.support.worlds.cluster_of import COST, SPEC, keys, ref
from tests.support.worlds.virtual_time import run
from tsukimi.errors import ToolError
from tsukimi.replay import replay


def record(path: Path, config: ConductorConfig) -> None:
    """A live run: a conductor behind a driver, hearing of a cluster and placing requests."""

    async def main() -> None:
        recorder = Recorder(path)
        async with asyncio.TaskGroup() as tasks:
            clock = asyncio.get_running_loop().time
            driver: Driver[Any] = Driver(
                ConductorMachine(config), lambda command: None, tasks=tasks, recorder=recorder, clock=clock
            )
            for node, role in (("p-0", "prefill"), ("p-1", "prefill"), ("d-0", "decode"), ("c-0", "cache")):
                info = NodeInfo(ref=ref(node), role=role, stage="ready", model=SPEC, kv_blocks=999, cost=COST)  # type: ignore[arg-type]
                driver.feed(NodeAnnounced(info))
            for i in range(50):
                await asyncio.sleep(0.03)
                driver.feed(
                    BlocksChanged(
                        BlockEvents("c-0", "1", i + 1, stored=keys(i), removed=keys(i - 9) if i > 8 else ())
                    )
                )
                driver.feed(
                    PlaceAsked(PlaceRequest(f"r{i}/0/0", "toy", 200, keys(*range(12)), 50, 9.0), ask=i)
                )
                if i % 7 == 0:
                    load = NodeLoad("d-0", "1", "decode", seq=i + 1, stage="ready", attempts=(f"r{i}/0/0",))
                    driver.feed(LoadReported(load))
                    driver.feed(Ticked())
                if i == 20:
                    driver.feed(BusLost())
                    driver.feed(BusFound())
        recorder.close()

    run(main())


@pytest.mark.parametrize("policy", ["kvcache_centric", "random"])
def test_a_recorded_live_run_replays_to_identical_commands(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "conductor.log"
    record(path, ConductorConfig(policy=policy, seed=3))
    result = replay(path)
    assert result.difference is None
    assert result.machine == "ConductorMachine"
    assert result.events == 4 + 50 * 2 + 8 * 2 + 2
    assert result.commands > 50


def test_a_restart_in_the_same_file_begins_with_a_new_machine(tmp_path: Path) -> None:
    path = tmp_path / "conductor.log"
    record(path, ConductorConfig())
    record(path, ConductorConfig(policy="load_balance"))
    result = replay(path)
    assert (result.difference, result.restarts) == (None, 1)


def test_another_decision_is_found(tmp_path: Path) -> None:
    path, forged = tmp_path / "conductor.log", tmp_path / "forged.log"
    record(path, ConductorConfig(policy="random", seed=1))
    forged.write_bytes(path.read_bytes().replace(b"random", b"rabdom").replace(b"rabdom", b"random", 1))
    result = replay(forged)
    assert result.difference is not None
    assert result.difference.recorded != result.difference.replayed


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.log"
    for content in (b"", b"hello, this is text\n" * 40):
        path.write_bytes(content)
        with pytest.raises(ToolError, match="not the recording"):
            replay(path)
    with pytest.raises(ToolError, match="No such file"):
        replay(tmp_path / "missing.log")
