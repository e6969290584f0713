"""Every command in the documents is run by a test, and every option exists."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from services.cache_node.config import CacheNodeConfig
from services.conductor.config import Config as ConductorNodeConfig
from services.decode.config import Config as DecodeConfig
from services.gateway.config import GatewayConfig
from services.prefill.config import Config as PrefillConfig
from shared.core.conductor.events import ConductorConfig
from tests.support.claims import CLAIMS, QUICK, Claim, claimed
from tests.support.documented import (
    COMMAND,
    Command,
    Option,
    blocks,
    commands,
    documents,
    options,
    spans,
    write_python,
)
from tests.support.imports import REPOSITORY, tree
from tests.support.typed import Terminal
from tests.support.worlds.traces import dialogues
from tests.unit.tsukimi.test_replay import record
from tsukimi.cli import app
from tsukimi.simulate.trace import parse_trace

CONFIGURATIONS: dict[str, Any] = {
    "gateway": GatewayConfig, "conductor": ConductorNodeConfig, "prefill": PrefillConfig, "decode": DecodeConfig,
    "cache_node": CacheNodeConfig,
}  # fmt: skip


# -- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_command_has_one_runner(command: Command) -> None:
    assert len([claim for claim in CLAIMS if claim.covers(command)]) == 1


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_a_claim_is_about_something(claim: Claim) -> None:
    """Its commands are in the documents and its runner exists."""
    assert any(claim.covers(command) for command in commands())
    file, _, name = claim.runner.partition("::")
    if file.endswith(".py"):
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in ast.walk(tree(Path(file))) if isinstance(node, functions)}
    else:
        assert name in (REPOSITORY / file).read_text()


def test_a_command_that_nobody_runs_is_found() -> None:
    assert COMMAND.match("tsukimi sing --loud")
    assert not any(claim.covers(Command("README.md", "tsukimi sing --loud")) for claim in CLAIMS)
    assert not any(claim.covers(Command("README.md", "make tea")) for claim in CLAIMS)


# -- the command line ------------------------------------------------------------------------------------------------


def subcommand(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and its arguments."""
    found: Any = typer.main.get_command(app)
    while words and words[0] in subcommands(found):
        found, words = subcommands(found)[words[0]], words[1:]
    return found, words


