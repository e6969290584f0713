from __future__ import annotations

from shared.core.conductor.prediction.link_queues import LinkQueues


def test_what_a_host_sends_is_one_after_the_other_and_passes_with_time() -> None:
    queues = LinkQueues()
    assert queues.wait_s("h", 1.0) == 0.0
    queues.booked("h", 1.0, 2.0)
    queues.booked("h", 1.5, 1.0)
    assert queues.wait_s("h", 2.0) == 2.0
    assert queues.wait_s("h", 9.0) == 0.0
    queues.booked("h", 9.0, 0.5)
    assert queues.wait_s("h", 9.0) == 0.5
    queues.keep(set())
    assert queues.wait_s("h", 9.0) == 0.0
