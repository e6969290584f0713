"""The simulator decides nothing. It may import the machines and their vocabulary, but no other code that decides."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "tsukimi" / "simulate"
FILES = sorted(PACKAGE.glob("*.py"))

MACHINES = {
    "shared.core.conductor.machine": {"ConductorMachine"},
    "shared.core.worker.prefill": {"PrefillMachine"},
    "shared.core.worker.decode": {"DecodeMachine"},
    "shared.core.cache.machine": {"CacheMachine"},
    "shared.core.request.machine": {"RequestMachine"},
}
VOCABULARY = {
    "shared.core.machine", "shared.core.worker.steps", "shared.core.worker.transfers", "shared.core.worker.events",
    "shared.core.conductor.events", "shared.core.cache.events", "shared.core.request.events",
}  # fmt: skip
SETTINGS = {
    "shared.core.cache.config", "shared.core.conductor.objectives", "shared.core.costs.links",
    "shared.core.worker.config", "shared.core.conductor.placement_policies", "shared.core.conductor.decode_policies",
}  # fmt: skip
PHYSICS = {
    "shared.core.costs.model", "shared.core.costs.presets", "shared.core.kv.block_keys", "shared.core.kv.block_events",
}  # fmt: skip
"""How long things take, and how blocks are named and reported."""
OUTSIDE = {"msgspec", "rich", "typer"}


def imports(path: Path) -> list[tuple[str, set[str]]]:
    found: list[tuple[str, set[str]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {alias.name for alias in node.names}
            if (REPOSITORY / module.replace(".", "/")).is_dir():
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
            allowed_ones = (
                "shared.protocol",
                "shared.io.plugins.policies",
                "tsukimi.simulate",
                "tsukimi.compiled.load",
            )
            assert module.startswith(allowed_ones), f"{path.name} imports {module}"


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 8
    used = {module for path in FILES for module, _ in imports(path)}
    assert set(MACHINES) <= used
