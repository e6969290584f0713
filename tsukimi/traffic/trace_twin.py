"""The simulated twin of a live cluster: as many nodes of the same sizes, with the time models that they measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from shared.protocol.cluster import CostCoefficients, NodeInfo, NodeLoad
from tsukimi.errors import ToolError
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report
from tsukimi.simulate.trace import TraceRequest
from tsukimi.traffic.trace_calibration import Undisturbed

INLINE_TOKENS = 64
"""As a live conductor's default."""


def twin_config(
    infos: Sequence[NodeInfo],
    loads: Sequence[NodeLoad],
    undisturbed: Undisturbed,
    *,
    policy: str,
    message_s: float,
) -> SimulationConfig:
    """From the nodes' announcements and last heartbeats. Raises ToolError if no compute node has announced a model."""
    heard = {load.node: load for load in loads}
    prefills, decodes = compute_nodes(infos)
    caches = [i for i in infos if i.role == "cache"]
    if not decodes or decodes[0].model is None:
        raise ToolError("no decode node has announced its model.")
    layout = decodes[0].model.layout
    compute = [*prefills, *decodes]
    pool_blocks = [heard[i.ref.node].kv_blocks or i.kv_blocks for i in caches if i.ref.node in heard]
    return SimulationConfig(
        policy=policy,
        prefill=len(prefills),
        decode=len(decodes),
        cache=len(caches),
        one_host=len({i.ref.host for i in compute}) == 1,
        kv_tokens=min(i.kv_blocks for i in compute) * layout.block_tokens,
        pool_tokens=max(1, min(pool_blocks, default=1)) * layout.block_tokens,
        keep_blocks=True,
        chunk_tokens=max((i.chunk_tokens for i in prefills), default=decodes[0].chunk_tokens) or 512,
        decode_chunk_tokens=decodes[0].chunk_tokens,
        max_prefills=max((i.max_running for i in prefills), default=1),
        max_running=max(i.max_running for i in decodes),
        inline_tokens=INLINE_TOKENS,
        layout=layout,
        coefficients=undisturbed.cost,
        cores=undisturbed.cores,
        nic_bytes_s=1.25e9,
        shm_bytes_s=4e9,
        message_s=message_s,
    )


def compute_nodes(infos: Sequence[NodeInfo]) -> tuple[list[NodeInfo], list[NodeInfo]]:
    """Prefill and decode nodes that serve a model."""
    serving = [i for i in infos if i.model is not None]
    return [i for i in serving if i.role == "prefill"], [i for i in serving if i.role == "decode"]


def fitted_cost(infos: Sequence[NodeInfo], loads: Sequence[NodeLoad]) -> CostCoefficients:
    """The nodes' own time models: prefill terms as prefill nodes have them on average, step terms as decode nodes."""
    heard = {load.node: load for load in loads}
    prefills, decodes = compute_nodes(infos)
    return _joined([_cost(i, heard) for i in prefills or decodes], [_cost(i, heard) for i in decodes])


def simulate_rows(config: SimulationConfig, requests: list[TraceRequest]) -> dict[str, Any]:
    cluster = SimulatedCluster(config, requests)
    cluster.run()
    return report(cluster)


def _cost(info: NodeInfo, heard: dict[str, NodeLoad]) -> CostCoefficients:
    load = heard.get(info.ref.node)
    cost = load.cost if load is not None and load.cost is not None else info.cost
    return cost if cost is not None else CostCoefficients()


def _joined(prefills: Sequence[CostCoefficients], decodes: Sequence[CostCoefficients]) -> CostCoefficients:
    def mean(costs: Sequence[CostCoefficients], field: str) -> float:
        return float(sum(getattr(c, field) for c in costs)) / len(costs)

    prefill = {
        f: mean(prefills, f)
        for f in ("prefill_fixed_s", "prefill_token_s", "prefill_square_s", "load_token_s")
    }
    step = {f: mean(decodes, f) for f in ("step_fixed_s", "step_request_s", "step_token_s")}
    return replace(CostCoefficients(), **prefill, **step)
