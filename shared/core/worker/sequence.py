"""One attempt's sequence on a node: what it is, how far it has come, and who touches its pages."""

from __future__ import annotations

from shared.core.kv.block_keys import TOKEN_BYTES, pack_tokens
from shared.core.worker.answers import Answer
from shared.protocol.ids import AttemptId, BlockKey, Incarnation, NodeId, NodeRef
from shared.protocol.requests import BlockSource, FinishReason, StageTimes, TokenDelta
from shared.protocol.sampling import SamplingParams, TokenLogprob


class SequenceState:
    """Mutable; changed by the node's machine alone. What has a value here begins with it."""

    computed: int = 0
    """Tokens whose KV is in the pages."""
    page_table: tuple[int, ...] = ()
    """`pages`, frozen for steps."""
    keyed: int = 0
    """Leading blocks whose keys the pool knows."""
    expected_s: float = 0.0
    """Prefill time still to be spent on it, as predicted."""
    unsent: int = -1
    """First token of the answer that is held back; -1: none is."""
    until: int = 0
    """Known tokens up to which it decodes on as it is: its answer is whole then, or its pages are full. What lies behind
    it needs a look."""
    ended: bool = False
    """The attempt is over here; pages may still be touched."""

    in_step: bool = False
    sources_tried: int = 0
    fetches: int = 0
    """How many were begun."""
    fetching: int = -1
    """First block of the fetch that is out; -1: none."""
    came_s: float = 0.0
    """When it was accepted."""
    began_s: float = -1.0
    """When its first step began; negative: none has."""
    pulled_s: float = 0.0
    """How long its blocks were pulled from other hosts."""
    loaded_s: float = 0.0
    """How long they were loaded from the own host."""
    void: bool = False
    """Its last step failed: what that wrote into its pages, and streamed, is worth nothing until it is run again."""
    pool_open: bool = False
    pool_closing: bool = False
    farewell: str = ""
    """Why it is moved; said once its blocks are in the pool."""
    gateway_incarnation: Incarnation = ""

    def __init__(
        self,
        *,
        attempt: AttemptId,
        gateway: NodeId,
        prompt_tokens: int,
        max_new_tokens: int,
        sampling: SamplingParams,
        keys: tuple[BlockKey, ...],
        tokens: bytes = b"",
        sources: tuple[BlockSource, ...] = (),
        pool_node: NodeRef | None = None,
        answer: Answer | None = None,
    ) -> None:
        """`keys`: of the prompt's full blocks. `tokens`: the prompt, packed; empty where it is neither computed here nor
        looked back on, and in the simulator."""
        self.attempt = attempt
        self.gateway = gateway
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.keys = keys
        self.tokens = tokens
        self.sources = sources
        self.pool_node = pool_node
        self.answer = Answer() if answer is None else answer
        self.wanted = prompt_tokens
        """Tokens known: the prompt and all sampled ones."""
        self.pages: list[int] = []
        """pages[b] holds block b; each is held once in the pool."""
        self.unwritten: list[tuple[int, ...]] = []
        """Tokens held back that are not written to the answer yet, as they came: `flush` does that, once for all."""
        self.looks_back = sampling.looks_back
        """Its sampling depends on the tokens before."""
        self.whole = prompt_tokens + max_new_tokens
        """Known tokens with the longest answer it may give."""
        self.holds_below = self.whole if sampling.ignore_eos else 0
        """Known tokens below which its answer is certain to go on: `whole`; 0 if an EOS may end it."""

    @property
    def quiet(self) -> bool:
        """Nothing touches the pages: they may be given away."""
        return not (self.in_step or self.pool_open or self.fetching >= 0)

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prompt_tokens

    def stages(self, now: float) -> StageTimes:
        """What its prefill took, if that is done now."""
        queue_s = self.began_s - self.came_s - self.pulled_s - self.loaded_s
        return StageTimes(max(0.0, queue_s), self.pulled_s, now - self.began_s + self.loaded_s)

    def table(self) -> tuple[int, ...]:
        if len(self.page_table) != len(self.pages):
            self.page_table = tuple(self.pages)
        return self.page_table

    def flush(self) -> None:
        """Whoever reads the answer's tokens flushes first."""
        if self.unwritten:
            said = self.answer.tokens
            for tokens in self.unwritten:
                said += tokens
            self.unwritten = []

    def past(self) -> tuple[bytes, int]:
        """What the next draw looks back on: packed ids, and how many of them are the answer's (the last ones)."""
        self.flush()
        answered = self.answer.first_index + len(self.answer.tokens)
        known = self.tokens + pack_tokens(self.answer.tokens)
        if not self.sampling.looks_at_prompt:
            known = known[len(known) - answered * TOKEN_BYTES :]
        return known, answered

    def steps_left(self, block_tokens: int) -> int:
        """Decode steps until its answer is whole or its pages are full; 0 if its prompt is not computed."""
        wanted, computed = self.wanted, self.computed
        if computed < self.prompt_tokens or computed != wanted - 1:
            return 0
        self.table()
        room = len(self.pages) * block_tokens - computed
        self.until = min(wanted + room, self.whole)
        return self.until - wanted

    def held_back(self) -> TokenDelta | None:
        """What was held back, and the finish if there is one."""
        self.flush()
        first, self.unsent = self.unsent, -1
        return self.answer.delta(self.attempt, self.answer.first_index + first)

    def take(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> TokenDelta | None:
        """Append sampled tokens, up to an EOS or the most wanted; returns what is new, its finish included."""
        if self.unwritten:
            self.flush()
        answer, sampling = self.answer, self.sampling
        index = len(answer.tokens)
        room = self.max_new_tokens - index
        finish: FinishReason | None = None
        kept = tokens
        if len(tokens) >= room:
            kept, finish = tokens[:room], "length"
        if not sampling.ignore_eos:
            for i, token in enumerate(kept):
                if token in sampling.eos_token_ids:
                    kept, finish = kept[: i + 1], "stop"
                    break
        if not kept:
            return None
        answer.tokens.extend(kept)
        if logprobs:
            logprobs = logprobs[: len(kept)]
            answer.logprobs.extend(logprobs)
        self.wanted = self.prompt_tokens + index + len(kept)
        cached, stages = (answer.cached_tokens, answer.stages) if index == 0 else (None, None)
        answer.finish = finish
        if self.unsent >= 0:
            return self.held_back()
        return TokenDelta(
            self.attempt, answer.first_index + index, kept, logprobs, finish, "", cached, 0.0, stages
        )
