"""What a prefill node's settings make of its engine and its steps."""

from __future__ import annotations

import msgspec
import pytest

from services.decode.config import Config as DecodeConfig
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
    engine = Config(model="m", stages=3, piece_tokens=99, threads=2).engine_config()
    assert (engine.model, engine.stages, engine.piece_tokens, engine.threads) == ("m", 3, 99, 2)
    assert Config().engine_config().stages == 1


def test_decode_steps_are_captured_on_decode_nodes_alone_unless_told() -> None:
    assert Config().engine_config().graph_rows == 0
    assert Config(graph_rows=8).engine_config().graph_rows == 8
    decode = DecodeConfig(staging_bytes=1 << 21).engine_config()
    assert (decode.graph_rows, decode.staging_bytes) == (64, 1 << 21)


@pytest.mark.parametrize("wrong", [{"graph_rows": "-1"}, {"graph_rows": "1025"}, {"staging_bytes": "1000"}])
def test_what_can_never_work_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, DecodeConfig, strict=False)
