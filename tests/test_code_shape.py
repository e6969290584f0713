"""How functions and classes are built: few positional parameters, no towers of base classes in core."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.imports import sources, tree

MOST_POSITIONAL = 8
MARKERS = {"Event", "Command", "Struct", "Machine", "Protocol", "Generic", "ABC", "Exception"}
"""Bases that carry no code of a role."""


def with_many_positionals(module: ast.Module) -> Iterator[str]:
    """Functions with more positional parameters than a reader can keep apart. `self` and `cls` do not count."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
            if len([name for name in names if name not in ("self", "cls")]) > MOST_POSITIONAL:
                yield node.name


def with_many_bases(module: ast.Module) -> Iterator[str]:
    """Classes that inherit from more than one class of the project."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            if len([base for base in bases if isinstance(base, ast.Name) and base.id not in MARKERS]) > 1:
                yield node.name


def test_no_function_takes_more_positional_parameters_than_a_reader_can_keep_apart() -> None:
    found = [
        f"{source}: {name}"
        for source in sources("shared", "services", "tsukimi")
        for name in with_many_positionals(tree(source))
    ]
    assert not found


def test_no_class_of_core_has_two_bases_of_the_project() -> None:
    assert not [
        f"{source}: {name}" for source in sources("shared/core") for name in with_many_bases(tree(source))
    ]


def test_the_checks_find_what_they_look_for() -> None:
    assert list(with_many_positionals(ast.parse("def f(a, b, c, d, e, f, g, h, i): ..."))) == ["f"]
    assert not list(with_many_positionals(ast.parse("def f(self, a, b, c, d, e, f, g, h, *, i): ...")))
    assert list(with_many_bases(ast.parse("class A(B, C[int]): ..."))) == ["A"]
    assert not list(with_many_bases(ast.parse("class A(B[int], Generic[T]): ...")))
