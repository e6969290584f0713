"""What a node's pages contain, as runs: stretches of a chain whose blocks are held and released together.

A sequence holds and releases dozens of blocks at once. Kept as one run, they cost one step instead of one step each.
A run is split when a prompt shares only part of it, or when a chain branches off inside it. Runs form trees: a run lies
below the run that ends with its parent block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from shared.core.kv.eviction import PageUse
from shared.protocol.ids import BlockKey


class Run(PageUse):
    """Consecutive blocks of a chain; keys[i] is in pages[i]. Its PageUse fields describe its last block."""

    __slots__ = ("above", "children", "entry", "keys", "pages", "parent", "refs")

    def __init__(self, keys: tuple[BlockKey, ...], pages: list[int], stored_at: int) -> None:
        self.stored_at, self.used_at, self.uses = stored_at, 0, 1
        self.keys = keys
        self.pages = pages
        self.refs = 1
        """How many holders each of its pages has."""
        self.above: Run | None = None
        """The run before it in its chain."""
        self.parent: BlockKey | None = None
        """The key of the block before its first one, if that block is not here. Rarely set."""
        self.children = 0
        """How many runs lie directly below it."""
        self.entry: tuple[Any, ...] | None = None
        """Its valid entry in the eviction heap. Any other entry there for this run is outdated."""


class BlockTree:
    """All runs of a node, by key and by page. Tracks which run is above which; eviction is up to the pool."""

    def __init__(self, pages: int) -> None:
        self.by_key: dict[BlockKey, Run] = {}
        self.by_page: list[Run | None] = [None] * pages
        self.orphans: dict[BlockKey, dict[Run, None]] = {}
        """Parent key -> the runs below it, for parents that are not here."""

    def plant(self, run: Run, parent: BlockKey | None) -> bool:
        """Add a new run below the block `parent`. Returns False and changes nothing if one of its blocks is already here
        or occurs twice, or if an orphan belongs below one of its inner blocks: then it can't be a single run."""
        by_key, orphans = self.by_key, self.orphans
        if not by_key.keys().isdisjoint(run.keys) or parent in run.keys:
            return False
        if orphans and not orphans.keys().isdisjoint(run.keys[:-1]):
            return False
        blocks = len(by_key) + len(run.keys)
        self._enter(run)
        if len(by_key) != blocks:
            self._forget(run.keys, run.pages)
            return False
        if parent is not None:
            self._attach(run, parent)
        if orphans:
            self._adopt(run)
        return True

    def _enter(self, run: Run) -> None:
        by_key, by_page = self.by_key, self.by_page
        for key in run.keys:
            by_key[key] = run
        for page in run.pages:
            by_page[page] = run

    def _forget(self, keys: tuple[BlockKey, ...], pages: list[int]) -> None:
        by_key, by_page = self.by_key, self.by_page
        for key in keys:
            by_key.pop(key, None)
        for page in pages:
            by_page[page] = None

    def _attach(self, run: Run, parent: BlockKey) -> None:
        above = self.by_key.get(parent)
        if above is None:
            run.parent = parent
            self.orphans.setdefault(parent, {})[run] = None
            return
        if above.keys[-1] != parent:
            above = self.split(above, above.keys.index(parent) + 1)
        run.above = above
        above.children += 1

    def _adopt(self, run: Run) -> None:
        for child in self.orphans.pop(run.keys[-1], ()):
            child.parent = None
            child.above = run
            run.children += 1

    def split(self, run: Run, at: int) -> Run:
        """Move its first `at` blocks (not all of them) into a new run above it. Returns the new run."""
        head = Run(run.keys[:at], run.pages[:at], run.stored_at - len(run.keys) + at)
        head.used_at, head.uses, head.refs = run.used_at, run.uses, run.refs
        head.above, head.parent, head.children = run.above, run.parent, 1
        if run.parent is not None:
            waiting = self.orphans[run.parent]
            del waiting[run]
            waiting[head] = None
        run.above, run.parent = head, None
        run.keys = run.keys[at:]
        del run.pages[:at]
        self._enter(head)
        return head

    def cut(self, run: Run, start: int, end: int) -> Run:
        """Split a run so that its blocks start..end-1 are a run of their own. Returns that run."""
        if end < len(run.keys):
            run = self.split(run, end)
        if start:
            self.split(run, start)
        return run

    def shorten(self, run: Run, blocks: int) -> tuple[tuple[BlockKey, ...], list[int]]:
        """Remove the last `blocks` blocks of a run that has no children. Returns their keys and pages."""
        if blocks == len(run.keys):
            keys, pages = run.keys, run.pages
            run.keys, run.pages = (), []
        else:
            keys, pages = run.keys[-blocks:], run.pages[-blocks:]
            run.keys = run.keys[:-blocks]
            del run.pages[-blocks:]
        run.stored_at -= blocks
        self._forget(keys, pages)
        return keys, pages

    def uproot(self, run: Run) -> Run | None:
        """Remove a run that has no blocks left. Returns the run that was above it, if any."""
        above, run.above = run.above, None
        if above is not None:
            above.children -= 1
        elif run.parent is not None:
            waiting = self.orphans[run.parent]
            del waiting[run]
            if not waiting:
                del self.orphans[run.parent]
        return above

    def forsake(self, run: Run) -> None:
        """Detach the children of a run. They become orphans until its last block is stored again."""
        children = [child for child in set(self.by_key.values()) if child.above is run]
        if children:
            self.orphans[run.keys[-1]] = dict.fromkeys(children)
        run.children = 0
        for child in children:
            child.above, child.parent = None, run.keys[-1]

    def check(self) -> None:
        runs = set(self.by_key.values())
        by_key = {key: run for run in runs for key in run.keys}
        by_page = {page: run for run in runs for page in run.pages}
        table = {page: run for page, run in enumerate(self.by_page) if run is not None}
        assert by_key == self.by_key, "keys and runs disagree"
        assert by_page == table, "pages and runs disagree"
        for run in runs:
            assert len(run.keys) == len(run.pages) == len(set(run.pages)), (
                "a run has not exactly one page per block"
            )
            assert run.refs >= 0, "a run has a negative number of holders"
        above = {run: run.above for run in runs if run.above is not None}
        assert set(above.values()) <= runs, "a removed run is still above another"
        counted = Counter(above.values())
        assert all(run.children == counted[run] for run in runs), "child counts are wrong"
        waiting = {run: parent for parent, children in self.orphans.items() for run in children}
        assert waiting == {run: run.parent for run in runs if run.parent is not None}, "orphans were lost"
        assert not waiting.keys() & above.keys(), "a run waits for a parent and has one"
        assert not self.orphans.keys() & by_key.keys(), "runs are orphans although their parent is here"


def alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
