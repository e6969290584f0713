"""The memory an endpoint receives into and serves from."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shared.dataplane.memory.anonymous import Memory
from shared.dataplane.memory.arena import Arena
from shared.protocol.errors import Unavailable
from shared.protocol.model import KVLayout


class Home:
    """Either an arena from the start, or bare memory that is laid out for the first caller's KV (a cache node's)."""

    def __init__(
        self, memory: Memory, arena: Arena | None = None, adopt: Callable[[KVLayout], Arena] | None = None
    ) -> None:
        """adopt is called at most once with success, from a data plane thread; what it raises the caller is told."""
        self.memory = memory
        self._arena = arena
        self._adopt = adopt
        self._lock = threading.Lock()

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            raise Unavailable("no KV layout is known here yet")
        return self._arena

    def arena_for(self, layout: KVLayout) -> Arena:
        """The arena, laid out as `layout` if it was not laid out before. It may have another layout."""
        with self._lock:
            if self._arena is None and self._adopt is not None:
                self._arena = self._adopt(layout)
        return self.arena
