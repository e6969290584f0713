"""What the documents tell people to type: commands, options, Python files and links, as they stand on the pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support.imports import REPOSITORY

COMMAND = re.compile(
    r"(\w+=\S+ )*(\.venv/bin/)?(tsukimi|python|make|docker compose|pytest|curl|export|\.ci/run)(?= |$)"
)
"""How a command begins: perhaps variables, perhaps the folder of its program, then a program."""
NAMES = {"tsukimi", "python"}
"""Spans that name a program and run nothing."""
SPAN = re.compile(r"``?([^`]+)``?")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Command(NamedTuple):
    file: str
    """Relative to the repository."""
    text: str


class Option(NamedTuple):
    """An option named by itself, and the line that names it."""

    file: str
    text: str
    line: str


class Block(NamedTuple):
    file: str
    language: str
    text: str
    before: str
    """The paragraph before the block."""


def documents() -> list[str]:
    """The pages whose commands are run."""
    patterns = ("README.md", "CONTRIBUTING.md", "docs/*.md", "services/*/README.md")
    return sorted(str(f.relative_to(REPOSITORY)) for pattern in patterns for f in REPOSITORY.glob(pattern))


@cache
def blocks(file: str) -> tuple[Block, ...]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    inside: list[str] | None = None
    before: list[str] = []
    language, ended = "", False
    for line in (REPOSITORY / file).read_text().splitlines():
        if line.startswith("```") and inside is None:
            language, inside = line[3:].strip(), []
        elif line.startswith("```"):
            found.append(Block(file, language, "\n".join(inside or []) + "\n", "\n".join(before).strip()))
            inside, before = None, []
        elif inside is not None:
            inside.append(line)
        elif line.strip():
            before = [*before, line] if not ended else [line]
        if inside is None:
            ended = not line.strip()
    assert inside is None, f"{file}: a block has no end"
    return tuple(found)


@cache
def commands() -> tuple[Command, ...]:
    """Each command of each page once."""
    found = [Command(file, text) for file in documents() for text in (*_typed(file), *_inline(file))]
    return tuple(dict.fromkeys(found))


@cache
def options() -> tuple[Option, ...]:
    """Each inline span that begins with an option."""
    return tuple(
        Option(file, span, line)
        for file in documents()
        for line, spans in _paragraphs(file)
        for span in spans
        if span.startswith("--")
    )


def python_file(block: Block) -> str:
    """Where the paragraph before a block tells people to save it."""
    names = SPAN.findall(block.before)
    folder = next(name for name in reversed(names) if re.fullmatch(r"[a-z]\w*", name))
    file = next(name for name in reversed(names) if name.endswith(".py") and name != "__init__.py")
    return file if "/" in file else f"{folder}/{file}"


def write_python(file: str, folder: Path) -> list[str]:
    """Save a page's Python blocks in a folder, as it tells people to; their names."""
    names = []
    for block in blocks(file):
        if block.language == "python":
            name = python_file(block)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).parent.joinpath("__init__.py").touch()
            (folder / name).write_text(block.text)
            names.append(name)
    return names


def links(text: str) -> list[str]:
    """Targets of relative links, without their fragment."""
    found = [target.split("#")[0] for target in LINK.findall(text) if "://" not in target]
    return [target for target in found if target]


def spans(text: str) -> list[str]:
    """Inline code outside fenced blocks."""
    return SPAN.findall(_prose(text))


def _typed(file: str) -> Iterator[str]:
    """Lines of sh and bash blocks; continued ones are one command."""
    for block in blocks(file):
        if block.language in ("sh", "bash"):
            joined = block.text.replace("\\\n", "\\\n\0")
            for line in re.sub(r"(?<!\\)\n", "\1", joined).split("\1"):
                text = line.replace("\0", "").strip()
                if text and not text.startswith("#"):
                    yield text


def _inline(file: str) -> Iterator[str]:
    for _, found in _paragraphs(file):
        yield from (span for span in found if COMMAND.match(span) and span not in NAMES)


def _paragraphs(file: str) -> Iterator[tuple[str, list[str]]]:
    """Paragraphs and rows of tables, each as one line with its inline code."""
    for paragraph in re.split(r"\n\s*\n", _prose((REPOSITORY / file).read_text())):
        for piece in paragraph.split("\n") if paragraph.startswith("|") else [paragraph]:
            line = " ".join(piece.split())
            yield line, SPAN.findall(line)


def _prose(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
