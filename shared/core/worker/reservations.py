"""Who gets a place at a decode node: what fits it, while there is room."""

from __future__ import annotations

from shared.core.costs.model import step_s
from shared.core.kv.block_keys import blocks_for
from shared.core.kv.pool import BlockPool
from shared.core.worker import events as w
from shared.core.worker.attempts import AttemptTable
from shared.core.worker.computing.predictions import Predictions
from shared.core.worker.computing.prefix import take_pages
from shared.core.worker.config import DecodeConfig
from shared.core.worker.decode_sequence import DecodeSequence
from shared.core.worker.validation import bad_past, bad_tail, bad_tokens, misfit, never_fits, overloaded
from shared.protocol.errors import TsukimiError
from shared.protocol.requests import ReserveRequest

RETRY_GUESS_S = 1.0


class Reservations:
    """The door of one decode machine. Whoever comes in has pages for its prompt and some of its answer."""

    def __init__(
        self,
        config: DecodeConfig,
        pool: BlockPool,
        table: AttemptTable[DecodeSequence],
        predictions: Predictions,
    ) -> None:
        self._config = config
        self._pool = pool
        self._table = table
        self._predictions = predictions

    def reserve(self, event: w.ReserveAsked, now: float) -> DecodeSequence | None:
        """A new sequence with its pages, accepted; None if it was refused, which is answered here."""
        request, table = event.request, self._table
        error = self._unfit(request) or table.admit_owner(request, now)
        sequence = DecodeSequence(request)
        if error is None and sequence.local and self.too_slow(request):
            error = overloaded("steps would become too long", self.room_in_s())
        if error is None and not self._take_room(sequence):
            error = overloaded(f"{self._config.node} has no room", self.room_in_s())
        if error is not None:
            table.refuse(event.ask, request, error)
            return None
        table.accept(sequence)
        sequence.came_s = now
        return sequence

    def _unfit(self, request: ReserveRequest) -> TsukimiError | None:
        config, prompt = self._config, request.prompt_tokens
        return (
            misfit(config, request, prompt)
            or (bad_tokens(config, request.local.tokens, prompt) if request.local else None)
            or (bad_tail(config, request) if config.token_ids else None)
            or bad_past(config, request)
            or never_fits(config, prompt + min(1, request.max_new_tokens - 1))
        )

    def too_slow(self, request: ReserveRequest) -> bool:
        """Whether steps with one more such sequence would be longer than its conductor allows. A lone one always runs."""
        running, most = len(self._table.active), self._config.max_running
        if not request.tbt_limit_s or not running:
            return False
        tokens = sum(s.wanted for s in self._table.active.values()) + request.prompt_tokens
        requests = running + 1
        if requests > most:
            requests, tokens = most, tokens * most // requests
        return step_s(self._predictions.cost, requests, tokens) > request.tbt_limit_s

    def _first_blocks(self, request: ReserveRequest) -> int:
        """What is reserved at once, as far as there are pages at all. The last token's KV is never computed."""
        tokens = request.prompt_tokens + min(request.max_new_tokens - 1, self._config.headroom_tokens)
        return min(blocks_for(tokens, self._config.block_tokens), self._config.pages)

    def _take_room(self, sequence: DecodeSequence) -> bool:
        """Take its first pages; a page for each sequence that runs is left, so that they can go on."""
        config, table = self._config, self._table
        if len(table.live) >= config.max_running + config.max_waiting:
            return False
        blocks = self._first_blocks(sequence.request)
        if table.active and self._pool.available - blocks < len(table.active):
            return False
        if sequence.local:
            return take_pages(self._pool, sequence, blocks, config.block_tokens)
        pages = self._pool.allocate(blocks)
        sequence.pages = pages or []
        return pages is not None

    def room_in_s(self) -> float:
        """When the next running sequence will have ended."""
        active = self._table.active
        if not active:
            return RETRY_GUESS_S
        tokens = min(s.whole - s.wanted for s in active.values())
        return tokens * step_s(self._predictions.cost, len(active), self._table.tokens)
