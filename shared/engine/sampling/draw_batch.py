"""Draws the next tokens of a batch, vectorised over its rows.

A row's token is a function of its own logits, parameters and position. Every reduction runs along one row, in id order,
in float64, so other rows never change a draw. The gateway has checked the parameters; here they are only clamped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct

from shared.engine.sampling.draw import uniform
from shared.protocol.sampling import NO_TOKEN, TOP_LOGPROBS_MOST, SamplingParams, TokenLogprob

_FIRST_NUCLEUS = 1024
"""For top_p, first only this many of the likeliest tokens are sorted. Rows that need more are sorted whole."""


class Drawn(Struct, frozen=True):
    token: int = -1
    logprob: TokenLogprob | None = None
    error: str = ""
    """Why no token can be drawn from the row's logits; then `token` is -1. Empty if one was drawn."""


class Changed(Struct, frozen=True):
    """Rows of a batch that are drawn from changed logits instead of the model's."""

    rows: list[int]
    logits: torch.Tensor
    """[len(rows), vocab], float64."""

    def of(self, logits: torch.Tensor, which: list[int]) -> torch.Tensor:
        """Rows `which` of the batch: the changed logits if a row has them, else its row of `logits`."""
        if which == self.rows:
            return self.logits
        picked = logits[which].double()
        at = {row: i for i, row in enumerate(self.rows)}
        for i, row in enumerate(which):
            if row in at:
                picked[i] = self.logits[at[row]]
        return picked


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    changed: Changed | None = None,
) -> list[Drawn]:
    """Draw a token for each row of `logits` [rows, vocab]. positions[row] is the position of the drawn token in its
    sequence. Changed rows are drawn from their changed logits. Logprobs are always computed from `logits`."""
    sound = torch.isfinite(logits.amax(dim=1)).tolist()
    drawn = [Drawn() if ok else Drawn(error="logits are not finite") for ok in sound]
    if changed is not None:
        for row, some in zip(changed.rows, torch.isfinite(changed.logits.amax(dim=1)).tolist(), strict=True):
            if sound[row] and not some:
                sound[row], drawn[row] = False, Drawn(error=NO_TOKEN)
    rows = [row for row, ok in enumerate(sound) if ok]
    tokens = dict(enumerate(_argmax(logits)))
    if changed is not None:
        tokens.update(zip(changed.rows, _argmax(changed.logits), strict=True))
    warm = [row for row in rows if params[row].temperature > 0]
    if warm:
        at = [uniform(params[row].seed, positions[row]) for row in warm]
        drawn_from = logits[warm].double() if changed is None else changed.of(logits, warm)
        chosen = _inverse_cdf(_weights(drawn_from, [params[row] for row in warm]), at)
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


def _argmax(logits: torch.Tensor) -> list[int]:
    """For each row, the lowest id that has the largest logit. On the CPU, numpy is many times faster than torch."""
    if logits.device.type == "cpu" and logits.dtype != torch.bfloat16:
        return [int(token) for token in logits.numpy().argmax(axis=1)]
    return [int(token) for token in logits.argmax(dim=1).tolist()]


def _weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Unnormalised probabilities [rows, vocab] after temperature, min_p, top_k and top_p, in this order. Ties at a cut
    are kept. Overwrites `logits`: at this size, allocating memory costs more than arithmetic."""
    temperature = logits.new_tensor([p.temperature for p in params])[:, None]
    weights = logits.sub_(logits.amax(dim=1, keepdim=True)).div_(temperature).exp_()
    vocab = weights.shape[1]
    cut = [row for row, p in enumerate(params) if p.min_p > 0]
    if cut:
        _cut(weights, cut, weights.new_tensor([min(params[row].min_p, 1.0) for row in cut]))
    cut = [row for row, p in enumerate(params) if 0 < p.top_k < vocab]
    if cut:
        last = weights.new_tensor([[params[row].top_k - 1] for row in cut]).long()
        best = weights[cut].topk(int(last.max()) + 1, dim=1).values
        _cut(weights, cut, best.gather(1, last)[:, 0])
    cut = [row for row, p in enumerate(params) if p.top_p < 1]
    if cut:
        wanted = weights.new_tensor([max(0.0, params[row].top_p) for row in cut])
        _cut(weights, cut, _nucleus(weights[cut], wanted))
    return weights


def _cut(weights: torch.Tensor, rows: Sequence[int], least: torch.Tensor) -> None:
    """In each of `rows`, set the weights below its threshold in `least` to 0."""
    for row, threshold in zip(rows, least.unbind(), strict=True):
        weights[row].masked_fill_(weights[row] < threshold, 0.0)


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """For each row, the least weight in its nucleus: the smallest set of likeliest tokens whose share of the row's total
    weight is at least top_p."""
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
    """For each row, the token whose interval of the cumulative weights, in order of ids, contains the row's `at`, scaled
    from [0, 1) to the total weight. Overwrites `weights`."""
    cumulated = weights.cumsum_(dim=1)
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
    counts = [min(max(p.top_logprobs or 0, 0), TOP_LOGPROBS_MOST, logits.shape[1]) for p in params]
    best = logprobs.topk(max(counts), dim=1)
    result = []
    for row, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        pairs = zip(best.indices[row, :count].tolist(), best.values[row, :count].tolist(), strict=True)
        top = sorted(
            ((id_, value) for id_, value in pairs if value > -torch.inf), key=lambda p: (-p[1], p[0])
        )
        result.append(TokenLogprob(float(logprobs[row, token]), tuple(top)))
    return result
