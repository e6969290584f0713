"""What separates the KV of two engines, and what does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from shared.engine.api import EngineConfig  # noqa: E402
from shared.engine.load import load_engine  # noqa: E402
from shared.protocol.model import ModelSpec  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def spec(folder: Path, **config: Any) -> ModelSpec:
    settings: dict[str, Any] = {"dtype": "float32", "kv_bytes": 1 << 20, "threads": 1, **config}
    engine = load_engine(EngineConfig(str(folder), **settings), lambda what, fraction: None)
    engine.close()
    engine.close()
    return engine.spec


def changed(folder: Path, target: Path, **entries: Any) -> Path:
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **entries}))
    return target


def test_dtype_block_size_salt_rope_and_weights_separate_namespaces(folder: Path, tmp_path: Path) -> None:
    rope = changed(folder, tmp_path / "rope", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    other_weights = save_tiny(tmp_path / "weights", initializer_range=0.31)
    specs = [
        spec(folder),
        spec(folder, dtype="bfloat16"),
        spec(folder, block_tokens=32),
        spec(folder, salt="tenant"),
        spec(rope),
        spec(other_weights),
    ]
    assert len({s.namespace for s in specs}) == len(specs)


def test_a_process_with_another_hash_seed_names_the_same_namespace(folder: Path) -> None:
    code = (
        "import sys; from shared.engine.api import EngineConfig; from shared.engine.load import load_engine\n"
        "config = EngineConfig(sys.argv[1], 'float32', kv_bytes=1 << 20, threads=1)\n"
        "print(load_engine(config, lambda what, fraction: None).spec.namespace.hex())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        check=True,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert told.stdout.split()[-1] == spec(folder).namespace.hex()


def test_backend_memory_place_and_stop_tokens_do_not(folder: Path, tmp_path: Path) -> None:
    elsewhere = changed(folder, tmp_path / "elsewhere", eos_token_id=[5, 6], transformers_version="0")
    first, second = spec(folder), spec(elsewhere, backend="reference", kv_bytes=2 << 20)
    assert first.namespace == second.namespace
    assert (first.eos_token_ids, second.eos_token_ids) == ((257,), (5, 6, 257))


def test_the_spec_tells_what_the_configuration_says(folder: Path) -> None:
    told = spec(folder)
    assert (told.name, told.path) == (folder.name, str(folder))
    assert (told.vocab_size, told.context_tokens) == (320, 4096)
    layout = told.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype_bytes) == (3, 2, 16, 4)
