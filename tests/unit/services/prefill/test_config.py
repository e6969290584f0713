"""What a prefill node's settings make of its engine and its steps."""

from __future__ import annotations

import pytest

from services.prefill.config import Config


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (Config(), 512),
        (Config(stages=2), 8192),
        (Config(chunk_tokens=64), 64),
        (Config(stages=2, chunk_tokens=1024), 1024),
    ],
)
def test_steps_are_long_where_a_pipeline_has_to_stay_full(config: Config, tokens: int) -> None:
    assert config.step_tokens == tokens


def test_the_engine_is_told_of_its_stages() -> None:
    engine = Config(model="m", stages=3, piece_tokens=99, threads=2).engine()
    assert (engine.model, engine.stages, engine.piece_tokens, engine.threads) == ("m", 3, 99, 2)
    assert Config().engine().stages == 1
