from __future__ import annotations

import random

from tsukimi.prompts import never_seen, text, words_for


def test_every_prompt_is_another() -> None:
    rng = random.Random(1)
    assert len({text(rng, 20) for _ in range(50)}) == 50
    assert text(never_seen(), 20) != text(never_seen(), 20), "nor is it one of another run"


def test_the_length_is_found_by_asking() -> None:
    asked: list[str] = []

    def count_tokens(prompt: str) -> int:
        asked.append(prompt)
        return 7 + 3 * len(prompt.split())  # a template around it, three tokens a word

    assert words_for(600, count_tokens, random.Random(1)) == 200
    assert len(asked) == 2
    assert words_for(1, lambda prompt: 5, random.Random(1)) == 200, (
        "whoever counts nothing gets words for tokens"
    )
