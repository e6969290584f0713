"""Users' own classes, named `module:Class`, besides the built-in ones.

Core keeps registries by name and imports nothing by name. A shell calls `register` with the configured name before it
makes a machine.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from shared.protocol.errors import Invalid

T = TypeVar("T")


def register(
    registry: MutableMapping[str, T], name: str, *, param: str, adapt: Callable[[Any], T] | None = None
) -> None:
    """Guarantee that `name` is in the registry: it is there already, or it is `module:Class` and is imported.

    `adapt` makes the registry's kind of entry from the class. Without it the class is the entry. Modules in the current
    folder can be imported. Raises Invalid, naming `param`, if there is nothing of that name.
    """
    if name in registry:
        return
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        known = f"one of {', '.join(registry)}, or " if registry else ""
        raise Invalid(f"{param} is {name!r}: it must be {known}module:Class", param=param)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
        registry[name] = found if adapt is None else adapt(found)
    except Exception as e:  # a user's module may raise anything while it is imported
        raise Invalid(f"{param} {name!r} can't be loaded: {type(e).__name__}: {e}", param=param) from e


def load_classes(names: str, *, param: str) -> tuple[Any, ...]:
    """The classes of a list of `module:Class`, separated by commas. Raises Invalid, naming `param`."""
    found: dict[str, Any] = {}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        register(found, name, param=param)
    return tuple(found[name] for name in wanted)
