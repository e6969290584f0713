"""The documents' commands on a cluster, typed as they stand: `tsukimi up` gets a free port and the toy engine besides."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.claims import CLUSTERS, claimed
from tests.support.documented import write_python
from tests.support.processes.spawn import wait_until
from tests.support.typed import Terminal
from tests.support.worlds.traces import dialogues

pytestmark = pytest.mark.slow

EXPERIMENTS = "docs/experiments.md"
BRIEF = {
    "tsukimi bench serve": " --requests 6 --input-tokens 64 --output-tokens 4",
    "tsukimi bench prefix": " --tokens 200 --rounds 1",
    "tsukimi bench trace TRACE": " --requests 6 --speed 50 --max-output 4",
}
"""What makes a benchmark short."""


def commands(test: str) -> list[str]:
    return claimed(f"{CLUSTERS}::{test}")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """In a folder with what docs/experiments.md lets people write. Whatever it started ends with the test."""
    write_python(EXPERIMENTS, tmp_path)
    terminal = Terminal(tmp_path)
    try:
        yield terminal
    finally:
        terminal.down()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("documented"))
    try:
        terminal.up("tsukimi up --prefill 2 --decode 2")
        yield terminal
    finally:
        terminal.down()


def chat(terminal: Terminal) -> str:
    return terminal.type("tsukimi chat --max-tokens 8", answer="Good evening\n/quit\n")


def asked(terminal: Terminal) -> str:
    """An answer that went by a prefill node, however short the prompt."""
    return terminal.type("tsukimi bench serve" + BRIEF["tsukimi bench serve"])


@pytest.mark.parametrize("text", [c for c in commands("test_a_cluster_answers") if c != "tsukimi down"])
def test_a_cluster_answers(terminal: Terminal, text: str) -> None:
    """Started as documented, it has the nodes that were asked for, answers, and stops."""
    terminal.up(text)
    status = terminal.type("tsukimi status")
    for role, count in re.findall(r"--(prefill|decode) (\d)", text):
        assert f"{role}-{int(count) - 1}" in status
        assert f"{role}-{count}" not in status
    for role, field in re.findall(r"--set (\w+)\.(\S+)", text):
        name, value = field.split("=")
        assert re.search(rf'"?{name}"?[=:] ?{value}\b', terminal.type(f"tsukimi logs {role}-0 --lines 1000"))
    assert "first token after" in chat(terminal)
    (down,) = (c for c in commands("test_a_cluster_answers") if "down" in c)
    terminal.type(down)
    assert terminal.run("tsukimi status").returncode == 1


@pytest.mark.parametrize("text", commands("test_a_command_on_a_cluster"))
def test_a_command_on_a_cluster(cluster: Terminal, text: str) -> None:
    if text.endswith("TRACE"):
        (cluster.folder / "TRACE").write_bytes(b"\n".join(dialogues(6)))
    said = chat(cluster) if text == "tsukimi chat" else cluster.type(text + BRIEF.get(text, ""))
    expected = {
        "tsukimi status": "decode-1",
        "tsukimi chat": "first token after",
        "tsukimi bench serve": "6 of 6 requests completed",
        "tsukimi bench prefix": "cold",
        "tsukimi bench trace TRACE": "6 completed",
        "tsukimi logs decode-0": "ready",
    }
    assert expected[text] in said


@pytest.mark.parametrize("text", commands("test_the_policy_serves"))
def test_the_policy_serves(terminal: Terminal, text: str) -> None:
    """Its reason is in a placement of the live conductor."""
    terminal.up(text, f"--set conductor.inline_tokens=0 --set conductor.record={terminal.folder}/FILE")
    assert "6 of 6 requests completed" in asked(terminal)
    terminal.type("tsukimi down")
    assert b"s queued" in (terminal.folder / "FILE").read_bytes()


def test_what_was_recorded_is_replayed(terminal: Terminal) -> None:
    """docs/experiments.md records a conductor in /tmp; here it is in this test's folder."""
    up, replay = (
        text.replace("/tmp/", f"{terminal.folder}/")
        for text in commands("test_what_was_recorded_is_replayed")
    )
    terminal.up(up)
    asked(terminal)
    terminal.type("tsukimi down")
    assert terminal.type(replay).endswith("identical\n")


def test_the_service_serves(terminal: Terminal) -> None:
    up, metrics, module = commands("test_the_service_serves")
    assert module == "python -m MODULE"
    terminal.up(up, "--set conductor.inline_tokens=0")
    asked(terminal)
    wait_until(lambda: terminal.run(metrics).returncode == 0, 10, "the counter is in a heartbeat")
    assert "tsukimi_node_other_total" in terminal.type(metrics)
    explained = terminal.type(module.replace("MODULE", "myprefill") + " --help")
    assert "Configuration of the prefill service" in explained


@pytest.mark.parametrize("text", commands("test_a_service_in_a_package"))
def test_a_service_in_a_package(terminal: Terminal, text: str) -> None:
    (terminal.folder / "mypackage").mkdir()
    (terminal.folder / "mypackage" / "__init__.py").touch()
    shutil.copy(terminal.folder / "myprefill" / "__main__.py", terminal.folder / "mypackage" / "myprefill.py")
    terminal.up(text, "--set conductor.inline_tokens=0")
    assert "6 of 6 requests completed" in asked(terminal)
    assert "my_ticks" in terminal.type("tsukimi status --json")
