"""Classes of a user's own, named `module:Class`, beside the ones that are built in.

Core keeps registries by name and imports nothing by name itself. A shell calls `register` with the configured name before
it makes a machine.
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

    `adapt` makes the registry's kind of entry from the class; without it the class is the entry. The current folder can
    be imported from. Raises Invalid, naming `param`, if nothing of that name can be had.
    """
    if name in registry:
        return
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        known = ", ".join(registry)
        raise Invalid(f"{param} is {name!r}: it must be one of {known}, or module:Class", param=param)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
        registry[name] = found if adapt is None else adapt(found)
    except Exception as e:  # whatever a user's module raises while it is imported
        raise Invalid(f"{param} {name!r} can't be loaded: {type(e).__name__}: {e}", param=param) from e
