"""The decode role: room first, then KV from a prefill node (or prefilled here), then a token a step until the end.

    reserved -> landed (verified) -> in the batch -> ended -> full blocks to the pool -> pages free
             -> prefix fetched, chunks computed (local prefill) ---^

Pages that a remote writer may still write to are given to nobody before the landing is closed.
"""

from __future__ import annotations

from shared.core.worker.config import DecodeConfig
from shared.core.worker.decode_sequence import DecodeSequence, computed_keys
from shared.core.worker.landings import ReservingMachine
from shared.core.worker.steps import RunStep
from shared.core.worker.transfers import CommitPoolWrite, OpenPoolWrite, SendBlocks
from shared.protocol.requests import TokenDelta


class DecodeMachine(ReservingMachine):
    """See core.machine.Machine. Never decodes on KV that was not verified whole, never takes in what it has no pages
    for. Each reserved attempt gets exactly one ending: a delta with its finish, or silence when cancelled."""

    role = "decode"
    cost_kind = "step"

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self._stalled = False
        """Some sequence has no page for its next token."""

    # -- stepping --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        out = self._inflight.out
        if out is None:
            if self._active and not self._run_on():
                super()._advance(now)
            out = self._inflight.out
            if out is None:
                return
        changed, self._newcomer = self._newcomer, False
        if changed and (len(out) < self.config.max_running or any(s.ended for s, _ in out)):
            interrupt = self._inflight.interrupt()
            if interrupt is not None:
                self._commands.append(interrupt)

    def _run_on(self) -> bool:
        """Launch the next step of a batch that only decodes: nearly always. False: there is more to think of."""
        config = self.config
        if len(self._active) > config.max_running or self._inflight.suspecting:
            return False
        step = self._inflight.launch_decoding(self._active.values(), config.block_tokens, config.max_repeat)
        if step is None:
            return False
        self._newcomer = self._stalled = False
        self._commands.append(step)
        return True

    def _runnable(self, ready: list[DecodeSequence], now: float) -> list[DecodeSequence]:
        self._stalled = False
        rows: list[DecodeSequence] = []
        for sequence in ready:
            if len(rows) >= self.config.max_running:
                break
            if not sequence.ended and self._has_room(sequence, now):
                rows.append(sequence)
        return [s for s in rows if not s.ended]

    def _has_room(self, sequence: DecodeSequence, now: float) -> bool:
        """A page for its next token; if need be, the youngest sequence gives way."""
        while sequence.decoding and sequence.computed >= len(sequence.pages) * self.worker.block_tokens:
            page = self.pool.allocate(1)
            if page is not None:
                sequence.pages += page
            elif not self._make_way(sequence, now):
                self._stalled = True
                return False
        return True

    def _make_way(self, sequence: DecodeSequence, now: float) -> bool:
        """Whether it is worth asking for a page again at once."""
        if len(self._known) > len(self._live):
            return False  # pages of ended ones come soon
        youngest = next(reversed(self._live.values()))
        if len(self._live) == 1:
            self._end(
                sequence, now, "failed", f"{self.worker.node} has no KV memory for a sequence of this length"
            )
            return False
        self.counters["preempted"] += 1
        self._give_up(youngest, now, "gave way: out of KV blocks")
        return youngest is not sequence

    def _launch(self, plan: list[tuple[DecodeSequence, int]]) -> RunStep:
        self._newcomer = False
        return self._inflight.launch(plan, self._repeats(plan) if self.config.max_repeat > 1 else 1)

    def _repeats(self, plan: list[tuple[DecodeSequence, int]]) -> int:
        """How many steps may run before anything has to change."""
        if self._stalled or [s for s, _ in plan if s.computed < s.prompt_tokens]:
            return 1
        block_tokens = self.worker.block_tokens
        wanted = min([s.prompt_tokens + s.max_new_tokens - s.wanted for s, _ in plan])
        room = min([len(s.pages) * block_tokens - s.computed for s, _ in plan])
        return min(wanted, room, self.config.max_repeat)

    def _grew(self, tokens: int) -> None:
        self._kv_tokens += tokens

    def _sampled(self, sequence: DecodeSequence, delta: TokenDelta, now: float) -> None:
        if delta.finish is not None:
            self._end(sequence, now)

    # -- ending ----------------------------------------------------------------------------------------------------

    def _give_up(self, sequence: DecodeSequence, now: float, why: str) -> None:
        """Its blocks go to the pool before its gateway places it anew, so that the next node finds them."""
        self.counters["ended_moved"] += 1
        sequence.farewell = why
        self._retire(sequence, now)

    def _close(self, sequence: DecodeSequence, now: float) -> None:
        self._close_streams(sequence, now)
        if not sequence.pool_open:
            self._say_farewell(sequence)
        self._free_if_quiet(sequence)

    def _pool_written(self, sequence: DecodeSequence, now: float) -> None:
        self._say_farewell(sequence)

    def _say_farewell(self, sequence: DecodeSequence) -> None:
        if sequence.farewell:
            why, sequence.farewell = sequence.farewell, ""
            self._farewell(sequence, "moved", why)

    def _still_open(self, sequence: DecodeSequence) -> bool:
        return bool(sequence.farewell)

    def _close_streams(self, sequence: DecodeSequence, now: float) -> None:
        if sequence.landing_open:
            self._close_landing(sequence)
        elif sequence.fetching < 0 and not sequence.kept and sequence.answer.finish != "failed":
            sequence.kept = True
            self._keep(sequence)

    def _keep(self, sequence: DecodeSequence) -> None:
        """Full blocks become findable here and go to the pool; the other pages are free at once."""
        config = self.worker
        keys = (
            computed_keys(sequence, config.namespace, config.block_tokens)
            if config.token_ids
            else sequence.keys
        )
        full = min(len(keys), sequence.computed // config.block_tokens)
        if self.pool.keeps:
            new = slice(sequence.keyed, full)
            parent = keys[new.start - 1] if 0 < new.start < full else None
            self.pool.register_chain(sequence.pages[new], keys[new], parent)
        self.pool.unpin(sequence.pages[full:])
        del sequence.pages[full:]
        news = full > len(sequence.keys) or (sequence.local and full)
        if sequence.pool_node is None or not news:
            return
        sequence.pool_open = sequence.pool_closing = True
        attempt, pages = sequence.attempt, tuple(sequence.pages)
        self._commands += [
            OpenPoolWrite(attempt, sequence.pool_node, config.namespace, 0, keys[:full], pages),
            SendBlocks(attempt, 0, full, to_handoff=False),
            CommitPoolWrite(attempt),
        ]

    def _tally(self) -> tuple[int, int, int]:
        return len(self._active), len(self._live) - len(self._active), self._kv_tokens

    def check(self) -> None:
        super().check()
        for attempt, s in self._live.items():
            assert not s.farewell, f"{attempt} is live and given up"
