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

from shared.core.blocks import longest_run
from shared.core.eviction import EvictionPolicy, Lru, PageUse
from shared.protocol.ids import BlockKey

Entry = tuple[int, ...]
"""(*rank, stamp, page) in the eviction heap: flat, since comparing them is what takes the time."""


class BlockPool:
    """Mutated by every method but `peek`, `key_of`, `refs_of`, `keys` and the counts. Knows no time and no bytes."""

    def __init__(self, pages: int, policy: EvictionPolicy | None = None, *, keep: bool = True) -> None:
        """`keep` off: pages are given no keys, so that nothing stays cached."""
        self.keeps = keep
        self._policy = policy or Lru()
        self.total = pages
        self._refs = [0] * pages
        self._keys: list[BlockKey | None] = [None] * pages
        self._uses = [PageUse() for _ in range(pages)]
        self._above = [-1] * pages
        """The page of a block's parent; -1: there is no such page."""
        self._children = [0] * pages
        """How many pages have a page above them."""
        self._orphaned: dict[int, BlockKey] = {}
        """Page -> its block's parent, which is not here: hardly ever any."""
        self._orphans: dict[BlockKey, dict[int, None]] = {}
        """The same by parent."""
        self._stamps = [0] * pages
        """Names the page's live entry in the eviction heap; 0: none."""
        self._free = list(range(pages - 1, -1, -1))
        self._by_key: dict[BlockKey, int] = {}
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
        where, uses, refs, revived = self._by_key, self._uses, self._refs, 0
        for key in keys:
            if key not in where:
                break
            page = where[key]
            held = refs[page]
            if held == 0:
                revived += 1
                self._stamps[page] = 0
            refs[page] = held + 1
            uses[page].uses += 1
            run.append(page)
        self._cached -= revived
        return run

    def unpin(self, pages: Sequence[int]) -> None:
        """Let go of pages, each once per time it was held. Those nobody holds any more become cached, or free."""
        self._clock = clock = self._clock + 1
        refs, keys, uses, children, free = self._refs, self._keys, self._uses, self._children, self._free
        if not self._by_key and set(map(refs.__getitem__, pages)) == {1} and len(set(pages)) == len(pages):
            for page in pages:
                refs[page] = 0
            free.extend(reversed(pages))
            return
        others = 0
        for page in reversed(pages):
            left = refs[page] - 1
            if left:
                if left < 0:
                    raise ValueError(f"page {page} is not held")
                refs[page] = left
                others += 1
                continue
            refs[page] = 0
            if keys[page] is None:
                free.append(page)
                others += 1
                continue
            uses[page].used_at = clock
            if not children[page]:
                heappush(self._heap, self._entry(page))
        self._cached += len(pages) - others
        if len(self._heap) > 2 * len(refs) + 64:
            self._heap = [e for e in self._heap if self._stamps[e[-1]] == e[-2]]
            heapify(self._heap)

    # -- what pages contain ----------------------------------------------------------------------------------------

    def register(self, page: int, key: BlockKey, parent: BlockKey | None) -> bool:
        """Say that a held page contains the block `key`, complete. False if another page has it already."""
        return self.register_all([(page, key, parent)]) == 1

    def register_all(self, blocks: Iterable[tuple[int, BlockKey, BlockKey | None]]) -> int:
        """`register` for many (page, key, parent); how many of them are new."""
        if not self.keeps:
            return 0
        refs, keys, by_key, uses = self._refs, self._keys, self._by_key, self._uses
        stored, removed, orphans, clock = self._stored, self._removed, self._orphans, self._clock
        aboves, children = self._above, self._children
        above, last = -1, None
        for page, key, parent in blocks:
            if refs[page] <= 0:
                raise ValueError(f"page {page} is not held")
            if key in by_key:
                continue
            if keys[page] is not None:
                raise ValueError(f"page {page} already contains another block")
            clock += 1
            use = uses[page]
            use.stored_at, use.uses = clock, 1
            keys[page] = key
            by_key[key] = page
            if parent is not None:
                if parent is not last:  # mostly it is: chains come in order
                    above = by_key.get(parent, -1)
                if above >= 0:
                    aboves[page] = above
                    children[above] += 1
                else:
                    self._orphaned[page] = parent
                    orphans.setdefault(parent, {})[page] = None
            if orphans and key in orphans:
                self._adopt(page, orphans.pop(key))
            if not removed or removed.pop(key, True):
                stored[key] = None
            above, last = page, key
        new, self._clock = clock - self._clock, clock
        return new

    def _adopt(self, page: int, children: Iterable[int]) -> None:
        for child in children:
            del self._orphaned[child]
            self._above[child] = page
            self._children[page] += 1

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

    def _entry(self, page: int) -> Entry:
        """Makes a cached page, which no child needs, a candidate: the entry is for the heap."""
        self._clock = self._stamps[page] = stamp = self._clock + 1
        return (*self._policy.rank(self._uses[page]), stamp, page)

    def _make_room(self, count: int) -> None:
        """Evict the lowest candidates until `count` pages are free."""
        stamps, children, free, heap = self._stamps, self._children, self._free, self._heap
        while len(free) < count:
            if not heap:
                self._evict_ancestor()
                continue
            entry = heappop(heap)
            page = entry[-1]
            if stamps[page] == entry[-2] and not children[page]:
                self._evict(page, count)

    def _evict_ancestor(self) -> None:
        """Every cached page left is an ancestor of a held one (held by a sequence that computed its own copy of it)."""
        cached = [page for page in self._by_key.values() if self._refs[page] == 0]
        page = min(cached, key=lambda page: (self._policy.rank(self._uses[page]), page))
        key = self._keys[page]
        assert key is not None
        children = {child: None for child, above in enumerate(self._above) if above == page}
        if children:
            self._orphans[key] = children
            self._orphaned.update(dict.fromkeys(children, key))
            self._children[page] = 0
            for child in children:
                self._above[child] = -1
        self._evict(page, 0)

    def _evict(self, page: int, count: int) -> None:
        """Of a page that no page has above it. While fewer than `count` are free, its ancestors go too, each as long as
        it is the lowest candidate: mostly whole chains do, and meet the heap but once."""
        keys, aboves, children, refs = self._keys, self._above, self._children, self._refs
        by_key, stored, removed = self._by_key, self._stored, self._removed
        free, heap = self._free, self._heap
        rank, lacking, gone = self._policy.rank, count - len(free), 0
        while True:
            key, above = keys[page], aboves[page]
            assert key is not None
            del by_key[key]
            if not stored or stored.pop(key, True):
                removed[key] = None
            keys[page] = None
            self._stamps[page] = 0
            free.append(page)
            gone += 1
            if above < 0:
                if page in self._orphaned:
                    self._leave_orphans(page)
                break
            aboves[page] = -1
            children[above] = left = children[above] - 1
            if left or refs[above]:
                break
            self._clock = self._stamps[above] = stamp = self._clock + 1
            entry = (*rank(self._uses[above]), stamp, above)
            if gone >= lacking or (heap and heap[0] < entry):
                heappush(heap, entry)
                break
            page = above
        self._cached -= gone

    def _leave_orphans(self, page: int) -> None:
        """An evicted page no longer waits for its parent."""
        parent = self._orphaned.pop(page)
        del self._orphans[parent][page]
        if not self._orphans[parent]:
            del self._orphans[parent]

    # -- laws ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        table = list(zip(self._refs, self._keys, strict=True))
        held = [n for n, (refs, _) in enumerate(table) if refs > 0]
        cached = [n for n, (refs, key) in enumerate(table) if refs == 0 and key is not None]
        assert all(refs >= 0 for refs in self._refs), "a page is held less than never"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not set(self._free) & (set(held) | set(cached)), "a page is free and in use"
        assert len(self._free) + len(cached) + len(held) == len(table), "pages were lost"
        assert self._cached == len(cached), f"{self._cached} cached counted, {len(cached)} found"
        keyed = {key: n for n, key in enumerate(self._keys) if key is not None}
        assert keyed == self._by_key, "keys and pages do not map one to one"
        self._check_chains(keyed)
        candidates = {e[-1] for e in self._heap if self._stamps[e[-1]] == e[-2]}
        leaves = {n for n in cached if not self._children[n]}
        assert leaves <= candidates, "an evictable page is not among the candidates"

    def _check_chains(self, keyed: dict[BlockKey, int]) -> None:
        pages = set(keyed.values())
        above = {page: parent for page, parent in enumerate(self._above) if parent >= 0}
        assert above.keys() | set(above.values()) <= pages, "a page of no content is in a chain"
        counted = Counter(above.values())
        assert self._children == [counted[page] for page in range(self.total)], "child counts are wrong"
        waiting = {page: parent for parent, children in self._orphans.items() for page in children}
        assert waiting == self._orphaned, "orphans were lost"
        assert waiting.keys() <= pages - above.keys(), (
            "a page waits for a parent and has one, or has no content"
        )
        assert not self._orphans.keys() & keyed.keys(), "a parent that is here is waited for"
