"""Importing the build instead of the source."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from tsukimi.compiled import sources


class BuildFinder(MetaPathFinder):
    """Finds the modules of a build, and no others."""

    def __init__(self, folder: Path) -> None:
        self._paths = {_name(path.relative_to(folder)): path for path in folder.rglob(f"*{sources.SUFFIX}")}

    @property
    def names(self) -> set[str]:
        return set(self._paths)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = self._paths.get(fullname)
        if found is None:
            return None
        return spec_from_file_location(fullname, found, loader=ExtensionFileLoader(fullname, str(found)))


def _name(path: Path) -> str:
    return path.as_posix().removesuffix(sources.SUFFIX).replace("/", ".")


def use_compiled() -> bool:
    """Make later imports take the build of the present sources. Returns False and changes nothing if there is none, or if
    some of its modules were already imported as Python (the two must not mix)."""
    folder = sources.folder()
    if not folder.is_dir():
        return False
    finder = BuildFinder(folder)
    if finder.names & sys.modules.keys():
        return False
    sys.meta_path.insert(0, finder)
    return True
