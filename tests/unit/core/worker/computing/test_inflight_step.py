"""Launching a batch that only decodes is the general way, in one pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.core.worker.answers import Answer
from shared.core.worker.computing.inflight_step import InflightStep
from shared.core.worker.sequence import SequenceState
from shared.core.worker.steps import RunStep
from shared.protocol.sampling import SamplingParams

BLOCK = 4


def sequence(number: int, prompt: int, answered: int, left: int, spare: int, penalty: float) -> SequenceState:
    """With `answered` tokens said and `left` to say, and `spare` tokens of room beyond the last block."""
    computed = prompt + answered - 1
    sequence = SequenceState(
        attempt=f"a{number}",
        gateway="g",
        prompt_tokens=prompt,
        max_new_tokens=answered + left,
        sampling=SamplingParams(temperature=0.0, repetition_penalty=penalty),
        keys=(),
        tokens=bytes(4 * prompt),
        answer=Answer(0, list(range(7, 7 + answered))),
    )
    sequence.computed, sequence.wanted = computed, prompt + answered
    sequence.pages = list(range(computed // BLOCK + spare))
    return sequence


SEQUENCES = st.tuples(
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 20), st.integers(0, 3), st.sampled_from([1.0, 1.2])
)


@given(st.lists(SEQUENCES, min_size=1, max_size=5), st.integers(1, 10))
def test_it_launches_what_the_general_way_does(
    rows: list[tuple[int, int, int, int, float]], most: int
) -> None:
    def batch() -> list[SequenceState]:
        return [sequence(n, *row) for n, row in enumerate(rows)]

    sequences, inflight = batch(), InflightStep[SequenceState]()
    rooms = [len(s.pages) * BLOCK - s.computed for s in sequences]
    launched = inflight.launch_decoding(sequences, BLOCK, most)
    if min(rooms) <= 0:
        assert launched is None
        assert inflight.out is None
        assert not any(s.in_step for s in sequences)
        return
    up_to = min(most, *rooms, *(left for _, _, left, _, _ in rows))
    again = batch()
    assert launched == InflightStep[SequenceState]().launch([(s, 1) for s in again], up_to)
    assert inflight.out == [(s, 1) for s in sequences]
    assert all(s.in_step for s in sequences)


def test_who_fetches_stays_out_and_a_prompt_needs_the_general_way() -> None:
    fetching, decoding = sequence(0, 5, 2, 3, 2, 1.0), sequence(1, 5, 2, 3, 2, 1.0)
    fetching.fetching = 0
    inflight = InflightStep[SequenceState]()
    launched = inflight.launch_decoding([fetching, decoding], BLOCK, 1)
    assert isinstance(launched, RunStep)
    assert [s.attempt for s in launched.sequences] == ["a1"]
    assert InflightStep[SequenceState]().launch_decoding([fetching], BLOCK, 1) is None
    prompt = sequence(2, 5, 2, 3, 2, 1.0)
    prompt.computed = 3
    assert InflightStep[SequenceState]().launch_decoding([prompt], BLOCK, 1) is None
