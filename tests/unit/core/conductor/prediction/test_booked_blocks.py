from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.core.conductor.prediction.booked_blocks import LINGER_S, BookedBlocks
from tests.support.worlds.cluster_of import keys

HEAD = keys(*range(40))


def chain(*path: int) -> tuple[bytes, ...]:
    """Keys that name a block and everything before it."""
    return tuple(repr(path[: i + 1]).encode() for i in range(len(path)))


def test_a_prompt_finds_what_its_node_will_have_computed() -> None:
    booked = BookedBlocks(2.0)
    booked.book("p-0", "a/0/0", HEAD[:20], 0.0)
    assert booked.run("p-0", HEAD[:30], 0) == 20
    assert booked.run("p-0", HEAD[:30], 5) == 20
    assert booked.run("p-0", HEAD[:12], 0) == 12
    assert booked.run("p-1", HEAD[:30], 3) == 3
    assert booked.run("p-0", keys(*range(100, 120)), 0) == 0


def test_bookings_continue_one_another() -> None:
    booked = BookedBlocks(2.0)
    booked.book("p-0", "b/0/0", HEAD[:30], 0.0)
    booked.book("p-0", "a/0/0", HEAD[:20], 0.0)
    assert booked.run("p-0", HEAD, 0) == 30


def test_a_booking_ends_a_little_after_its_attempt() -> None:
    booked = BookedBlocks(2.0)
    booked.book("p-0", "a/0/0", HEAD[:20], 0.0)
    booked.reported("p-0", (), 0.1)
    assert booked.run("p-0", HEAD, 0) == 20, "it is on its way to the node"
    booked.reported("p-0", ("a/0/0",), 1.0)
    booked.reported("p-0", ("a/0/0",), 9.0)
    booked.reported("p-0", (), 9.1)
    assert booked.run("p-0", HEAD, 0) == 20, "its blocks' events are on their way"
    booked.reported("p-0", (), 9.2 + LINGER_S)
    assert booked.run("p-0", HEAD, 0) == 0
    assert booked.nodes() == ()


def test_a_booking_that_no_report_ever_shows_is_lost() -> None:
    booked = BookedBlocks(2.0)
    booked.book("p-0", "a/0/0", HEAD[:20], 0.0)
    booked.reported("p-0", (), 2.1)
    booked.reported("p-0", (), 2.2 + LINGER_S)
    assert booked.run("p-0", HEAD, 0) == 0


def test_a_released_booking_and_one_of_a_lost_node_are_gone() -> None:
    booked = BookedBlocks(2.0)
    booked.book("p-0", "a/0/0", HEAD[:20], 0.0)
    booked.book("p-1", "b/0/0", HEAD[:20], 0.0)
    booked.released("p-0", "a/0/0")
    booked.keep(["p-0"])
    assert booked.nodes() == ()


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@given(prompts=st.lists(PATHS, max_size=8), wanted=PATHS, held=st.integers(0, 12))
def test_it_claims_exactly_what_the_bookings_cover(
    prompts: list[list[int]], wanted: list[int], held: int
) -> None:
    booked, held = BookedBlocks(2.0), min(held, len(wanted))
    for i, prompt in enumerate(prompts):
        booked.book("p-0", f"r{i}/0/0", chain(*prompt), 0.0)
    everything = {key for prompt in prompts for key in chain(*prompt)}
    run = held
    while run < len(wanted) and chain(*wanted)[run] in everything:
        run += 1
    assert booked.run("p-0", chain(*wanted), held) == run
