"""Prefill and decode really are apart: shown by the processes' own counters (issue 2, bar 4)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.ask import stream
from tests.support.launched import launched
from tests.support.model import model_folder
from tests.support.prompts import english_ids

PROMPT_TOKENS = 600


@pytest.mark.real
async def test_the_decode_process_computes_no_prompt_token_and_gets_all_kv_over_the_data_plane(
    tmp_path: Path,
) -> None:
    flags = ("--model", str(model_folder()), "--dtype", "float32", "--set", "prefill.chunk_tokens=128")
    with launched(tmp_path / "run", *flags) as cluster:
        before = {role: cluster.counters(role) for role in ("prefill", "decode")}
        async with httpx.AsyncClient(base_url=cluster.url) as client:
            answer = await stream(client, english_ids(PROMPT_TOKENS, skip=77), 8)
        assert answer.prompt_tokens == PROMPT_TOKENS
        assert answer.completion_tokens == 8
        cluster.wait_idle()
        gained = {
            role: {k: v - before[role].get(k, 0) for k, v in cluster.counters(role).items()}
            for role in before
        }
        decode = cluster.counters("decode")
        spec = next(n for n in cluster.status()["nodes"] if n["role"] == "decode")
    assert gained["decode"]["prompt_tokens_computed"] == 0
    assert gained["prefill"]["prompt_tokens_computed"] == PROMPT_TOKENS
    token_bytes = spec["kv_token_bytes"]
    assert token_bytes == 30 * 2 * 3 * 64 * 4
    assert gained["decode"]["bytes_received"] >= PROMPT_TOKENS * token_bytes
    # Both clocks are this host's monotonic clock.
    assert decode["landing_first_slice_at_s"] < cluster_last_layer_at(gained, before, "prefill")


def cluster_last_layer_at(
    gained: dict[str, dict[str, float]], before: dict[str, dict[str, float]], role: str
) -> float:
    return gained[role]["last_layer_at_s"] + before[role].get("last_layer_at_s", 0.0)
