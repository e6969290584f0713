"""Meaningless prompts of about a wanted length, for measurements."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

WORDS = """
    moon river stone light paper garden winter letter window silver mountain bridge market summer candle forest
    music travel morning colour shadow kitchen teacher village picture weather harvest journey lantern feather
""".split()  # noqa: SIM905
FEW, MANY = 50, 250


def never_seen() -> random.Random:
    """Source of texts that no earlier run has left in any cache."""
    return random.Random(uuid.uuid4().int)


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def words_for(tokens: int, count_tokens: Callable[[str], int], rng: random.Random) -> int:
    """How many words make this many tokens, for a tokenizer that can only be asked. Asks twice."""
    few, many = (count_tokens(text(rng, words)) for words in (FEW, MANY))
    return max(1, round(tokens * (MANY - FEW) / max(1, many - few)))
