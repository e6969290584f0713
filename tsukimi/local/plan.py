"""Turns what a person asks for into the processes to start."""

from __future__ import annotations

import os
import re
import sys

from msgspec import Struct

from shared.io.models import DEFAULT_MODEL
from shared.protocol.ids import Role
from tsukimi.errors import ToolError
from tsukimi.local import nats
from tsukimi.local.supervision_events import ServiceSpec

MODULES: dict[Role, str] = {
    "gateway": "services.gateway",
    "conductor": "services.conductor",
    "prefill": "services.prefill",
    "decode": "services.decode",
    "cache": "services.cache_node",
}
NATS = "nats"
GATEWAY = "gateway-0"
GRACE_S = 10.0
"""Seconds that a service gets to drain."""
KILL_AFTER_S = 5.0
"""Seconds that the launcher waits beyond that before it kills."""
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Setting(Struct, frozen=True):
    """One field of one role's configuration, e.g. `--set decode.max_running=4`."""

    role: Role
    field: str
    value: str


class ClusterOptions(Struct, frozen=True, kw_only=True):
    prefill: int = 1
    prefill_stages: int = 1
    """Processes of each prefill node."""
    decode: int = 1
    cache: int = 1
    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    port: int = 8000
    threads: int = 0
    """Threads of each decode node and of each stage of a prefill node; 0: the cores, divided among them."""
    kv_bytes: int = 1 << 30
    pool_bytes: int = 1 << 30
    policy: str = ""
    settings: tuple[Setting, ...] = ()
    modules: dict[Role, str] = {}
    """Replacements of MODULES: another implementation of a role."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cluster takes for KV, at least."""
        return (self.prefill + self.decode) * self.kv_bytes + self.cache * self.pool_bytes


def parse_bytes(text: str) -> int:
    """`512M`, `2GiB`, `1.5g` or plain bytes. Raises ToolError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ToolError(f"{text!r} is not an amount of memory; write it like 512M or 2G.", exit_code=2)
    return int(float(match[1]) * UNITS[match[2]])


def parse_setting(text: str) -> Setting:
    """`role.field=value`. Raises ToolError."""
    match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", text)
    if match is None or match[1] not in MODULES:
        raise ToolError(
            f"--set {text!r}: write ROLE.FIELD=VALUE with a role of {', '.join(MODULES)}.", exit_code=2
        )
    return Setting(role=match[1], field=match[2], value=match[3])


def parse_module(text: str) -> tuple[Role, str]:
    """`role=package.module`. Raises ToolError."""
    role, _, module = text.partition("=")
    if role not in MODULES or not module:
        raise ToolError(
            f"--use {text!r}: write ROLE=MODULE with a role of {', '.join(MODULES)}.", exit_code=2
        )
    return role, module


def threads_each(options: ClusterOptions, cores: int) -> int:
    computing = options.prefill * options.prefill_stages + options.decode
    return options.threads or max(1, cores // max(1, computing))


def plan(options: ClusterOptions, nats_port: int, nats_binary: str) -> tuple[ServiceSpec, ...]:
    """All processes. nats-server starts first and stops last. The gateway stops first, so that its streams can end."""
    compute = {
        "model": options.model, "dtype": options.dtype, "kv_bytes": str(options.kv_bytes),
        "threads": str(threads_each(options, os.cpu_count() or 1)),
    }  # fmt: skip
    staged = {"stages": str(options.prefill_stages)} if options.prefill_stages > 1 else {}
    conductor = {"policy": options.policy} if options.policy else {}
    nodes: list[tuple[Role, int, dict[str, str]]] = [
        ("conductor", 1, conductor),
        ("cache", options.cache, {"pool_bytes": str(options.pool_bytes)}),
        ("prefill", options.prefill, compute | staged),
        ("decode", options.decode, compute),
        ("gateway", 1, {"port": str(options.port), "model": options.model}),
    ]
    url = f"nats://{nats.HOST}:{nats_port}"
    server = ServiceSpec(name=NATS, argv=nats.arguments(nats_binary, nats_port), stop_wave=2, grace_s=5.0)
    services = [
        _service(options, role, f"{role}-{i}", {"nats_url": url, **fields})
        for role, count, fields in nodes
        for i in range(count)
    ]
    return (server, *services)


def _service(options: ClusterOptions, role: Role, name: str, fields: dict[str, str]) -> ServiceSpec:
    fields = {"node": name, "parent_pid": str(os.getpid()), "grace_s": str(GRACE_S), **fields}
    fields |= {s.field: s.value for s in options.settings if s.role == role}
    flags = [word for field, value in fields.items() for word in (f"--{field}", value)]
    return ServiceSpec(
        name=name,
        argv=(sys.executable, "-m", options.modules.get(role, MODULES[role]), *flags),
        needs=(NATS,),
        stop_wave=0 if role == "gateway" else 1,
        grace_s=_grace_s(fields),
    )


def _grace_s(fields: dict[str, str]) -> float:
    try:
        return float(fields["grace_s"]) + KILL_AFTER_S
    except ValueError:  # the service will say what is wrong with it
        return GRACE_S + KILL_AFTER_S
