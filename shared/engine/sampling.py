"""The draw of the next tokens of a batch, vectorised over its rows.

A row's token is a function of its own logits, parameters and position: every reduction runs along a row, in id order,
in float64, so neighbours never change a draw. Parameters were checked by the gateway; here they are only clamped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct

from shared.engine.draw import uniform
from shared.protocol.sampling import SamplingParams, TokenLogprob

MAX_TOP_LOGPROBS = 20
_FIRST_NUCLEUS = 1024
"""Likeliest tokens looked at for top_p before the whole row is sorted."""


class Drawn(Struct, frozen=True):
    token: int = -1
    logprob: TokenLogprob | None = None
    error: str = ""
    """Set when the row's logits are not numbers one can draw from; there is no token then."""


class Changed(Struct, frozen=True):
    """Rows of a batch whose draw is from other logits than the model's."""

    rows: list[int]
    logits: torch.Tensor
    """[len(rows), vocab], float64."""

    def put_into(self, picked: torch.Tensor, which: Sequence[int]) -> None:
        """`picked` holds rows `which` of the batch."""
        at = {row: i for i, row in enumerate(which)}
        pairs = [(at[row], i) for i, row in enumerate(self.rows) if row in at]
        if pairs:
            to, source = zip(*pairs, strict=True)
            picked[list(to)] = self.logits[list(source)]


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    changed: Changed | None = None,
) -> list[Drawn]:
    """Draw a token for each row of `logits` [rows, vocab], which stands at positions[row] of its sequence; for those
    that are changed from what they were changed to. Logprobs are of `logits` alone."""
    sound = torch.isfinite(logits.amax(dim=1)).tolist()
    drawn = [Drawn() if ok else Drawn(error="logits are not finite") for ok in sound]
    if changed is not None:
        for row, some in zip(changed.rows, torch.isfinite(changed.logits.amax(dim=1)).tolist(), strict=True):
            if sound[row] and not some:
                sound[row], drawn[row] = False, Drawn(error="no token is allowed")
    rows = [row for row, ok in enumerate(sound) if ok]
    tokens = dict(zip(rows, logits[rows].argmax(dim=1).tolist(), strict=True))
    if changed is not None:
        best = zip(changed.rows, changed.logits.argmax(dim=1).tolist(), strict=True)
        tokens.update((row, token) for row, token in best if sound[row])
    warm = [row for row in rows if params[row].temperature > 0]
    if warm:
        at = [uniform(params[row].seed, positions[row]) for row in warm]
        heat = logits[warm].double()
        if changed is not None:
            changed.put_into(heat, warm)
        chosen = _inverse_cdf(_weights(heat, [params[row] for row in warm]), at)
        tokens.update(zip(warm, chosen, strict=True))
    wanted = [row for row in rows if params[row].top_logprobs is not None]
    told = dict(
        zip(
            wanted,
            _logprobs(logits[wanted], [params[r] for r in wanted], [tokens[r] for r in wanted]),
            strict=True,
        )
    )
    for row in rows:
        drawn[row] = Drawn(tokens[row], told.get(row))
    return drawn


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Unnormalised probabilities [rows, vocab] after temperature, then min_p, top_k, top_p; ties at a cut are kept."""
    temperature = logits.new_tensor([p.temperature for p in params])[:, None]
    weights = torch.exp((logits - logits.amax(dim=1, keepdim=True)) / temperature)
    vocab = weights.shape[1]
    cut = [row for row, p in enumerate(params) if p.min_p > 0]
    if cut:
        least = weights.new_tensor([min(params[row].min_p, 1.0) for row in cut])[:, None]
        weights[cut] = torch.where(weights[cut] >= least, weights[cut], 0.0)
    cut_k = [(row, p.top_k) for row, p in enumerate(params) if 0 < p.top_k < vocab]
    if cut_k:
        rows = [row for row, _ in cut_k]
        best = weights[rows].topk(max(k for _, k in cut_k), dim=1).values
        last = best.gather(1, torch.tensor([[k - 1] for _, k in cut_k], device=weights.device))
        weights[rows] = torch.where(weights[rows] >= last, weights[rows], 0.0)
    cut_p = [row for row, p in enumerate(params) if p.top_p < 1]
    if cut_p:
        kept = weights[cut_p]
        threshold = _nucleus(kept, kept.new_tensor([max(0.0, params[row].top_p) for row in cut_p]))
        weights[cut_p] = torch.where(kept >= threshold[:, None], kept, 0.0)
    return weights


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Per row the least weight that belongs to the smallest set of likeliest tokens with a share of at least top_p."""
    wanted = weights.cumsum(dim=1)[:, -1] * top_p
    size = min(_FIRST_NUCLEUS, weights.shape[1])
    threshold = torch.zeros_like(wanted)
    open_rows = torch.arange(len(weights), device=weights.device)
    while len(open_rows):
        best = weights[open_rows].topk(size, dim=1).values
        reached = best.cumsum(dim=1) >= wanted[open_rows, None]
        at = reached.int().argmax(dim=1)
        threshold[open_rows] = best.gather(1, at[:, None])[:, 0]
        if size == weights.shape[1]:
            break
        open_rows = open_rows[~reached[:, -1]]
        size = weights.shape[1]
    return threshold


def _inverse_cdf(weights: torch.Tensor, at: Sequence[float]) -> list[int]:
    """The token whose interval of the cumulated weights, in order of ids, holds each of `at` in [0, 1)."""
    cumulated = weights.cumsum(dim=1)
    total = cumulated[:, -1]
    target = torch.minimum(total * total.new_tensor(at), torch.nextafter(total, torch.zeros_like(total)))
    found: list[int] = torch.searchsorted(cumulated, target[:, None], right=True)[:, 0].tolist()
    return found


def _logprobs(
    logits: torch.Tensor, params: Sequence[SamplingParams], tokens: Sequence[int]
) -> list[TokenLogprob]:
    if not params:
        return []
    shifted = logits.double() - logits.amax(dim=1, keepdim=True)
    logprobs = shifted - shifted.exp().cumsum(dim=1)[:, -1:].log()
    counts = [min(max(p.top_logprobs or 0, 0), MAX_TOP_LOGPROBS, logits.shape[1]) for p in params]
    best = logprobs.topk(max(counts), dim=1)
    result = []
    for row, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        pairs = zip(best.indices[row, :count].tolist(), best.values[row, :count].tolist(), strict=True)
        top = sorted(
            ((id_, value) for id_, value in pairs if value > -torch.inf), key=lambda p: (-p[1], p[0])
        )
        result.append(TokenLogprob(float(logprobs[row, token]), tuple(top)))
    return result
