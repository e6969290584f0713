"""One node's pages: who holds them, what they contain, and which go when room is needed.

Every page is in exactly one state:
    free     nobody holds it and its content is worth nothing
    held     one or more sequences (or transfers) hold it; it may have a key
    cached   nobody holds it, but its key says what it contains: reusable, evictable
A key is given to a page once its KV is complete. Two pages may come to contain the same block (two sequences computed
it at the same time): the first keeps the key, the other is freed when released.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from shared.core.kv.block_keys import longest_run
from shared.core.kv.block_tree import BlockTree, Run, alike
from shared.core.kv.eviction import EvictionPolicy, Lru
from shared.protocol.ids import BlockKey

Entry = tuple[Any, ...]
"""(*rank, stamp, run) in the eviction heap: flat, since comparing them is what takes the time. Stamps are unique."""


class BlockPool:
    """Mutated by every method but `peek`, `key_of`, `refs_of`, `keys` and the counts. Knows no time and no bytes."""

    def __init__(self, pages: int, policy: EvictionPolicy | None = None, *, keep: bool = True) -> None:
        """`keep` off: pages are given no keys, so that nothing stays cached."""
        self.keeps = keep
        self._policy = policy or Lru()
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._bare = bytearray(pages)
        """1: the page is held and has no key. It is held once: nobody else can find it."""
        self._runs = BlockTree(pages)
        self._cached = 0
        self._heap: list[Entry] = []
        self._clock = 0
        self._stored: tuple[BlockKey, ...] = ()
        self._removed: tuple[BlockKey, ...] = ()

    # -- counts ----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def available(self) -> int:
        """Pages that `allocate` can give out now."""
        return len(self._free) + self._cached

    @property
    def held(self) -> int:
        return self.total - len(self._free) - self._cached

    # -- holding pages ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` pages of no content, evicting cached ones as needed; None (and no change) if too few are left."""
        free = self._free
        if count > len(free):
            if count > len(free) + self._cached:
                return None
            self._make_room(count)
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        bare = self._bare
        for page in taken:
            bare[page] = 1
        return taken

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Hold the pages of the longest contiguous run of `keys` from the first on: nothing beyond a hole counts."""
        pages: list[int] = []
        by_key = self._runs.by_key
        if not by_key:
            return pages
        keys, at = tuple(keys), 0
        while at < len(keys):
            run = by_key.get(keys[at])
            if run is None:
                break
            if run.keys[0] != keys[at]:
                self._runs.split(run, run.keys.index(keys[at]))
            end = at + len(run.keys)
            if keys[at:end] != run.keys:
                run = self._runs.split(run, alike(keys[at:end], run.keys))
                end = at + len(run.keys)
            if run.refs == 0:
                self._cached -= end - at
                run.entry = None
            run.refs += 1
            run.uses += 1
            pages += run.pages
            at = end
        return pages

    def unpin(self, pages: list[int]) -> None:
        """Let go of pages, each once per time it was held. Those nobody holds any more become cached, or free."""
        self._clock += 1
        used_at, by_page, end = self._clock, self._runs.by_page, len(pages)
        if not self._runs.by_key:
            self._free_bare(pages)
            return
        while end:
            run = by_page[pages[end - 1]]
            if run is None:
                end -= 1
                self._free_bare(pages[end : end + 1])
                continue
            start = end - len(run.pages)
            if start < 0 or pages[start:end] != run.pages:
                run = self._common(run, pages[:end])
                start = end - len(run.pages)
            self._release(run, used_at)
            end = start
        if len(self._heap) > 2 * self.total + 64:
            self._heap = [e for e in self._heap if e[-1].entry is e]
            heapify(self._heap)

    def _common(self, run: Run, pages: list[int]) -> Run:
        """The blocks of a run, as one of their own, that `pages` ends with."""
        end = run.pages.index(pages[-1]) + 1
        return self._runs.cut(run, end - alike(run.pages[end - 1 :: -1], pages[::-1]), end)

    def _release(self, run: Run, used_at: int) -> None:
        if not run.refs:
            raise ValueError(f"pages {run.pages} are not held")
        run.refs -= 1
        if run.refs:
            return
        self._cached += len(run.pages)
        run.used_at = used_at
        if not run.children:
            run.entry = entry = self._entry(run)
            heappush(self._heap, entry)

    def _free_bare(self, pages: list[int]) -> None:
        bare = self._bare
        for page in pages:
            if not bare[page]:
                raise ValueError(f"page {page} is not held")
            bare[page] = 0
        self._free += pages[::-1]

    # -- what pages contain ----------------------------------------------------------------------------------------

    def register(self, page: int, key: BlockKey, parent: BlockKey | None) -> bool:
        """Say that a held page contains the block `key`, complete. False if another page has it already."""
        return self.register_chain([page], (key,), parent) == 1

    def register_chain(self, pages: list[int], keys: tuple[BlockKey, ...], parent: BlockKey | None) -> int:
        """`register` for blocks that follow each other, the first one `parent`; returns how many of them are new."""
        if not (self.keeps and pages):
            return 0
        bare = self._bare
        if all(map(bare.__getitem__, pages)) and self._plant(pages, keys, parent):
            return len(pages)
        new = 0
        for page, key in zip(pages, keys, strict=True):
            if not self.refs_of(page):
                raise ValueError(f"page {page} is not held")
            if key not in self._runs.by_key:
                if not bare[page]:
                    raise ValueError(f"page {page} already contains another block")
                self._plant([page], (key,), parent if parent != key else None)
                new += 1
            parent = key
        return new

    def _plant(self, pages: list[int], keys: tuple[BlockKey, ...], parent: BlockKey | None) -> bool:
        """False, and no change, if they can't be one run."""
        if not self._runs.plant(Run(keys, pages.copy(), self._clock + len(pages)), parent):
            return False
        self._clock += len(pages)
        bare = self._bare
        for page in pages:
            bare[page] = 0
        self._stored, self._removed = _net(keys, self._stored, self._removed)
        return True

    def peek(self, keys: Sequence[BlockKey]) -> int:
        """Length of the run that `match` would hold."""
        return longest_run(keys, self._runs.by_key)  # type: ignore[arg-type]

    @property
    def content(self) -> KeysView[BlockKey]:
        """A live view of the keys that pages have."""
        return self._runs.by_key.keys()

    def key_of(self, page: int) -> BlockKey | None:
        run = self._runs.by_page[page]
        return None if run is None else run.keys[run.pages.index(page)]

    def refs_of(self, page: int) -> int:
        run = self._runs.by_page[page]
        return self._bare[page] if run is None else run.refs

    def keys(self) -> tuple[BlockKey, ...]:
        """Every key that can be read now."""
        return tuple(self._runs.by_key)

    @property
    def changed(self) -> bool:
        """Whether there are changes to take."""
        return bool(self._stored or self._removed)

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Net (stored, removed) keys since the last call."""
        changes = self._stored, self._removed
        self._stored = self._removed = ()
        return changes

    # -- eviction --------------------------------------------------------------------------------------------------

    def _entry(self, run: Run) -> Entry:
        """What makes a cached run, which no child needs, a candidate."""
        self._clock += 1
        return (*self._policy.rank(run), self._clock, run)

    def _make_room(self, count: int) -> None:
        """Evict the lowest candidates until `count` pages are free."""
        free, heap = self._free, self._heap
        while len(free) < count:
            if not heap:
                self._evict_ancestor()
                continue
            entry = heappop(heap)
            run: Run = entry[-1]
            if run.entry is entry and not run.children:
                lowest = not heap or entry[:-2] < heap[0][:-2]
                self._evict(run, count - len(free), lowest)

    def _evict(self, run: Run, lacking: int, lowest: bool) -> None:
        """The last block of a run that is above of none. While more are lacking, those before it go too, each as long as
        it is the lowest candidate: mostly whole chains do. Within a run no block ranks above the one after it, so that
        the rest of one goes with its last block. `lowest`: that one ranks below all other candidates."""
        heap, blocks = self._heap, lacking if lowest else 1
        while True:
            keys, pages = self._runs.shorten(run, max(1, min(blocks, len(run.keys))))
            self._free.extend(reversed(pages))
            self._cached -= len(pages)
            self._removed, self._stored = _net(keys[::-1], self._removed, self._stored)
            lacking -= len(pages)
            if not run.keys:
                run.entry = None
                above = self._runs.uproot(run)
                if above is None or above.children or above.refs:
                    return
                run = above
            entry = self._entry(run)
            if lacking <= 0 or (heap and heap[0] < entry):
                run.entry = entry
                heappush(heap, entry)
                return
            blocks = lacking

    def _evict_ancestor(self) -> None:
        """Every cached block left is an ancestor of a held one (held by a sequence that computed its own copy of it)."""
        cached = [run for run in set(self._runs.by_key.values()) if not run.refs]
        alone = [self._runs.split(run, 1) for run in cached for _ in run.keys[1:]] + cached
        run = min(alone, key=lambda run: (self._policy.rank(run), run.pages))
        self._runs.forsake(run)
        self._evict(run, 0, False)

    # -- laws ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        runs = set(self._runs.by_key.values())
        held = {page for run in runs if run.refs for page in run.pages}
        cached = {page for run in runs if not run.refs for page in run.pages}
        free = set(self._free)
        bare = {page for page in range(self.total) if self._bare[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & (held | cached | bare), "a page is free and in use"
        assert not bare & (held | cached), "a page without a key has one"
        assert len(free) + len(bare) + len(cached) + len(held) == self.total, "pages were lost"
        assert self._cached == len(cached), f"{self._cached} cached counted, {len(cached)} found"
        self._runs.check()
        candidates = {e[-1] for e in self._heap if e[-1].entry is e}
        leaves = {run for run in runs if not (run.refs or run.children)}
        assert leaves <= candidates, "an evictable run is not among the candidates"


def _net(
    keys: tuple[BlockKey, ...], done: tuple[BlockKey, ...], undone: tuple[BlockKey, ...]
) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
    """Blocks that were changed, with another change and against the opposite one: of a block that was changed back and
    forth neither is left."""
    if undone:
        both = set(keys).intersection(undone)
        keys = tuple([key for key in keys if key not in both])
        undone = tuple([key for key in undone if key not in both])
    return done + keys if done else keys, undone
