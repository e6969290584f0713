from __future__ import annotations

import os

import pytest

from tsukimi.errors import ToolError
from tsukimi.local.plan import (
    ClusterOptions,
    Setting,
    parse_bytes,
    parse_module,
    parse_setting,
    plan,
    threads_each,
)
from tsukimi.local.supervision_events import ServiceSpec


def specs(options: ClusterOptions) -> dict[str, ServiceSpec]:
    return {s.name: s for s in plan(options, 14222, "/bin/nats-server")}


def flags(spec: ServiceSpec) -> dict[str, str]:
    words = iter(spec.argv[3:])
    return {flag.removeprefix("--"): next(words) for flag in words}


def test_one_of_each_by_default() -> None:
    assert list(specs(ClusterOptions())) == [
        "nats",
        "conductor-0",
        "cache-0",
        "prefill-0",
        "decode-0",
        "gateway-0",
    ]


def test_every_service_is_told_its_name_the_bus_and_its_parent() -> None:
    for name, spec in specs(ClusterOptions(prefill=2)).items():
        if name != "nats":
            told = flags(spec)
            assert told["node"] == name
            assert told["nats_url"] == "nats://127.0.0.1:14222"
            assert told["parent_pid"] == str(os.getpid())
            assert spec.needs == ("nats",)


def test_the_gateway_stops_first_and_nats_last() -> None:
    waves = {name: spec.stop_wave for name, spec in specs(ClusterOptions()).items()}
    assert waves.pop("gateway-0") == 0
    assert waves.pop("nats") == 2
    assert set(waves.values()) == {1}


def test_nats_keeps_to_loopback_and_to_memory() -> None:
    argv = specs(ClusterOptions())["nats"].argv
    assert argv == ("/bin/nats-server", "--addr", "127.0.0.1", "--port", "14222")


def test_options_reach_the_roles_they_are_for() -> None:
    options = ClusterOptions(
        model="toy", dtype="float32", port=8123, threads=3, kv_bytes=5, pool_bytes=6, policy="random",
        settings=(Setting("decode", "max_running", "4"),), modules={"decode": "mine.decode"},
    )  # fmt: skip
    cluster = specs(options)
    decode = flags(cluster["decode-0"])
    assert (decode["model"], decode["dtype"], decode["threads"], decode["kv_bytes"]) == (
        "toy",
        "float32",
        "3",
        "5",
    )
    assert decode["max_running"] == "4"
    assert "max_running" not in flags(cluster["prefill-0"])
    assert cluster["decode-0"].argv[1:3] == ("-m", "mine.decode")
    assert flags(cluster["gateway-0"])["port"] == "8123"
    assert flags(cluster["cache-0"])["pool_bytes"] == "6"
    assert flags(cluster["conductor-0"])["policy"] == "random"


def test_stages_are_the_prefill_nodes_and_share_the_cores() -> None:
    cluster = specs(ClusterOptions(prefill_stages=3))
    assert flags(cluster["prefill-0"])["stages"] == "3"
    assert "stages" not in flags(cluster["decode-0"])
    assert "stages" not in flags(specs(ClusterOptions())["prefill-0"])
    assert threads_each(ClusterOptions(prefill=2, prefill_stages=3, decode=2), 16) == 2


def test_the_launcher_waits_longer_than_a_service_may_drain() -> None:
    options = ClusterOptions(
        settings=(Setting("decode", "grace_s", "30"), Setting("prefill", "grace_s", "soon"))
    )
    cluster = specs(options)
    assert cluster["decode-0"].grace_s > 30
    assert cluster["prefill-0"].grace_s > 10


@pytest.mark.parametrize(
    ("prefill", "decode", "cores", "expected"), [(1, 1, 2, 1), (1, 1, 8, 4), (4, 4, 2, 1)]
)
def test_cores_are_shared_out(prefill: int, decode: int, cores: int, expected: int) -> None:
    assert threads_each(ClusterOptions(prefill=prefill, decode=decode), cores) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1G", 1 << 30), ("512MiB", 512 << 20), ("1.5g", 3 << 29), ("4096", 4096), ("2 TB", 2 << 40)],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1G", "0", "1X"])
def test_a_bad_amount_of_memory_is_named(text: str) -> None:
    with pytest.raises(ToolError, match="amount of memory"):
        parse_bytes(text)


def test_settings_and_modules_are_parsed() -> None:
    assert parse_setting("gateway.keep_alive_s=1=2") == Setting("gateway", "keep_alive_s", "1=2")
    assert parse_module("prefill=my.own.prefill") == ("prefill", "my.own.prefill")


@pytest.mark.parametrize("text", ["gateway", "gateway.port", "router.port=1", "=", ".x=1"])
def test_a_bad_setting_is_named(text: str) -> None:
    with pytest.raises(ToolError, match=r"ROLE\.FIELD=VALUE"):
        parse_setting(text)


@pytest.mark.parametrize("text", ["prefill", "router=x", "prefill="])
def test_a_bad_module_is_named(text: str) -> None:
    with pytest.raises(ToolError, match="ROLE=MODULE"):
        parse_module(text)
