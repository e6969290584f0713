"""One node's pages: who holds them, what they contain, and which go when room is needed.

Every page is in exactly one state:
    free     nobody holds it and its content is worth nothing
    held     one or more sequences (or transfers) hold it; it may have a key
    cached   nobody holds it, but its key says what it contains: reusable, evictable
A key is given to a page once its KV is complete. Two pages may come to contain the same block (two sequences computed
it at the same time): the first keeps the key, the other is freed when released.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, KeysView, Sequence

from shared.core.blocks import longest_run
from shared.core.eviction import EvictionPolicy, Lru, PageUse
from shared.protocol.ids import BlockKey


class _Page(PageUse):
    __slots__ = ("parent", "stamp")

    def __init__(self) -> None:
        super().__init__()
        self.parent: BlockKey | None = None
        self.stamp = 0
        """Names the page's live entry in the eviction heap; 0: none."""


Entry = tuple[int, ...]
"""(*rank, stamp, page) in the eviction heap: flat, since comparing them is what takes the time."""


class BlockPool:
    """Mutated by every method but `peek`, `key_of`, `refs_of`, `keys` and the counts. Knows no time and no bytes."""

    def __init__(self, pages: int, policy: EvictionPolicy | None = None, *, keep: bool = True) -> None:
        """`keep` off: pages are given no keys, so that nothing stays cached."""
        self.keeps = keep
        self._policy = policy or Lru()
        self._refs = [0] * pages
        self._keys: list[BlockKey | None] = [None] * pages
        self._pages = [_Page() for _ in range(pages)]
        """The rest of what is known of those that have keys."""
        self._free = list(range(pages - 1, -1, -1))
        self._by_key: dict[BlockKey, int] = {}
        self._children: dict[BlockKey, int] = {}
        self._cached = 0
        self._heap: list[Entry] = []
        self._clock = 0
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

    # -- counts ----------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        return len(self._pages)

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
        return len(self._pages) - len(self._free) - self._cached

    # -- holding pages ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` pages of no content, evicting cached ones as needed; None (and no change) if too few are left."""
        if count > self.available:
            return None
        if len(self._free) < count:
            self._make_room(count)
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        refs = self._refs
        for page in taken:
            refs[page] = 1
        return taken

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Hold the pages of the longest contiguous run of `keys` from the first on: nothing beyond a hole counts."""
        run: list[int] = []
        where = self._by_key.get
        for key in keys:
            page = where(key)
            if page is None:
                break
            run.append(page)
        if run:
            self.pin(run)
        return run

    def pin(self, pages: Iterable[int]) -> None:
        """Hold pages once more. Each must be held or cached."""
        table, refs, revived = self._pages, self._refs, 0
        for number in pages:
            page, held = table[number], refs[number]
            if held == 0:
                if self._keys[number] is None:
                    raise ValueError(f"page {number} is free")
                revived += 1
                page.stamp = 0
            refs[number] = held + 1
            page.uses += 1
        self._cached -= revived

    def unpin(self, pages: Sequence[int]) -> None:
        """Let go of pages, each once per time it was held. Those nobody holds any more become cached, or free."""
        self._clock = clock = self._clock + 1
        table, refs, keys, free, children = self._pages, self._refs, self._keys, self._free, self._children
        for number in reversed(pages):
            left = refs[number] - 1
            if left < 0:
                raise ValueError(f"page {number} is not held")
            refs[number] = left
            if left:
                continue
            key = keys[number]
            if key is None:
                free.append(number)
                continue
            self._cached += 1
            page = table[number]
            page.used_at = clock
            if key not in children:
                heapq.heappush(self._heap, self._entry(number, page))
        if len(self._heap) > 2 * len(table) + 64:
            self._heap = [e for e in self._heap if table[e[-1]].stamp == e[-2]]
            heapq.heapify(self._heap)

    # -- what pages contain ----------------------------------------------------------------------------------------

    def register(self, page: int, key: BlockKey, parent: BlockKey | None) -> bool:
        """Say that a held page contains the block `key`, complete. False if another page has it already."""
        return self.register_all([(page, key, parent)]) == 1

    def register_all(self, blocks: Iterable[tuple[int, BlockKey, BlockKey | None]]) -> int:
        """`register` for many (page, key, parent); how many of them are new."""
        if not self.keeps:
            return 0
        table, refs, keys, by_key, children = self._pages, self._refs, self._keys, self._by_key, self._children
        stored, removed, before = self._stored, self._removed, self._clock
        for number, key, parent in blocks:
            if refs[number] <= 0:
                raise ValueError(f"page {number} is not held")
            if key in by_key:
                continue
            if keys[number] is not None:
                raise ValueError(f"page {number} already contains another block")
            self._clock += 1
            page = table[number]
            page.parent, page.stored_at, page.uses = parent, self._clock, 1
            keys[number] = key
            by_key[key] = number
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
            if not removed or removed.pop(key, True):
                stored[key] = None
        return self._clock - before

    def peek(self, keys: Sequence[BlockKey]) -> int:
        """Length of the run that `match` would hold."""
        return longest_run(keys, self._by_key)  # type: ignore[arg-type]

    @property
    def content(self) -> KeysView[BlockKey]:
        """A live view of the keys that pages have."""
        return self._by_key.keys()

    def key_of(self, page: int) -> BlockKey | None:
        return self._keys[page]

    def refs_of(self, page: int) -> int:
        return self._refs[page]

    def keys(self) -> tuple[BlockKey, ...]:
        """Every key that can be read now."""
        return tuple(self._by_key)

    @property
    def changed(self) -> bool:
        """Whether there are changes to take."""
        return bool(self._stored or self._removed)

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Net (stored, removed) keys since the last call."""
        changes = tuple(self._stored), tuple(self._removed)
        self._stored, self._removed = {}, {}
        return changes

    # -- eviction --------------------------------------------------------------------------------------------------

    def _entry(self, number: int, page: _Page) -> Entry:
        """Makes a cached page, which no child needs, a candidate: the entry is for the heap."""
        self._clock += 1
        page.stamp = self._clock
        return (*self._policy.rank(page), page.stamp, number)

    def _make_room(self, count: int) -> None:
        """Evict the lowest candidates until `count` pages are free. Mostly whole chains go, from their ends: a parent
        that became a candidate meets the heap only in the search for the next one."""
        pages, keys, children, free, heap = self._pages, self._keys, self._children, self._free, self._heap
        entry: Entry | None = None
        while len(free) < count:
            if entry is not None:
                entry = heapq.heappushpop(heap, entry)
            elif heap:
                entry = heapq.heappop(heap)
            else:
                self._evict_ancestor()
                continue
            number = entry[-1]
            page = pages[number]
            fresh = page.stamp == entry[-2] and keys[number] not in children
            entry = self._evict(number, page) if fresh else None
        if entry is not None:
            heapq.heappush(heap, entry)

    def _evict_ancestor(self) -> None:
        """Every cached page left is an ancestor of a held one (held by a sequence that computed its own copy of it)."""
        pages = self._pages
        ranked = ((self._policy.rank(pages[n]), n) for n in self._by_key.values() if self._refs[n] == 0)
        number = min(ranked)[1]
        entry = self._evict(number, pages[number])
        if entry is not None:
            heapq.heappush(self._heap, entry)

    def _evict(self, number: int, page: _Page) -> Entry | None:
        """Returns the entry of its parent if that is a candidate now."""
        key, parent = self._keys[number], page.parent
        assert key is not None
        by_key, children = self._by_key, self._children
        del by_key[key]
        if not self._stored or self._stored.pop(key, True):
            self._removed[key] = None
        self._keys[number] = page.parent = None
        page.stamp = 0
        self._cached -= 1
        self._free.append(number)
        if parent is None:
            return None
        left = children[parent] - 1
        if left:
            children[parent] = left
            return None
        del children[parent]
        above = by_key.get(parent)
        if above is None or self._refs[above]:
            return None
        return self._entry(above, self._pages[above])

    # -- laws ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        table = list(zip(self._refs, self._keys, strict=True))
        held = [n for n, (refs, _) in enumerate(table) if refs > 0]
        cached = [n for n, (refs, key) in enumerate(table) if refs == 0 and key is not None]
        assert all(refs >= 0 for refs in self._refs), "a page is held less than never"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not set(self._free) & (set(held) | set(cached)), "a page is free and in use"
        assert len(self._free) + len(cached) + len(held) == len(self._pages), "pages were lost"
        assert self._cached == len(cached), f"{self._cached} cached counted, {len(cached)} found"
        keyed = {key: n for n, key in enumerate(self._keys) if key is not None}
        assert keyed == self._by_key, "keys and pages do not map one to one"
        children: dict[BlockKey, int] = {}
        for number in keyed.values():
            parent = self._pages[number].parent
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        assert children == self._children, "child counts are wrong"
        candidates = {e[-1] for e in self._heap if self._pages[e[-1]].stamp == e[-2]}
        leaves = {n for n in cached if self._keys[n] not in children}
        assert leaves <= candidates, "an evictable page is not among the candidates"
