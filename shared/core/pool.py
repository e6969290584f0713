"""One node's pages: who holds them, what they contain, and which go when room is needed.

Every page is in exactly one state:
    free     nobody holds it and its content is worth nothing
    held     one or more sequences (or transfers) hold it; it may have a key
    cached   nobody holds it, but its key says what it contains: reusable, evictable
A key is given to a page once its KV is complete. Two pages may come to contain the same block (two sequences computed
it at the same time): the first keeps the key, the other is freed when released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, KeysView, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from shared.core.blocks import longest_run
from shared.core.eviction import EvictionPolicy, Lru, PageUse
from shared.protocol.ids import BlockKey

Entry = tuple[Any, ...]
"""(*rank, stamp, block) in the eviction heap: flat, since comparing them is what takes the time. Stamps are unique."""


class Block(PageUse):
    """What a page contains. All that eviction asks of it is in one place: few misses of the cache."""

    __slots__ = ("above", "children", "entry", "key", "page", "parent")

    def __init__(self, page: int, key: BlockKey, stored_at: int) -> None:
        super().__init__(stored_at, 0, 1)
        self.page = page
        self.key = key
        self.above: Block | None = None
        """The block before it in its chain."""
        self.parent: BlockKey | None = None
        """The key of that block where it is not here: hardly ever."""
        self.children = 0
        """How many blocks it is above of."""
        self.entry: Entry | None = None
        """The one that counts in the eviction heap."""


class BlockPool:
    """Mutated by every method but `peek`, `key_of`, `refs_of`, `keys` and the counts. Knows no time and no bytes."""

    def __init__(self, pages: int, policy: EvictionPolicy | None = None, *, keep: bool = True) -> None:
        """`keep` off: pages are given no keys, so that nothing stays cached."""
        self.keeps = keep
        self._policy = policy or Lru()
        self.total = pages
        self._refs = [0] * pages
        self._blocks: list[Block | None] = [None] * pages
        self._orphans: dict[BlockKey, dict[Block, None]] = {}
        """Blocks by the key of their parent, which is not here."""
        self._free = list(range(pages - 1, -1, -1))
        self._by_key: dict[BlockKey, Block] = {}
        self._cached = 0
        self._heap: list[Entry] = []
        self._clock = 0
        self._stored: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}

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
        if count > len(free) + self._cached:
            return None
        if len(free) < count:
            self._make_room(count)
        taken = free[: -count - 1 : -1]
        del free[len(free) - count :]
        refs = self._refs
        for page in taken:
            refs[page] = 1
        return taken

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Hold the pages of the longest contiguous run of `keys` from the first on: nothing beyond a hole counts."""
        run: list[int] = []
        where, refs, revived = self._by_key, self._refs, 0
        for key in keys:
            if key not in where:
                break
            block = where[key]
            page = block.page
            held = refs[page]
            if held == 0:
                revived += 1
                block.entry = None
            refs[page] = held + 1
            block.uses += 1
            run.append(page)
        self._cached -= revived
        return run

    def unpin(self, pages: Sequence[int]) -> None:
        """Let go of pages, each once per time it was held. Those nobody holds any more become cached, or free."""
        self._clock = clock = self._clock + 1
        refs, blocks, free, cached = self._refs, self._blocks, self._free, 0
        if not self._by_key and set(map(refs.__getitem__, pages)) == {1} and len(set(pages)) == len(pages):
            for page in pages:
                refs[page] = 0
            free.extend(reversed(pages))
            return
        for page in reversed(pages):
            left = refs[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is not held")
            refs[page] = left
            if left:
                continue
            block = blocks[page]
            if block is None:
                free.append(page)
                continue
            cached += 1
            block.used_at = clock
            if not block.children:
                heappush(self._heap, self._entry(block))
        self._cached += cached
        if len(self._heap) > 2 * len(refs) + 64:
            self._heap = [e for e in self._heap if e[-1].entry is e]
            heapify(self._heap)

    # -- what pages contain ----------------------------------------------------------------------------------------

    def register(self, page: int, key: BlockKey, parent: BlockKey | None) -> bool:
        """Say that a held page contains the block `key`, complete. False if another page has it already."""
        return self.register_all([(page, key, parent)]) == 1

    def register_all(self, blocks: Iterable[tuple[int, BlockKey, BlockKey | None]]) -> int:
        """`register` for many (page, key, parent); how many of them are new."""
        if not self.keeps:
            return 0
        refs, content, by_key = self._refs, self._blocks, self._by_key
        stored, removed, orphans, clock = self._stored, self._removed, self._orphans, self._clock
        above: Block | None = None
        for page, key, parent in blocks:
            if refs[page] <= 0:
                raise ValueError(f"page {page} is not held")
            if key in by_key:
                continue
            if content[page] is not None:
                raise ValueError(f"page {page} already contains another block")
            clock += 1
            content[page] = by_key[key] = block = Block(page, key, clock)
            if parent is not None:
                if above is None or above.key is not parent:  # mostly it is: chains come in order
                    above = by_key.get(parent)
                if above is not None:
                    block.above = above
                    above.children += 1
                else:
                    block.parent = parent
                    orphans.setdefault(parent, {})[block] = None
            if orphans and key in orphans:
                self._adopt(block, orphans.pop(key))
            if not removed or removed.pop(key, True):
                stored[key] = None
            above = block
        new, self._clock = clock - self._clock, clock
        return new

    def _adopt(self, block: Block, children: Iterable[Block]) -> None:
        for child in children:
            child.parent = None
            child.above = block
            block.children += 1

    def peek(self, keys: Sequence[BlockKey]) -> int:
        """Length of the run that `match` would hold."""
        return longest_run(keys, self._by_key)  # type: ignore[arg-type]

    @property
    def content(self) -> KeysView[BlockKey]:
        """A live view of the keys that pages have."""
        return self._by_key.keys()

    def key_of(self, page: int) -> BlockKey | None:
        block = self._blocks[page]
        return block.key if block is not None else None

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

    def _entry(self, block: Block) -> Entry:
        """Makes a cached block, which no child needs, a candidate: the entry is for the heap."""
        self._clock = stamp = self._clock + 1
        block.entry = entry = (*self._policy.rank(block), stamp, block)
        return entry

    def _make_room(self, count: int) -> None:
        """Evict the lowest candidates until `count` pages are free."""
        free, heap = self._free, self._heap
        while len(free) < count:
            if not heap:
                self._evict_ancestor()
                continue
            entry = heappop(heap)
            block: Block = entry[-1]
            if block.entry is entry and not block.children:
                self._evict(block, count)

    def _evict_ancestor(self) -> None:
        """Every cached block left is an ancestor of a held one (held by a sequence that computed its own copy of it)."""
        cached = [block for block in self._by_key.values() if self._refs[block.page] == 0]
        block = min(cached, key=lambda block: (self._policy.rank(block), block.page))
        children = [child for child in self._by_key.values() if child.above is block]
        if children:
            self._orphans[block.key] = dict.fromkeys(children)
            block.children = 0
            for child in children:
                child.above, child.parent = None, block.key
        self._evict(block, 0)

    def _evict(self, block: Block, count: int) -> None:
        """Of a block that is above of none. While fewer than `count` pages are free, its ancestors go too, each as long
        as it is the lowest candidate: mostly whole chains do, and meet the heap but once."""
        refs, blocks, by_key, free, heap = self._refs, self._blocks, self._by_key, self._free, self._heap
        stored, removed, rank = self._stored, self._removed, self._policy.rank
        lacking, gone = count - len(free), 0
        while True:
            page, key, above = block.page, block.key, block.above
            del by_key[key]
            if not stored or stored.pop(key, True):
                removed[key] = None
            blocks[page] = block.entry = block.above = None
            free.append(page)
            gone += 1
            if above is None:
                if block.parent is not None:
                    self._leave_orphans(block, block.parent)
                break
            above.children = left = above.children - 1
            if left or refs[above.page]:
                break
            self._clock = stamp = self._clock + 1
            entry = (*rank(above), stamp, above)
            if gone >= lacking or (heap and heap[0] < entry):
                above.entry = entry
                heappush(heap, entry)
                break
            block = above
        self._cached -= gone

    def _leave_orphans(self, block: Block, parent: BlockKey) -> None:
        """An evicted block no longer waits for its parent."""
        del self._orphans[parent][block]
        if not self._orphans[parent]:
            del self._orphans[parent]

    # -- laws ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        table = list(zip(self._refs, self._blocks, strict=True))
        held = {n for n, (refs, _) in enumerate(table) if refs > 0}
        cached = {n for n, (refs, block) in enumerate(table) if refs == 0 and block is not None}
        assert all(refs >= 0 for refs in self._refs), "a page is held less than never"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not set(self._free) & (held | cached), "a page is free and in use"
        assert len(self._free) + len(cached) + len(held) == len(table), "pages were lost"
        assert self._cached == len(cached), f"{self._cached} cached counted, {len(cached)} found"
        blocks = {block.key: block for block in self._blocks if block is not None}
        assert blocks == self._by_key, "keys and pages do not map one to one"
        assert all(self._blocks[block.page] is block for block in blocks.values()), "a block is in another page"
        self._check_chains(blocks)
        candidates = {e[-1].page for e in self._heap if e[-1].entry is e}
        leaves = {block.page for block in blocks.values() if block.page in cached and not block.children}
        assert leaves <= candidates, "an evictable page is not among the candidates"

    def _check_chains(self, blocks: dict[BlockKey, Block]) -> None:
        here = set(blocks.values())
        above = {block: block.above for block in here if block.above is not None}
        assert set(above.values()) <= here, "a block that has gone is in a chain"
        counted = Counter(above.values())
        assert all(block.children == counted[block] for block in here), "child counts are wrong"
        waiting = {block: parent for parent, children in self._orphans.items() for block in children}
        assert waiting == {block: block.parent for block in here if block.parent is not None}, (
            "orphans were lost"
        )
        assert not waiting.keys() & above.keys(), "a block waits for a parent and has one"
        assert not self._orphans.keys() & blocks.keys(), "a parent that is here is waited for"
