"""Prefill and decode really are apart: shown by the processes' own counters."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.ask import stream
from tests.support.engine.prompts import english_ids
from tests.support.processes.launched import launched

PROMPT_TOKENS = 600
LAYERS, KV_HEADS, HEAD_DIM, FLOAT32_BYTES = 30, 3, 64, 4


@pytest.mark.real
async def test_the_decode_process_computes_no_prompt_token_and_gets_all_kv_over_the_data_plane(
    tmp_path: Path,
) -> None:
    flags = ("--model", "smollm2-135m", "--dtype", "float32", "--set", "prefill.chunk_tokens=128")
    with launched(tmp_path / "run", *flags) as cluster:
        before = {role: cluster.counters(role) for role in ("prefill", "decode")}
        async with httpx.AsyncClient(base_url=cluster.url) as client:
            answer = await stream(client, english_ids(PROMPT_TOKENS, skip=77), 8)
        assert answer.prompt_tokens == PROMPT_TOKENS
        assert answer.completion_tokens == 8
        cluster.wait_idle()
        after = {role: cluster.counters(role) for role in before}
        token_bytes = cluster.node("decode-0")["kv_token_bytes"]

    def gained(role: str, counter: str) -> float:
        return after[role][counter] - before[role].get(counter, 0.0)

    assert gained("decode", "prompt_tokens_computed") == 0
    assert gained("prefill", "prompt_tokens_computed") == PROMPT_TOKENS
    assert token_bytes == LAYERS * 2 * KV_HEADS * HEAD_DIM * FLOAT32_BYTES
    assert gained("decode", "bytes_received") >= PROMPT_TOKENS * token_bytes
    # Layers travelled while later ones were being computed: by the sender's count, and by both ends' monotonic clocks.
    assert gained("prefill", "layer_slices_sent_before_last_layer") > 0
    assert 0 < after["decode"]["landing_first_slice_at_s"] < after["prefill"]["last_layer_at_s"]
