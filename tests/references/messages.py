"""messages.md: every message of the protocol and every subject that one is sent on."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import msgspec
from msgspec import Struct

import shared.protocol
from shared.io.field_docs import field_docs
from shared.protocol import subjects
from tests.references.table import code, default_of, docstring, page, table

ABOUT = """\
Messages are msgpack maps, unless said otherwise; the tag is in the field `type`. A struct without a tag is a part of
others, or comes where nothing else can. Unknown fields are ignored."""


def render() -> str:
    parts = ["## Subjects", table(("Name", "Subject", "Carries"), _subjects())]
    for module in _modules():
        structs = [thing for thing in vars(module).values() if _is_message(thing, module)]
        if structs:
            about = inspect.getdoc(module) or ""
            parts += [f"## {module.__name__}", about, *map(_message, structs)]
    return page("Messages", ABOUT, parts)


def _modules() -> list[ModuleType]:
    names = sorted(found.name for found in pkgutil.iter_modules(shared.protocol.__path__))
    return [importlib.import_module(f"shared.protocol.{name}") for name in names]


def _is_message(thing: object, module: ModuleType) -> bool:
    return isinstance(thing, type) and issubclass(thing, Struct) and thing.__module__ == module.__name__


def _message(struct: type[Struct]) -> str:
    tag = struct.__struct_config__.tag
    title = f"### {struct.__name__}" + (f"\n\nTag: `{tag}`" if tag else "")
    if struct.__struct_config__.array_like:
        title += "\n\nEncoded as an array, fields in this order."
    docs = field_docs(struct)
    rows = [
        (
            code(field.name),
            code(str(struct.__annotations__[field.name])),
            default_of(field),
            docs.get(field.name, ""),
        )
        for field in msgspec.structs.fields(struct)
    ]
    about = docstring(struct)
    fields = table(("Field", "Type", "Default", "Meaning"), rows)
    return "\n\n".join(part for part in (title, f"```text\n{about}\n```" if about else "", fields) if part)


def _subjects() -> Iterator[tuple[str, str, str]]:
    """Constants with the literal under them, then functions with placeholders for their arguments."""
    body = ast.parse(inspect.getsource(subjects)).body
    for statement, following in itertools.pairwise([*body, ast.Pass()]):
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith(("PREFIX", "QUEUE")):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield code(name), code(getattr(subjects, name)), " ".join(text.split())
                    case _:
                        yield code(name), code(getattr(subjects, name)), ""
            case ast.FunctionDef(name=name) if name != "encode":
                arguments = [argument.arg for argument in statement.args.args]
                about = " ".join((ast.get_docstring(statement) or "").split())
                yield code(f"{name}({', '.join(arguments)})"), code(_filled(name, arguments)), about


def _filled(name: str, arguments: list[str]) -> str:
    """The subject with `<argument>` in place of each argument."""
    marks = {f"argument-{at}": f"<{argument}>" for at, argument in enumerate(arguments)}
    subject = str(getattr(subjects, name)(*marks))
    for mark, shown in marks.items():
        subject = subject.replace(mark, shown)
    return subject
