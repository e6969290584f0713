"""What the conductor can be told."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.core.conductor.events import ConductorConfig
from shared.core.conductor.objectives import AdmissionMode, Objectives
from shared.core.costs.links import Links
from shared.io.config import BaseConfig, Count, CountOrZero, SecondsOrZero, ShareOrZero


class Config(BaseConfig, frozen=True, kw_only=True):
    policy: str = "kvcache_centric"
    """kvcache_centric, joint, cache_aware, load_balance, random, or your own `module:Class`."""
    decode_policy: str = "least_tbt"
    """Which decode node goes on with a prompt: least_tbt, or `module:Class` of your own."""
    balancing_threshold: Annotated[float, Meta(ge=1)] = 1.0
    """A prefix held elsewhere is pulled if it is longer than the local one times this factor."""
    seed: int = 0
    """Seed of policies that choose at random."""
    admission: AdmissionMode = "predictive"
    """When a request is refused: none (never); baseline (by TTFT on arrival, by TBT once the prompt is computed); early
    (by both on arrival, against the batch that decodes then); predictive (by both on arrival, against the batch expected
    when the prefill ends)."""
    admission_shadow: bool = False
    """Count and explain what would be refused, but refuse nothing."""
    max_wait_s: SecondsOrZero = 30.0
    """Refuse a request whose prefill is predicted to start later than that, in seconds; 0: never."""
    ttft_slo_s: SecondsOrZero = 0.0
    """Refuse a request whose predicted time to the first token, in seconds, is longer; 0: never."""
    tbt_slo_s: SecondsOrZero = 0.0
    """Refuse a request that would make its decode node's steps longer than this, in seconds; 0: never."""
    slo_min_samples: CountOrZero = 8
    """While nodes are idle, predictions refuse nothing before a node has made this many measurements."""
    slo_idle_refusals: ShareOrZero = 0.5
    """Largest share of the requests arriving while nodes are idle that may be refused."""
    nic_bytes_s: Annotated[float, Meta(gt=0)] = 1.25e9
    """Bytes per second between two machines."""
    shm_bytes_s: Annotated[float, Meta(gt=0)] = 4e9
    """Bytes per second between two processes of one machine."""
    transfer_fixed_s: SecondsOrZero = 0.002
    """Fixed time of every transfer, in seconds, whatever its size."""
    inline_tokens: CountOrZero = 64
    """Most uncached prompt tokens that a decode node may prefill itself; 0: none."""
    pool_answers: bool = True
    """Whether answers are kept in the pool, for the next turn."""
    index_blocks: Count = 4_000_000
    """Most blocks whose holders are remembered."""
    settle_s: SecondsOrZero = 0.5
    """After a start, longest wait for all nodes to report before the first request is placed, in seconds."""

    def machine(self) -> ConductorConfig:
        return ConductorConfig(
            policy=self.policy,
            decode_policy=self.decode_policy,
            balancing_threshold=self.balancing_threshold,
            seed=self.seed,
            objectives=Objectives(
                ttft_s=self.ttft_slo_s,
                tbt_s=self.tbt_slo_s,
                min_samples=self.slo_min_samples,
                idle_refusals=self.slo_idle_refusals,
                max_wait_s=self.max_wait_s,
                admission=self.admission,
                shadow=self.admission_shadow,
            ),
            links=Links(self.nic_bytes_s, self.shm_bytes_s, self.transfer_fixed_s),
            inline_tokens=self.inline_tokens,
            pool_answers=self.pool_answers,
            lost_after_s=self.lost_after_s,
            index_blocks=self.index_blocks,
        )
