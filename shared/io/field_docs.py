"""Reads the documentation of a configuration's fields."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct


def field_docs(type_: type[Struct]) -> dict[str, str]:
    """Field -> its Meta description, or the string literal under it in the source."""
    docs: dict[str, str] = {}
    for cls in reversed(type_.__mro__):
        if cls is not Struct and issubclass(cls, Struct):
            docs |= _literals_of(cls)
    for name, hint in get_type_hints(type_, include_extras=True).items():
        for extra in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if isinstance(extra, Meta) and extra.description:
                docs[name] = extra.description
    return docs


def type_name(hint: Any) -> str:
    """A type for people: `float`, `info|debug`, `tuple[str, ...]`."""
    if get_origin(hint) is Annotated:
        return type_name(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _literals_of(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # no source here: a frozen or interactive program
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                docs[name] = " ".join(text.split())
    return docs
