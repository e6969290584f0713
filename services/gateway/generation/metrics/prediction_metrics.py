"""How far predictions were off, by node and stage, for requests that ended."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.core.request.machine import RequestMachine

ERRORS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class PredictionMetrics:
    """Stages are those of a Prediction. `tbt` counts for the node that decoded, all others for the one that computed the
    prompt."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["node", "stage"]
        self._errors = Histogram(
            "tsukimi_prediction_error_seconds",
            "Difference between predicted and measured times, without its sign",
            labels,
            buckets=ERRORS_S,
            registry=registry,
        )
        self._predicted = Counter(
            "tsukimi_predicted_seconds", "Times that the conductor predicted", labels, registry=registry
        )
        self._measured = Counter("tsukimi_measured_seconds", "What they were", labels, registry=registry)

    def ended(self, machine: RequestMachine) -> None:
        """A choice ended: count what its last prefill took, and its steps if it was decoded on."""
        told = machine.prefilled
        if told is None:
            return
        placement, stages = told.placement, told.stages
        predicted = placement.predicted
        prefiller = placement.prefill or placement.decode
        if prefiller is not None:
            for stage, expected_s, took_s in (
                ("queue", predicted.queue_s, stages.queue_s),
                ("transfer", predicted.transfer_s, stages.transfer_s),
                ("prefill", predicted.prefill_s, stages.prefill_s),
                ("ttft", predicted.ttft_s, told.ttft_s),
            ):
                self._count(prefiller.node, stage, expected_s, took_s)
        if placement.decode is not None and machine.tbt_s > 0.0:
            self._count(placement.decode.node, "tbt", predicted.tbt_s, machine.tbt_s)

    def _count(self, node: str, stage: str, predicted_s: float, measured_s: float) -> None:
        self._errors.labels(node, stage).observe(abs(predicted_s - measured_s))
        self._predicted.labels(node, stage).inc(predicted_s)
        self._measured.labels(node, stage).inc(measured_s)
