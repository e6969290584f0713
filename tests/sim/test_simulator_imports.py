"""The simulator decides nothing: it may import machines and their vocabulary, and nothing that decides by itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tsukimi" / "simulate"
FILES = sorted(PACKAGE.glob("*.py"))

MACHINES = {
    "shared.core.conductor": {"ConductorMachine"},
    "shared.core.prefill": {"PrefillMachine"},
    "shared.core.decode": {"DecodeMachine"},
    "shared.core.cache": {"CacheMachine"},
    "shared.core.lifecycle": {"RequestMachine"},
}
VOCABULARY = {
    "shared.core.machine", "shared.core.steps", "shared.core.transfers", "shared.core.worker",
    "shared.core.conductor_events", "shared.core.cache_events", "shared.core.request_events",
}  # fmt: skip
SETTINGS = {"shared.core.objectives", "shared.core.links", "shared.core.worker_config", "shared.core.cache_config"}
PHYSICS = {"shared.core.cost", "shared.core.cost_presets", "shared.core.blocks", "shared.core.block_parts"}
"""How long things take, and how blocks are named and told of."""
OUTSIDE = {"msgspec", "rich", "typer"}


def imports(path: Path) -> list[tuple[str, set[str]]]:
    found: list[tuple[str, set[str]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {alias.name for alias in node.names}
            if module in ("shared.core", "shared.protocol"):
                found += [(f"{module}.{name}", set()) for name in names]
            else:
                found.append((module, names))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_simulator_has_no_scheduling_code_of_its_own(path: Path) -> None:
    for module, names in imports(path):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or top in OUTSIDE:
            assert top not in {"random", "asyncio", "threading", "socket"}, f"{path.name} imports {module}"
        elif module.startswith("shared.core"):
            allowed = MACHINES.get(module)
            if allowed is not None:
                assert names <= allowed, f"{path.name} takes {names - allowed} from {module}"
            else:
                assert module in VOCABULARY | SETTINGS | PHYSICS, f"{path.name} imports {module}"
        else:
            allowed_ones = ("shared.protocol", "tsukimi.simulate", "tsukimi.compiled.load")
            assert module.startswith(allowed_ones), f"{path.name} imports {module}"


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 8
    used = {module for path in FILES for module, _ in imports(path)}
    assert set(MACHINES) <= used
