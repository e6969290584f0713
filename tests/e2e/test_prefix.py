"""The next turn of a conversation finds its KVCache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.launched import Launched, launched

BLOCK = 16

pytestmark = [pytest.mark.real]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with launched(tmp_path_factory.mktemp("prefix") / "run", "--model", "smollm2-135m") as running:
        yield running


def _chat(cluster: Launched, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    reply = httpx.post(
        f"{cluster.url}/v1/chat/completions", timeout=120,
        json={"messages": messages, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True},
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.slow
def test_the_second_turn_reports_the_reusable_prefix_rounded_down_to_a_block(cluster: Launched) -> None:
    messages = [
        {"role": "user", "content": "Tell me about the sea, the moon and the tides, in a few sentences. " * 4}
    ]
    first = _chat(cluster, messages, 60)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cluster.wait_idle()
    said = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And what of lakes?"}]
    second = _chat(cluster, messages, 10)
    # In the pool: the first prompt and all of its answer but the last token, whose KV nobody computed.
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"][:-1]
    now = second["prompt_token_ids"]
    same = next(
        (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now))
    )
    assert same > len(first["prompt_token_ids"]), "the second prompt does not continue the first answer"
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == same // BLOCK * BLOCK


@pytest.mark.slow
def test_a_long_shared_prefix_cuts_ttft_to_under_35_percent_of_cold(
    cluster: Launched, tmp_path: Path
) -> None:
    """`tsukimi bench prefix`: ratio of medians within one run."""
    report = tmp_path / "prefix.json"
    print(cluster.tsukimi("bench", "prefix", "--rounds", "3", "--json", str(report), timeout_s=240))
    assert json.loads(report.read_text())["ratio"] < 0.35
