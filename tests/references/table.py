"""Markdown, written the same way on every page."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import msgspec

NOTE = "<!-- Written by `make references` from the code; do not edit. -->"


def page(title: str, about: str, parts: Iterable[str]) -> str:
    """A whole page, ending in one newline."""
    return "\n\n".join([f"# {title}", NOTE, about, *(part for part in parts if part)]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One table; bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def docstring(thing: type) -> str:
    """The docstring of a class itself, as one Markdown passage; empty if it has none."""
    return inspect.cleandoc(thing.__dict__.get("__doc__") or "")


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """A field's default as Python writes it, or `required`."""
    if field.required:
        return "required"
    made = field.default_factory
    return code(repr(field.default if made is msgspec.NODEFAULT else made()))
