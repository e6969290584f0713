"""Which decode node goes on with a prompt, and whether it had better prefill the prompt itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.costs.model import compute_s, load_s, step_s
from shared.protocol.cluster import CostCoefficients
from shared.protocol.ids import NodeRef


class Decoder:
    """A decode node that could take the sequence now."""

    __slots__ = ("cost", "free_blocks", "host", "kv_tokens", "local_blocks", "ref", "requests")

    def __init__(
        self,
        ref: NodeRef,
        host: str,
        cost: CostCoefficients,
        requests: int,
        kv_tokens: int,
        free_blocks: int,
        local_blocks: int,
    ) -> None:
        self.ref = ref
        self.host = host
        self.cost = cost
        self.requests = requests
        """Sequences it has or is about to have."""
        self.kv_tokens = kv_tokens
        """KV tokens of those."""
        self.free_blocks = free_blocks
        self.local_blocks = local_blocks
        """Leading blocks of the prompt that its own memory or its host's cache nodes hold."""


def predicted_tbt_s(decoder: Decoder, prompt_tokens: int) -> float:
    """One step of its batch with this sequence in it."""
    return step_s(decoder.cost, decoder.requests + 1, decoder.kv_tokens + prompt_tokens)


def choose_decoder(decoders: Sequence[Decoder], prompt_tokens: int, blocks: int) -> Decoder:
    """Least predicted time between tokens, among those with room if any has; equal ones: the first."""
    roomy = [d for d in decoders if d.free_blocks >= blocks] or decoders
    tbt_s = [step_s(d.cost, d.requests + 1, d.kv_tokens + prompt_tokens) for d in roomy]
    return roomy[tbt_s.index(min(tbt_s))]


@dataclass(slots=True, frozen=True)
class InlineRule:
    """When a decode node prefills by itself: few tokens are left to compute, so that the batch it runs hardly waits."""

    max_tokens: int = 64
    """0: never, while there are prefill nodes."""
    tbt_slo_s: float = 0.0
    """Step time that an inlined prefill must not push the batch over; 0: none."""

    def ttft_s(self, decoder: Decoder, prompt_tokens: int, block_tokens: int) -> float:
        """Predicted time to first token of a prefill inlined into the decoder's batch; infinite: do not."""
        cached = decoder.local_blocks * block_tokens
        left = prompt_tokens - cached
        if left > self.max_tokens:
            return float("inf")
        wait_s = step_s(decoder.cost, decoder.requests, decoder.kv_tokens) if decoder.requests else 0.0
        own_s = compute_s(decoder.cost, cached, left)
        if self.tbt_slo_s > 0.0 and wait_s + own_s > self.tbt_slo_s:
            return float("inf")
        return wait_s + load_s(decoder.cost, cached) + own_s
