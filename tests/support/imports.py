"""What the repository's modules import and read, from their source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}
REPOSITORY = Path(__file__).resolve().parents[2]


def sources(*folders: str) -> list[Path]:
    """Python files under the folders, relative to the repository."""
    files = (file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))
    return sorted(file.relative_to(REPOSITORY) for file in files)


def module_name(source: Path) -> str:
    parts = source.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(source: Path) -> frozenset[str]:
    """Full names of imported modules, wherever in the file; for `from a import b` both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return frozenset(names)


def imports_package(source: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports(source))


@cache
def tree(source: Path) -> ast.Module:
    return ast.parse((REPOSITORY / source).read_text(), filename=str(source))


def environment_reads(source: Path) -> Iterator[int]:
    """Lines that touch the process environment."""
    for node in ast.walk(tree(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=name, lineno=line) if name in _ENVIRONMENT:
                yield line
            case ast.ImportFrom(module="os", names=names, lineno=line):
                yield from (line for alias in names if alias.name in _ENVIRONMENT)


def _absolute(source: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module_name(source).split(".")
    if source.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])
