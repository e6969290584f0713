from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.core.conductor.block_index import BlockIndex

NODES = ["a", "b", "c", "d"]


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


CHAIN = [key(i) for i in range(12)]


@pytest.fixture
def index() -> Iterator[BlockIndex]:
    index = BlockIndex()
    for node in NODES:
        index.add(node)
    yield index
    index.check()


def test_hole_ends_the_hit(index: BlockIndex) -> None:
    index.store("a", CHAIN[:8])
    index.remove("a", [CHAIN[3]])
    assert index.match(CHAIN).run("a") == 3


def test_blocks_without_their_parents_are_no_hit(index: BlockIndex) -> None:
    index.store("a", CHAIN[2:6])
    match = index.match(CHAIN)
    assert (match.run("a"), match.run_of_any("ab"), match.span("a", 2)) == (0, 0, 2)
    index.store("c", CHAIN[:2])
    match = index.match(CHAIN)
    assert (match.run("a"), match.run("c"), match.span("a", 2), match.run_of_any("ac")) == (0, 2, 6, 6)


def test_some_nodes_hold_together_what_none_holds_alone(index: BlockIndex) -> None:
    index.store("a", CHAIN[:3] + CHAIN[5:7])
    index.store("b", CHAIN[2:5])
    match = index.match(CHAIN)
    assert (match.run("a"), match.run("b"), match.run_of_any("ab"), match.run_of_any("cd")) == (3, 0, 7, 0)
    assert match.span("b", 3) == 5


def test_one_unknown_key_does_not_stop_the_rest_of_a_batch(index: BlockIndex) -> None:
    index.store("a", CHAIN[:4])
    index.remove("a", [CHAIN[3], key(999), CHAIN[2]])
    assert index.match(CHAIN).run("a") == 2
    assert len(index) == index.held("a") == 2


def test_a_dropped_node_leaves_nothing_and_its_slot_is_used_again(index: BlockIndex) -> None:
    index.store("a", CHAIN)
    index.store("c", CHAIN[:2])
    index.drop("a")
    index.add("e")
    index.store("e", CHAIN[:1])
    match = index.match(CHAIN)
    assert [match.run(n) for n in "ace"] == [0, 2, 1]
    assert len(index) == 2


def test_unknown_nodes_are_ignored(index: BlockIndex) -> None:
    index.store("nobody", CHAIN)
    index.remove("nobody", CHAIN)
    index.drop("nobody")
    assert index.match(CHAIN).run("nobody") == 0
    assert index.match([]).run_of_any("ab") == 0


def test_a_million_unique_prompts_stay_within_the_bound() -> None:
    index = BlockIndex(max_blocks=1000)
    index.add("a")
    for start in range(0, 1_000_000, 10_000):
        index.store("a", [key(i) for i in range(start, start + 10_000)])
        assert len(index) <= 1000
    assert index.match([key(999_999)]).run("a") == 1
    index.check()


@given(
    held=st.dictionaries(st.sampled_from(NODES), st.sets(st.integers(0, 11)), max_size=4),
    prompt=st.integers(0, 12),
)
def test_runs_equal_a_walk_for_each_node_and_pair(held: dict[str, set[int]], prompt: int) -> None:
    index = BlockIndex()
    for node in NODES:
        index.add(node)
    for node, blocks in held.items():
        index.store(node, [key(i) for i in blocks])

    def walk(nodes: list[str]) -> int:
        for i in range(prompt):
            if not any(i in held.get(node, ()) for node in nodes):
                return i
        return prompt

    match = index.match(CHAIN[:prompt])
    for node in NODES:
        assert match.run(node) == walk([node])
        assert match.run_of_any([node, "b"]) == walk([node, "b"])
    index.check()


KEYS = st.lists(st.integers(0, 20).map(key), max_size=12)


class IndexAgainstSets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.model: dict[str, set[bytes]] = {}

    @rule(node=st.sampled_from(NODES))
    def add(self, node: str) -> None:
        self.index.add(node)
        self.model.setdefault(node, set())

    @rule(node=st.sampled_from(NODES), keys=KEYS)
    def store(self, node: str, keys: list[bytes]) -> None:
        self.index.store(node, keys)
        if node in self.model:
            self.model[node].update(keys)

    @rule(node=st.sampled_from(NODES), keys=KEYS)
    def remove(self, node: str, keys: list[bytes]) -> None:
        self.index.remove(node, keys)
        self.model.get(node, set()).difference_update(keys)

    @rule(node=st.sampled_from(NODES), keys=KEYS)
    def replace(self, node: str, keys: list[bytes]) -> None:
        self.index.replace(node, keys)
        if node in self.model:
            self.model[node] = set(keys)

    @rule(node=st.sampled_from(NODES))
    def drop(self, node: str) -> None:
        self.index.drop(node)
        self.model.pop(node, None)

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert {n: self.index.held(n) for n in self.model} == {n: len(k) for n, k in self.model.items()}
        assert (
            len(self.index) == len(set().union(*self.model.values())) if self.model else not len(self.index)
        )


IndexAgainstSets.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestIndexAgainstSets = IndexAgainstSets.TestCase
