"""Which module may import which: the rules of the repository's layout, over the imports of any set of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Imports = Mapping[str, frozenset[str]]
"""Module name -> full names of what it imports."""

ROOMS = {
    "protocol": (),
    "core": ("protocol",),
    "io": ("protocol", "core"),
    "dataplane": ("protocol", "core"),
    "text": ("protocol", "core", "io", "dataplane"),
    "engine": ("protocol", "core", "io", "dataplane", "text"),
    "worker_node": ("protocol", "core", "io", "dataplane", "text", "engine"),
}  # fmt: skip
"""Room of shared/ -> the rooms it may import."""
TOOLBOX = ("protocol", "core", "text", "io")
ROLES = ("conductor", "worker", "cache", "request")
"""Rooms of core that stand side by side."""
CORE_BASE = ("costs", "kv", "machine")
"""What every role may import. costs and kv import no role, and each other not at all."""
GATEWAY = ("api", "generation", "fronts")
"""Rooms of the gateway. Each may import those before it."""
TORCH_ROOMS = ("shared.engine", "shared.worker_node")
IMPURE = frozenset({
    "aiofiles", "asyncio", "concurrent", "datetime", "importlib", "logging", "multiprocessing", "os", "pathlib", "random",
    "secrets", "select", "shutil", "signal", "socket", "structlog", "subprocess", "tempfile", "threading", "time", "uuid",
})  # fmt: skip
"""What a pure module imports nothing of: clocks, chance, files, threads, other programs, modules found at run time."""
PURE_BUT = {("shared.protocol.ids", "uuid")}
"""Ids are minted there, for the layers above core."""


def breaches(imports: Imports) -> Iterator[str]:
    """One sentence for each import that breaks a rule."""
    for module, names in sorted(imports.items()):
        for name in sorted(names):
            why = (
                _rooms(module, name)
                or _roles(module, name)
                or _gateway(module, name)
                or _services(module, name)
                or _toolbox(module, name)
                or _purity(module, name)
            )
            if why:
                yield f"{module} imports {name}: {why}"


def _parts(name: str) -> tuple[str, str, str]:
    """The first three parts of a dotted name, empty where there are fewer."""
    first, second, third, *_ = [*name.split("."), "", "", ""]
    return first, second, third


def _rooms(module: str, name: str) -> str:
    top, room, _ = _parts(module)
    other, other_room, _ = _parts(name)
    if top != "shared":
        return ""
    if other in ("services", "tsukimi", "tests"):
        return f"shared stands below {other}"
    if other == "shared" and other_room in ROOMS and other_room not in (room, *ROOMS.get(room, ())):
        return f"{room} may import {', '.join(ROOMS.get(room, ())) or 'nothing'} of shared"
    return ""


def _roles(module: str, name: str) -> str:
    if _parts(module)[:2] != ("shared", "core") or _parts(name)[:2] != ("shared", "core"):
        return ""
    room, other = _parts(module)[2], _parts(name)[2]
    if not other or room == other or other in ("machine", ""):
        return ""
    if room in ROLES and other in CORE_BASE:
        return ""
    return f"core's {room or 'root'} stands beside {other}"


def _gateway(module: str, name: str) -> str:
    if not module.startswith("services.gateway"):
        return ""
    if name.startswith(TORCH_ROOMS):
        return "the gateway needs no engine"
    room, other = _parts(module)[2], _parts(name)[2]
    if name.startswith("services.gateway.") and room in GATEWAY and other in GATEWAY:
        return "" if GATEWAY.index(other) <= GATEWAY.index(room) else f"{room} stands below {other}"
    return ""


def _services(module: str, name: str) -> str:
    if _parts(module)[0] != "services":
        return ""
    other, service, _ = _parts(name)
    if other in ("tsukimi", "tests"):
        return f"services stand below {other}"
    if other == "services" and service and service != _parts(module)[1]:
        return "services never import services"
    return ""


def _toolbox(module: str, name: str) -> str:
    top, room, _ = _parts(name)
    if _parts(module)[0] != "tsukimi" or top not in ("shared", "services", "tests"):
        return ""
    if top != "shared" or (room and room not in TOOLBOX):
        return f"the toolbox may import {', '.join(TOOLBOX)}, and starts services as processes"
    return ""


def _purity(module: str, name: str) -> str:
    if not module.startswith(("shared.core", "shared.protocol")) or (module, name) in PURE_BUT:
        return ""
    return "core and protocol are pure" if name.split(".")[0] in IMPURE else ""
