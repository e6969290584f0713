"""Changes logits before the draw, as requests ask: penalties, then logit_bias, then bans by grammar and by min_tokens.

A row's result is a function of its own logits, parameters and past, in float64. Token counts are integers, so the order
of summation does not matter. Only the logits that a request names are touched, for all rows at once; only a grammar goes
over a whole row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from shared.engine.sampling.bias import added
from shared.protocol.sampling import SamplingParams

Ids = NDArray[np.int64]


class Row(Struct, frozen=True):
    """How the logits of one sequence are to be changed."""

    params: SamplingParams
    past: bytes = b""
    """Packed token ids, as in SequenceStep.past."""
    answered: int = 0
    """How many of the last tokens of `past` are the answer's."""
    allowed: bytes | None = None
    """The tokens that the grammar allows: one bit per id, lowest bit first. None: there is no grammar."""
    complete: bool = False
    """The grammar allows only an EOS token."""


def fault(row: Row, vocab_size: int) -> str:
    """Why the row's logits cannot be changed; empty if they can."""
    bias = row.params.logit_bias
    if bias and not (min(id_ for id_, _ in bias) >= 0 and max(id_ for id_, _ in bias) < vocab_size):
        return f"logit_bias names tokens outside the vocabulary of {vocab_size}"
    if row.past and int(_ids(row.past).max()) >= vocab_size:
        return f"the past has tokens outside the vocabulary of {vocab_size}"
    return ""


def reshape(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Change `logits` [rows, vocab], float64, in place. No row may have a fault."""
    _repeat(logits, rows)
    _count(logits, rows)
    _bias(logits, rows)
    _restrict(logits, rows)
    _lengthen(logits, rows)


def _repeat(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """The repetition penalty. An id may occur several times; all occurrences write the same value."""
    penalised = [(i, _ids(row.past)) for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if not penalised:
        return
    at = _pairs(penalised, logits.device)
    penalty = _column([row.params.repetition_penalty for row in rows], logits)[at[0]]
    found = logits[at]
    logits[at] = torch.where(found > 0, found / penalty, found * penalty)


def _count(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Presence and frequency penalties. They count the answer's tokens only."""
    counted = [
        (i, _answer(row))
        for i, row in enumerate(rows)
        if row.params.presence_penalty != 0.0 or row.params.frequency_penalty != 0.0
    ]
    if not counted:
        return
    vocab = logits.shape[1]
    keys, counts = np.unique(np.concatenate([i * vocab + ids for i, ids in counted]), return_counts=True)
    rows_at, ids_at = np.divmod(keys, vocab)
    frequency, presence = (
        np.array([getattr(row.params, name) for row in rows])[rows_at]
        for name in ("frequency_penalty", "presence_penalty")
    )
    at = torch.from_numpy(rows_at).to(logits.device), torch.from_numpy(ids_at).to(logits.device)
    logits[at] -= torch.from_numpy(counts * frequency + presence).to(logits.device)


def _bias(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    biased = [(i, id_, added(bias)) for i, row in enumerate(rows) for id_, bias in row.params.logit_bias]
    if biased:
        at = torch.tensor([(i, id_) for i, id_, _ in biased], device=logits.device).unbind(1)
        logits[at] += torch.tensor([bias for _, _, bias in biased], dtype=logits.dtype, device=logits.device)


def _restrict(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Ban all tokens that the row's grammar does not allow."""
    which = [i for i, row in enumerate(rows) if row.allowed is not None]
    vocab = logits.shape[1]
    size = (vocab + 7) // 8
    for i in which:
        allowed = np.frombuffer((rows[i].allowed or b"")[:size].ljust(size, b"\0"), np.uint8)
        banned = np.unpackbits(~allowed, count=vocab, bitorder="little").view(np.bool_)
        logits[i].masked_fill_(torch.from_numpy(banned).to(logits.device), -torch.inf)


def _lengthen(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Ban EOS tokens before min_tokens, unless the grammar allows nothing else."""
    banned = [
        (i, id_)
        for i, row in enumerate(rows)
        if row.answered < row.params.min_tokens and not row.complete
        for id_ in row.params.eos_token_ids
        if 0 <= id_ < logits.shape[1]
    ]
    if banned:
        logits[torch.tensor(banned, device=logits.device).unbind(1)] = -torch.inf


def _ids(packed: bytes) -> Ids:
    return np.frombuffer(packed, "<u4").astype(np.int64)


def _answer(row: Row) -> Ids:
    ids = _ids(row.past)
    return ids[len(ids) - row.answered :]


def _pairs(listed: Sequence[tuple[int, Ids]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All (row, id) pairs, as a pair of index tensors."""
    rows = np.repeat([i for i, _ in listed], [len(ids) for _, ids in listed]).astype(np.int64)
    ids = np.concatenate([ids for _, ids in listed])
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)
