from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tsukimi.compiled import sources


def compiles(text: str) -> bool:
    return sources._compiles(ast.parse(text))


def test_functions_are_compiled_and_messages_and_mere_data_are_not() -> None:
    assert compiles("def f(): pass")
    assert compiles("class A:\n    def f(self): pass")
    assert not compiles("X = 1")
    assert not compiles("class A(Struct):\n    def f(self): pass")
    assert not compiles("class A(Event, frozen=True):\n    x: int\ndef f(): pass")
    assert not compiles("class A(B, frozen=True):\n    def f(self): pass")


def test_every_machine_and_the_simulator_around_them_are_compiled() -> None:
    compiled = {path.as_posix() for path in sources.to_compile()}
    machines = ("conductor/machine", "worker/prefill", "worker/decode", "cache/machine", "request/machine")
    parts = (
        "kv/pool", "kv/block_tree", "conductor/scheduler", "conductor/policy_view", "conductor/block_index",
        "worker/sequence", "worker/computing/inflight_step", "worker/machine",
    )  # fmt: skip
    assert {f"shared/core/{name}.py" for name in (*machines, *parts)} <= compiled
    assert {f"tsukimi/simulate/{name}.py" for name in ("cluster", "worker", "timeline", "engine")} <= compiled


def test_a_build_is_of_the_very_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in sources.DEPENDS_ON:
        (tmp_path / package).mkdir(parents=True)
    a, b = tmp_path / "shared/core/a.py", tmp_path / "shared/protocol/b.py"
    a.write_text("A = 1"), b.write_text("B = 1")
    monkeypatch.setattr(sources, "ROOT", tmp_path)

    def folder() -> Path:
        sources.folder.cache_clear()
        return sources.folder()

    try:
        first = folder()
        assert folder() == first
        for path in (a, b):
            path.write_text("A = 2")
            assert folder() != first
            first = folder()
        a.rename(a.with_name("c.py"))
        assert folder() != first
    finally:
        sources.folder.cache_clear()
