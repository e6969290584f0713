from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.processes.launched import free_port
from tsukimi.errors import ToolError
from tsukimi.local.launcher import Addresses
from tsukimi.local.plan import ClusterOptions
from tsukimi.local.rundir import RunDir
from tsukimi.local.up import available_bytes, fetch_model, preflight, summary

ADDRESSES = Addresses(nats_port=14222, http_host="127.0.0.1", http_port=8123)


def test_the_summary_has_a_curl_line_that_a_shell_takes() -> None:
    lines = summary(ClusterOptions(), "smollm2-135m", RunDir(Path("/tmp/it")), ADDRESSES)
    start = next(i for i, line in enumerate(lines) if "curl" in line)
    words = shlex.split("\n".join(lines[start : start + 2]))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8123/v1/chat/completions"]
    assert '"model": "smollm2-135m"' in words[-1]
    assert any("chat --run-dir /tmp/it" in line for line in lines)


def test_the_default_folder_needs_no_option() -> None:
    lines = summary(ClusterOptions(), "toy", RunDir(Path(".run")), ADDRESSES)
    assert not any("--run-dir" in line for line in lines)


def test_too_little_memory_is_said_before_anything_starts() -> None:
    available = available_bytes()
    assert available is not None
    with pytest.raises(ToolError, match="memory are free"):
        preflight(ClusterOptions(port=free_port(), kv_bytes=available))


def test_a_model_that_is_nowhere_is_named() -> None:
    with pytest.raises(ToolError, match="no-such-model"):
        fetch_model("no-such-model")


def test_the_toy_needs_no_fetching() -> None:
    assert fetch_model("toy:step_ms=5") == "toy"