def subcommands(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def toolbox_words(text: str) -> list[str]:
    """Arguments of a `tsukimi` command, empty for other commands."""
    words = shlex.split(text)
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words[1:] if words and words[0] == "tsukimi" else []


def flags_of(command: Any) -> set[str]:
    named = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    if command.name == "engine":
        from shared.engine.bench.__main__ import main

        bench = typer.Typer()
        bench.command()(main)
        named |= flags_of(typer.main.get_command(bench))
    return named | {"--help"}


def fields_of(service: str) -> set[str]:
    names = msgspec.structs.fields(CONFIGURATIONS[service])
    return {f"--{field.name.replace('_', '-')}" for field in names} | {"--help"}


@pytest.mark.parametrize("text", [c for c in dict.fromkeys(c.text for c in commands()) if toolbox_words(c)])
def test_a_command_line_can_be_parsed(text: str) -> None:
    command, arguments = subcommand(toolbox_words(text))
    assert not subcommands(command)
    if command.name == "simulate" and not arguments:
        arguments = ["TRACE"]  # the command is named, not called
    if "--help" not in arguments:
        command.make_context(command.name, arguments)


@pytest.mark.parametrize("option", options(), ids=lambda option: f"{option.file}: {option.text}")
def test_an_option_exists(option: Option) -> None:
    """An option named by itself belongs to a command of its sentence or row, or else to the page's service."""
    if option.text.startswith("--scale"):
        compose = (REPOSITORY / "tests" / "compose" / "test_compose.py").read_text()
        assert all(f'"{word}"' in compose for word in option.text.split())
        return
    known: set[str] = set()
    for text in (span for span in spans(option.line) if COMMAND.match(span)):
        words = toolbox_words(text)
        known |= flags_of(subcommand(words)[0]) if words else set()
        service = re.search(r"-m services\.(\w+)", text)
        known |= fields_of(service[1]) if service else set()
    if page := re.match(r"services/(\w+)/", option.file):
        known |= fields_of(page[1])
    given = {word for word in option.text.split() if word.startswith("--")}
    known = known or {flag for name in ("up", "simulate") for flag in flags_of(subcommand([name])[0])}
    if "--record" in given:  # a field of every service
        known |= set.intersection(*(fields_of(name) for name in CONFIGURATIONS))
    assert given <= known


def test_every_subcommand_is_in_the_readme_and_has_help() -> None:
    group = subcommands(typer.main.get_command(app))
    assert group
    named = {tuple(toolbox_words(c.text)) for c in commands() if c.file == "README.md"}
    for name, command in group.items():
        for words in [(name, sub) for sub in subcommands(command)] or [(name,)]:
            assert any(told[: len(words)] == words for told in named), words
            assert subcommand(list(words))[0].help


# -- what runs at once -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    """In a folder with a trace, a recording, and the policy of docs/experiments.md."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "TRACE").write_bytes(b"\n".join(dialogues(40)))
    record(folder / "FILE", ConductorConfig())
    assert write_python("docs/experiments.md", folder) == ["mypolicies/bounded.py", "myprefill/__main__.py"]
    return Terminal(folder)


def test_the_toolbox_explains_itself(terminal: Terminal) -> None:
    said = terminal.type("tsukimi --help")
    assert all(name in said for name in ("up", "down", "status", "chat", "bench", "simulate", "replay"))


@pytest.mark.parametrize("text", claimed(f"{QUICK}::test_a_trace_is_simulated"))
def test_a_trace_is_simulated(terminal: Terminal, text: str) -> None:
    if text == "tsukimi simulate":
        text += " TRACE"
    said = terminal.type(text)
    assert "--policy" in said if "--help" in text else "TTFT" in said
    if "--json out.json" in text:
        assert msgspec.json.decode((terminal.folder / "out.json").read_bytes())


@pytest.mark.parametrize("text", claimed(f"{QUICK}::test_the_papers_are_reproduced"))
def test_the_papers_are_reproduced(terminal: Terminal, text: str) -> None:
    if text == "tsukimi reproduce":
        text += " table1 --trace TRACE"
    said = terminal.type(f"{text} --quick --json out.json --pictures .", timeout_s=300)
    assert "off by" in said
    assert msgspec.json.decode((terminal.folder / "out.json").read_bytes())


@pytest.mark.parametrize("text", claimed(f"{QUICK}::test_a_recording_is_replayed"))
def test_a_recording_is_replayed(terminal: Terminal, text: str) -> None:
    assert terminal.type(text).endswith("identical\n")


@pytest.mark.parametrize("text", claimed(f"{QUICK}::test_a_service_explains_itself"))
def test_a_service_explains_itself(terminal: Terminal, text: str) -> None:
    said = terminal.type(text.removesuffix(" --help") + " --help")
    assert "Configuration of the" in said
    assert all(word in said for word in text.split() if word.startswith("--") and word != "--help")


@pytest.mark.parametrize("text", claimed(f"{QUICK}::test_pytest_finds_tests"))
def test_pytest_finds_tests(text: str) -> None:
    words = text.removeprefix(".venv/bin/python").split()
    done = subprocess.run(
        [sys.executable, *words, "--collect-only"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("text", claimed(f"{QUICK}::test_a_script_is_a_program"))
def test_a_script_is_a_program(text: str) -> None:
    assert os.access(REPOSITORY / text, os.X_OK)
    subprocess.run(["bash", "-n", text], cwd=REPOSITORY, check=True)


@pytest.mark.parametrize("text", claimed(f"{QUICK}::test_pip_hears_of_the_index"))
def test_pip_hears_of_the_index(terminal: Terminal, text: str) -> None:
    said = terminal.type(f"{text.replace('...', 'http://127.0.0.1/wheels')}; python -m pip config list")
    assert "http://127.0.0.1/wheels" in said


def test_the_line_of_a_trace_is_one() -> None:
    (block,) = (block for block in blocks("docs/experiments.md") if block.language == "json")
    (request,) = parse_trace([block.text.encode()])
    assert request.prompt_tokens == 1355


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    kinds = {block.language for page in documents() for block in blocks(page)}
    assert kinds <= {"sh", "bash", "python", "json", "mermaid", ""}
    assert {page for page in documents() if any(b.language in ("python", "json") for b in blocks(page))} == {
        "docs/experiments.md"
    }
