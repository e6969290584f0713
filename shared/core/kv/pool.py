"""One node's pages: which are held, what they contain, and which are evicted when room is needed.

Every page is in exactly one state:
    free     nobody holds it and its content is meaningless
    held     one or more sequences (or transfers) hold it; it may have a key
    cached   nobody holds it, but it has a key: it can be reused or evicted
A page gets its key once its KV is complete. If two sequences compute the same block at the same time, two pages contain
it: the first to be registered gets the key, the other stays without one and is freed when released.
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
"""(*rank, stamp, run) in the eviction heap. Flat, because comparing entries dominates the cost. Stamps are unique."""


class BlockPool:
    """Every method except `peek`, `key_of`, `refs_of`, `keys` and the counts mutates it. It deals in pages only, not in
    seconds or bytes."""

    def __init__(self, pages: int, policy: EvictionPolicy | None = None, *, keep: bool = True) -> None:
        """With `keep` off, pages get no keys and nothing stays cached."""
        self.keeps = keep
        self._policy = policy or Lru()
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))
        self._bare = bytearray(pages)
        """1 if the page is held and has no key. It then has exactly one holder, since nobody else can find it."""
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
        """Hold `count` empty pages, evicting cached ones as needed. None, and no change, if too few are left."""
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
        """Hold the pages of the leading `keys` that are here, up to the first that is not. Returns those pages."""
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
        """Release pages, each once per time it was held. A page without holders becomes cached if it has a key, or
        else free."""
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
        """Split off the blocks of `run` that `pages` ends with, and return them as a run of their own."""
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
        """Record that a held page contains the complete block `key`. False if another page already has that key."""
        return self.register_chain([page], (key,), parent) == 1

    def register_chain(self, pages: list[int], keys: tuple[BlockKey, ...], parent: BlockKey | None) -> int:
        """`register` consecutive blocks, the first of which follows `parent`. Returns how many of them are new."""
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
        """Returns False and changes nothing if the blocks can't be a single new run."""
        if not self._runs.plant(Run(keys, pages.copy(), self._clock + len(pages)), parent):
            return False
        self._clock += len(pages)
        bare = self._bare
        for page in pages:
            bare[page] = 0
        self._stored, self._removed = _net(keys, self._stored, self._removed)
        return True

    def peek(self, keys: Sequence[BlockKey]) -> int:
        """How many pages `match` would hold."""
        return longest_run(keys, self._runs.by_key)  # type: ignore[arg-type]

    @property
    def content(self) -> KeysView[BlockKey]:
        """A live view of the keys of all pages."""
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
        """The heap entry that makes a cached run without children a candidate for eviction."""
        self._clock += 1
        return (*self._policy.rank(run), self._clock, run)

    def _make_room(self, count: int) -> None:
        """Evict the candidates of lowest rank until `count` pages are free."""
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
        """Evict the last block of a run that has no children, then the blocks before it, also in the runs above, while
        pages are lacking and the next block is the lowest candidate. Often this evicts a whole chain.

        `lacking`: pages still needed. `lowest`: the run ranks below all other candidates. Within a run no block ranks
        above the one after it, so the blocks of a lowest run are evicted at once, without comparing each.
        """
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
        """Evict the lowest cached block when there are no candidates: every cached block is then an ancestor of a held
        one. This happens when the holder of a block computed its own copies of the ancestors."""
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
    """Add `keys` to the changes `done` and cancel them against the opposite changes `undone`. Returns the new pair. A
    block that was changed and changed back is in neither."""
    if undone:
        both = set(keys).intersection(undone)
        keys = tuple([key for key in keys if key not in both])
        undone = tuple([key for key in undone if key not in both])
    return done + keys if done else keys, undone
