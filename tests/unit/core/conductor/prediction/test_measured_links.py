"""How fast links are: as configured at first, then as nodes measure them."""

from __future__ import annotations

import random

import pytest

from shared.core.conductor.load_estimate import LoadEstimate
from shared.core.conductor.node_registry import NodeState
from shared.core.conductor.prediction.measured_links import MeasuredLinks
from shared.core.costs.links import Links
from shared.core.costs.presets import SMALL_MODEL_CPU
from shared.protocol.cluster import LinkTotals, NodeInfo, NodeLoad
from shared.protocol.ids import NodeRef
from tests.unit.protocol.samples import LAYOUT, MODEL

PRIOR = Links(nic_bytes_s=1e9, shm_bytes_s=4e9, fixed_s=0.002)
BLOCK_BYTES = LAYOUT.block_bytes


def node_state(name: str = "prefill-0") -> NodeState:
    state = NodeState(LoadEstimate())
    info = NodeInfo(NodeRef(name, "1"), "prefill", "ready", model=MODEL)
    state.announced(info, SMALL_MODEL_CPU)
    return state


def load(
    near: LinkTotals | None = None, far: LinkTotals | None = None, node: str = "prefill-0", life: str = "1"
) -> NodeLoad:
    none = LinkTotals()
    return NodeLoad(node, life, "prefill", 1, "ready", fetched_near=near or none, fetched_far=far or none)


def fetch(links: MeasuredLinks, real: Links, number: int, every: int = 1, noise: float = 0.0) -> None:
    """Time fetches over both kinds of link. Each `every`th report is not lost."""
    draw = random.Random(5)
    near = far = LinkTotals()
    for i in range(number):
        blocks = draw.randrange(1, 400)
        size = blocks * BLOCK_BYTES
        slower = draw.lognormvariate(-noise * noise / 2, noise)
        near = LinkTotals(
            near.fetches + 1, near.blocks + blocks, near.seconds + real.transfer_s(size, True) * slower
        )
        far = LinkTotals(
            far.fetches + 1, far.blocks + blocks, far.seconds + real.transfer_s(size, False) * slower
        )
        if i % every == 0:
            links.reported(node_state(), load(near, far))


def test_links_are_as_configured_until_some_are_measured() -> None:
    links = MeasuredLinks(PRIOR)
    links.reported(node_state(), load())
    assert links.now == PRIOR
    fetch(links, PRIOR, 100)
    for same_host in (False, True):
        assert links.now.transfer_s(1e6, same_host) == pytest.approx(
            PRIOR.transfer_s(1e6, same_host), rel=1e-3
        )


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_wrong_configuration_is_corrected_for_each_kind_by_itself(factor: float, every: int) -> None:
    real = Links(
        nic_bytes_s=1e9 * factor, shm_bytes_s=4e9 / factor, fixed_s=0.002 / factor, shm_fixed_s=0.001
    )
    links = MeasuredLinks(PRIOR)
    fetch(links, real, 200, every, noise=0.2)
    for same_host in (False, True):
        for blocks in (50, 400):
            size = blocks * BLOCK_BYTES
            expected_s = real.transfer_s(size, same_host)
            assert links.now.transfer_s(size, same_host) == pytest.approx(expected_s, rel=0.1)


def test_a_report_told_again_is_no_new_measurement() -> None:
    once, often = MeasuredLinks(PRIOR), MeasuredLinks(PRIOR)
    for i in range(1, 21):
        totals = LinkTotals(i, 100 * i, 0.5 * i)
        once.reported(node_state(), load(far=totals))
        for _ in range(3):
            often.reported(node_state(), load(far=totals))
    assert once.now == often.now != PRIOR


def test_a_new_life_counts_from_nothing_and_what_was_learnt_stays() -> None:
    links = MeasuredLinks(PRIOR)
    for i in range(1, 21):
        links.reported(node_state(), load(far=LinkTotals(i, 100 * i, 0.5 * i)))
    learnt = links.now
    links.keep({("prefill-0", "2")})
    assert links.now == learnt
    links.reported(node_state(), load(far=LinkTotals(1, 100, 0.5), life="2"))
    size = 100 * BLOCK_BYTES
    assert links.now.transfer_s(size, False) == pytest.approx(0.5, rel=0.05)
