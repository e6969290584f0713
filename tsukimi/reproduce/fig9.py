"""FAST'25, Fig 9, and arXiv, Table 1: how much of all prompts one global pool of a certain size finds."""

from __future__ import annotations

from tsukimi.reproduce.experiment import Inputs, Picture, Result, Row
from tsukimi.reproduce.paper import FIG_9, FIG_9_BLOCK_TOKENS, TABLE_1
from tsukimi.reproduce.pools import lru_hits
from tsukimi.simulate.trace import TRACE_BLOCK_TOKENS, read_rows


def fig9(inputs: Inputs) -> Result:
    rows = read_rows(inputs.trace)
    ours = {tokens: lru_hits(rows, tokens // TRACE_BLOCK_TOKENS, TRACE_BLOCK_TOKENS)[1] for tokens in FIG_9}
    return Result(
        name="fig9",
        title="hit rate of one global LRU pool by its capacity",
        setup=f"{len(rows)} requests of {inputs.trace.name} in their order, blocks of {TRACE_BLOCK_TOKENS} tokens.",
        unit="share of tokens",
        rows=[Row(f"{tokens:,} tokens", ours[tokens], FIG_9[tokens]) for tokens in FIG_9],
        remarks=[
            f"The papers' store has blocks of {FIG_9_BLOCK_TOKENS} tokens; the published traces name blocks of "
            f"{TRACE_BLOCK_TOKENS}. A continued dialogue then loses up to one block more, some 3 points at most."
        ],
        picture=Picture(
            "capacity (tokens)",
            "hit rate",
            {
                "ours": [(float(t), h) for t, h in ours.items()],
                "paper": [(float(t), h) for t, h in FIG_9.items()],
            },
            log_x=True,
        ),
    )


def table1(inputs: Inputs) -> Result:
    rows = read_rows(inputs.trace)
    capacities = [*TABLE_1["lru"], 1 << 40]
    ours = {blocks: lru_hits(rows, blocks, TRACE_BLOCK_TOKENS)[0] for blocks in capacities}
    return Result(
        name="table1",
        title="hit rate of one global LRU pool by its capacity, in blocks",
        setup=f"{len(rows)} requests of {inputs.trace.name} in their order.",
        unit="share of blocks",
        rows=[
            Row(
                f"{blocks:,} blocks" if blocks < 1 << 40 else "no limit",
                ours[blocks],
                TABLE_1["lru"].get(blocks),
            )
            for blocks in capacities
        ],
        remarks=[
            "The paper's values are of another trace (23,608 requests, arXiv version). With that trace as --trace they "
            "are comparable; with the conversation trace only the shape is."
        ],
    )
