"""What is compiled, and where a build of it lies."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from functools import cache
from pathlib import Path

from shared.io.models import models_folder

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared/core", "tsukimi/simulate")
DEPENDS_ON = (*PACKAGES, "shared/protocol")
"""A change in any of these makes a build out of date: it contains their constants."""
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
"""The interpreter that a build is for."""
OPTIMISE = "3"
"""The C compiler's -O. 1 compiles in two thirds of the time, and the result runs a few per cent longer."""

LEFT_OUT = (
    "shared/core/conductor/placement_policies.py",  # users derive policies of their own from the classes of these
    "shared/core/conductor/decode_policies.py",
    "tsukimi/simulate/command.py",  # typer looks into its functions
    "tsukimi/simulate/run.py",
    "tsukimi/simulate/report.py",
)


def to_compile() -> list[Path]:
    """Modules that contain functions, relative to the root. Modules of messages are left out: msgspec makes their
    classes, and mypyc cannot."""
    found = [
        path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return [
        path
        for path in found
        if path.as_posix() not in LEFT_OUT and _compiles(ast.parse((ROOT / path).read_text()))
    ]


def _compiles(module: ast.Module) -> bool:
    nodes = list(ast.walk(module))
    struct = any(isinstance(node, ast.ClassDef) and _is_struct(node) for node in nodes)
    return not struct and any(isinstance(node, ast.FunctionDef) for node in nodes)


def _is_struct(class_: ast.ClassDef) -> bool:
    bases = {base.id for base in class_.bases if isinstance(base, ast.Name)}
    return bool(class_.keywords or bases & {"Struct", "Event", "Command"})


@cache
def folder() -> Path:
    """Where a build of the present sources lies, if there is one."""
    digest = hashlib.blake2b(f"{SUFFIX} {OPTIMISE}".encode(), digest_size=8)
    for package in DEPENDS_ON:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return models_folder().parent / "compiled" / digest.hexdigest()
