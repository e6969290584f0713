"""The page pool: conservation laws under arbitrary use, and what is evicted first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.core.kv.eviction import Fifo, Lru
from shared.core.kv.pool import BlockPool

CHAINS = [[bytes([chain, block]) * 8 for block in range(6)] for chain in range(3)]


def stored(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Pages of a chain that was computed and released."""
    pages = pool.allocate(len(keys))
    assert pages is not None
    for i, page in enumerate(pages):
        pool.register(page, keys[i], keys[i - 1] if i else None)
    pool.unpin(pages)
    return pages


def test_pages_go_from_free_to_held_to_cached_and_back() -> None:
    pool = BlockPool(4)
    pages = stored(pool, CHAINS[0][:3])
    assert (pool.free, pool.held, pool.cached) == (1, 0, 3)
    assert pool.match(CHAINS[0]) == pages
    assert (pool.free, pool.held, pool.cached) == (1, 3, 0)
    assert pool.allocate(2) is None
    pool.unpin(pages)
    assert pool.allocate(4) is not None
    assert (pool.free, pool.held, pool.cached) == (0, 4, 0)
    assert pool.keys() == ()
    pool.check()


def test_hole_ends_the_hit() -> None:
    pool = BlockPool(8)
    keys = CHAINS[0]
    pages = pool.allocate(6)
    assert pages is not None
    for i in (0, 1, 3, 4, 5):
        pool.register(pages[i], keys[i], keys[i - 1] if i else None)
    pool.unpin(pages)
    assert pool.peek(keys) == 2
    assert pool.match(keys) == pages[:2]


def test_a_block_without_its_parent_is_no_prefix() -> None:
    pool = BlockPool(8)
    stored(pool, CHAINS[1])
    assert pool.match([CHAINS[0][0], *CHAINS[1][1:]]) == []


def test_children_go_before_parents_whatever_was_used_last() -> None:
    pool = BlockPool(6)
    keys = CHAINS[0][:3]
    pages = stored(pool, keys)
    for end in (2, 1):  # the head of the chain was used last
        pool.unpin(pool.match(keys[:end]))
    pool.take_changes()
    assert pool.allocate(4) is not None
    assert pool.take_changes() == ((), (keys[2],))
    assert pool.allocate(1) is not None
    assert pool.take_changes() == ((), (keys[1],))
    assert pool.match(keys) == pages[:1]
    pool.check()


@pytest.mark.parametrize(("policy", "survivor"), [(Lru(), 0), (Fifo(), 1)])
def test_the_policy_chooses_among_leaves(policy: Lru | Fifo, survivor: int) -> None:
    pool = BlockPool(2, policy)
    stored(pool, CHAINS[0][:1])
    stored(pool, CHAINS[1][:1])
    pool.unpin(pool.match(CHAINS[0][:1]))  # stored first, used last
    assert pool.allocate(1) is not None
    assert pool.keys() == (CHAINS[survivor][0],)


def test_the_first_page_of_a_block_computed_twice_keeps_the_key() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert pool.register(first[0], b"k" * 16, None)
    assert not pool.register(second[0], b"k" * 16, None)
    pool.unpin(second)
    pool.unpin(first)
    assert (pool.free, pool.cached) == (3, 1)
    assert pool.match([b"k" * 16]) == first
    pool.check()


def test_an_ancestor_of_a_held_copy_can_be_evicted_when_nothing_else_is_left() -> None:
    pool = BlockPool(4)
    keys = CHAINS[0][:2]
    stored(pool, keys[:1])
    own = pool.allocate(2)  # a sequence that computed its own copy of block 0, and block 1
    assert own is not None
    pool.register(own[0], keys[0], None)
    pool.register(own[1], keys[1], keys[0])
    assert pool.allocate(2) is not None
    assert pool.take_changes() == ((keys[1],), ())
    pool.check()


def test_a_parent_that_comes_back_is_kept_for_the_children_that_stayed() -> None:
    pool = BlockPool(4)
    keys = CHAINS[0][:2]
    stored(pool, keys[:1])
    own = pool.allocate(2)
    assert own is not None
    pool.register(own[1], keys[1], keys[0])
    rest = pool.allocate(2)
    assert rest is not None
    assert pool.key_of(own[1]) == keys[1]
    pool.check()
    pool.register(own[0], keys[0], None)
    pool.check()
    pool.unpin(own)
    assert pool.allocate(1) is not None
    assert pool.keys() == (keys[0],)
    pool.check()


def test_changes_are_net() -> None:
    pool = BlockPool(1)
    stored(pool, CHAINS[0][:1])
    page = pool.allocate(1)
    assert page is not None
    assert pool.take_changes() == ((), ())
    pool.register(page[0], CHAINS[0][0], None)
    assert pool.take_changes() == ((CHAINS[0][0],), ())
    assert pool.take_changes() == ((), ())


def test_misuse_is_refused() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="not held"):
        pool.unpin([0])
    with pytest.raises(ValueError, match="not held"):
        pool.register(0, b"k" * 16, None)


class PoolStory(RuleBasedStateMachine):
    """Share, compute, evict and abort in any order; the model is who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.held: list[list[int]] = []
        self.index: set[bytes] = set()

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        in_use = {p for pages in self.held for p in pages}
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > 7 - len(in_use))
        if pages is not None:
            assert len(set(pages)) == count
            assert not set(pages) & in_use
            self.held.append(pages)

    @rule(chain=st.integers(0, 2), blocks=st.integers(0, 6))
    def match(self, chain: int, blocks: int) -> None:
        keys = CHAINS[chain][:blocks]
        run = next((i for i, k in enumerate(keys) if k not in self.index), len(keys))
        assert self.pool.peek(keys) == run
        pages = self.pool.match(keys)
        assert [self.pool.key_of(p) for p in pages] == keys[:run]
        self.held.append(pages)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), chain=st.integers(0, 2))
    def compute_a_chain(self, data: st.DataObject, chain: int) -> None:
        pages = data.draw(st.sampled_from([pages for pages in self.held if pages]))
        for i, page in enumerate(pages[:6]):
            if self.pool.key_of(page) is None:
                keys = CHAINS[chain]
                new = keys[i] not in self.index
                assert self.pool.register(page, keys[i], keys[i - 1] if i else None) == new

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.unpin(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def free_and_used_never_meet(self) -> None:
        self.pool.check()
        added, removed = self.pool.take_changes()
        assert not set(added) & self.index
        assert set(removed) <= self.index
        self.index = (self.index | set(added)) - set(removed)
        assert self.index == set(self.pool.keys())
        assert self.pool.held == len({p for pages in self.held for p in pages})
        for page in range(7):
            assert self.pool.refs_of(page) == sum(pages.count(page) for pages in self.held)


test_pool_story = PoolStory.TestCase
PoolStory.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
