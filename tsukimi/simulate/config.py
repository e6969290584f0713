"""What may be varied from one simulated run to the next."""

from __future__ import annotations

from msgspec import Struct

from shared.core.conductor.objectives import AdmissionMode
from shared.core.costs.presets import PRESETS
from shared.protocol.cluster import CostCoefficients
from shared.protocol.model import KVLayout

LLAMA_70B = KVLayout(layers=80, kv_heads=8, head_dim=128, block_tokens=512, dtype="bfloat16", dtype_bytes=2)


class SimulationConfig(Struct, frozen=True, kw_only=True):
    policy: str = "kvcache_centric"
    decode_policy: str = "least_tbt"
    prefill: int = 8
    """Prefill nodes, each on its own host. 0: decode nodes prefill."""
    decode: int = 8
    """Decode nodes, each on its own host."""
    cache: int | None = None
    """Cache nodes, dealt out to the prefill nodes' hosts, or without prefill nodes to the decode nodes'. None: one a
    host."""
    one_host: bool = False
    """Whether all nodes are on one host, as in a local cluster."""
    balancing_threshold: float = 1.0
    seed: int = 0
    ttft_slo_s: float = 0.0
    """Objective that goodput is measured by, and admission tests; 0: none."""
    tbt_slo_s: float = 0.0
    admission: AdmissionMode = "none"
    """`none` refuses nothing, so that the objectives only measure."""
    max_wait_s: float = 0.0
    """Longest wait for the start of a prefill; 0: any. Not tested by admission `none`."""
    patience: float = 1.5
    """A prompt waits for a prefill under way that computes its prefix, if its first token comes at most so many times as
    late."""
    cores: float = 0.0
    """How many engines run at full speed side by side, if all are on one machine; 0: each has a machine to itself."""
    kv_tokens: int = 1_000_000
    """KV memory of each prefill and decode node, in tokens."""
    keep_blocks: bool = False
    """Whether prefill and decode nodes keep blocks in their own memory besides the pool. In the papers they do not."""
    pool_tokens: int = 3_000_000
    """Memory of each cache node, in tokens."""
    chunk_tokens: int = 131_072
    """Most prompt tokens of one prefill step."""
    decode_chunk_tokens: int = 0
    """Most prompt tokens of one step of a decode node that prefills; 0: as many as on a prefill node."""
    max_prefills: int = 1
    """Prompts that a prefill node loads and computes at a time."""
    inline_tokens: int = 0
    """Most uncached prompt tokens that a decode node prefills itself."""
    max_running: int = 256
    """Most sequences in one decode step."""
    layout: KVLayout = LLAMA_70B
    cost: str = "llama2-70b-8xa800"
    """Name of a time model. `coefficients` take its place where they are given."""
    coefficients: CostCoefficients | None = None
    fitted_costs: bool = False
    """Nodes learn their time models from what they measure, as live ones do. Else the conductor knows the true one."""
    noise: float = 0.0
    """Standard deviation of the logarithm of engine times. Their mean stays."""
    nic_bytes_s: float = 87e9
    shm_bytes_s: float = 128e9
    message_s: float = 0.001
    """Seconds that a control message takes."""

    @property
    def time_model(self) -> CostCoefficients:
        return self.coefficients if self.coefficients is not None else PRESETS[self.cost]
