"""Predicted against measured, by node and stage."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from services.gateway.generation.metrics.prediction_metrics import PredictionMetrics
from shared.protocol.requests import Prediction, StageTimes
from tests.support.worlds.request_story import D, P, Story

PREDICTED = Prediction(queue_s=1.0, transfer_s=0.5, prefill_s=2.0, ttft_s=3.5, tbt_s=0.25)


def value(registry: CollectorRegistry, name: str, node: str, stage: str) -> float:
    return registry.get_sample_value(name, {"node": node, "stage": stage}) or 0.0


def answered(story: Story) -> None:
    """The prompt takes 6 s, and each further token 0.5 s."""
    story.start()
    story.place(predicted=PREDICTED)
    story.reserve()
    story.submit()
    story.now += 6.0
    story.tokens(P, 0, 7, stages=StageTimes(2.0, 0.25, 3.0), cached_tokens=0)
    story.now += 5.0
    story.tokens(D, 1, 8)
    story.now += 1.0
    story.tokens(D, 2, 8, 8, finish="length")


def test_each_stage_counts_for_the_node_that_did_it() -> None:
    registry, story = CollectorRegistry(), Story()
    answered(story)
    metrics = PredictionMetrics(registry)
    metrics.ended(story.machine)
    expected = {
        ("p0", "queue"): (1.0, 2.0),
        ("p0", "transfer"): (0.5, 0.25),
        ("p0", "prefill"): (2.0, 3.0),
        ("p0", "ttft"): (3.5, 6.0),
        ("d0", "tbt"): (0.25, 0.5),
    }
    for (node, stage), (predicted_s, measured_s) in expected.items():
        assert value(registry, "tsukimi_predicted_seconds_total", node, stage) == predicted_s
        assert value(registry, "tsukimi_measured_seconds_total", node, stage) == pytest.approx(measured_s)
        error = value(registry, "tsukimi_prediction_error_seconds_sum", node, stage)
        assert error == pytest.approx(abs(predicted_s - measured_s))


def test_a_delta_told_again_later_changes_nothing() -> None:
    story = Story().run()
    story.now += 2.0
    story.tokens(P, 0, 7, stages=StageTimes(0.0, 0.0, 2.0))
    first = story.machine.prefilled
    story.now += 9.0
    story.tokens(P, 0, 7, stages=StageTimes(0.0, 0.0, 2.0))
    assert first is not None
    assert story.machine.prefilled == first


def test_who_was_told_nothing_counts_nothing() -> None:
    registry, story = CollectorRegistry(), Story().run()
    story.tokens(P, 0, 7, cached_tokens=0)
    PredictionMetrics(registry).ended(story.machine)
    assert "tsukimi_prediction_error_seconds_count" not in {
        sample.name for family in registry.collect() for sample in family.samples
    }
