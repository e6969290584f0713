"""Time models known beforehand."""

from __future__ import annotations

from shared.protocol.cluster import CostCoefficients

LLAMA2_70B_8XA800 = CostCoefficients(
    prefill_fixed_s=67.9e-3,
    prefill_token_s=109.75e-6,
    prefill_square_s=0.7431e-9,
    load_token_s=327_680 / 128e9,
    step_fixed_s=26.3e-3,
    step_request_s=3.2e-3,
    step_token_s=34.5e-9,
)
"""The papers' node: fits the ten bars of FAST'25 Fig 14 within 4 %; step_request_s is the end-to-end one."""

SMALL_MODEL_CPU = CostCoefficients(
    prefill_fixed_s=5e-3,
    prefill_token_s=1e-3,
    prefill_square_s=1e-7,
    load_token_s=1.2e-5,
    step_fixed_s=2e-2,
    step_request_s=1e-3,
    step_token_s=1.5e-6,
)
"""A 135M-parameter model on two CPU cores: the prior that a real node's fit starts from."""

PRESETS = {"llama2-70b-8xa800": LLAMA2_70B_8XA800, "small-model-cpu": SMALL_MODEL_CPU}
