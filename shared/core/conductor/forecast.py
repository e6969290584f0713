"""All that the conductor expects beyond what nodes report: booked blocks, batches to come, answers' lengths, senders."""

from __future__ import annotations

from collections.abc import Sequence

from shared.core.conductor.load_estimate import PENDING_S
from shared.core.conductor.node_registry import NodeState
from shared.core.conductor.objectives import Objectives
from shared.core.conductor.prediction.booked_blocks import BookedBlocks
from shared.core.conductor.prediction.decode_forecast import DecodeForecast
from shared.core.conductor.prediction.link_queues import LinkQueues
from shared.core.conductor.prediction.measured_links import MeasuredLinks
from shared.core.conductor.prediction.output_lengths import OutputLengths
from shared.core.costs.links import Links
from shared.core.costs.model import step_s
from shared.protocol.cluster import NodeLoad
from shared.protocol.ids import AttemptId, Incarnation, NodeId

Life = tuple[NodeId, Incarnation]


class Forecast:
    """Learns from assignments and reports. Its state is soft: a new one knows enough after one answer's time."""

    def __init__(self, objectives: Objectives, links: Links) -> None:
        """`links`: as configured, until some are measured."""
        self._admission = objectives.admission if objectives.tbt_s > 0 else "none"
        self._limit_s = objectives.tbt_most_s
        self.booked = BookedBlocks(PENDING_S)
        self.lengths = OutputLengths()
        self.senders = LinkQueues()
        self.links = MeasuredLinks(links)
        self._decodes: dict[Life, DecodeForecast] = {}

    # -- what happened -----------------------------------------------------------------------------------------------

    def reported(self, node_state: NodeState, load: NodeLoad, now: float) -> None:
        """A registered node's newest load."""
        self.links.reported(node_state, load)
        self.booked.reported(load.node, load.attempts, now, node_state.estimate.busy_until_s)
        if load.role == "decode":
            attempts = load.attempts
            mean_tokens = load.batch_tokens / len(attempts) if attempts else 0.0
            running_tokens = int(mean_tokens * load.running)
            seconds = step_s(node_state.cost, max(1, load.running), running_tokens)
            self._of(node_state).reported(attempts, seconds, mean_tokens, now, self.lengths)

    def assigned(
        self, decode: NodeState, attempt: AttemptId, now: float, landing_s: float, prompt_tokens: int
    ) -> None:
        self._of(decode).assigned(attempt, now, landing_s, prompt_tokens)

    def released(self, node_state: NodeState, attempt: AttemptId) -> None:
        """The attempt does not come after all."""
        self.booked.released(node_state.node, attempt)
        if node_state.info.role == "decode":
            self._of(node_state).released(attempt)

    def keep(self, node_states: Sequence[NodeState]) -> None:
        """Only these are there."""
        lives = {(p.node, p.ref.incarnation) for p in node_states}
        self._decodes = {life: forecast for life, forecast in self._decodes.items() if life in lives}
        self.booked.keep([p.node for p in node_states])
        self.links.keep(lives)
        self.senders.keep({p.host for p in node_states})

    # -- what is expected --------------------------------------------------------------------------------------------

    def tbt_s(self, decode: NodeState | None, prompt_tokens: int, now: float) -> tuple[float, float]:
        """(time of one step with this sequence in it, seconds until there is room for it under the objective).

        The step is the one that the admission mode looks at. (0, 0) where it looks at none.
        """
        mode = self._admission
        if decode is None or mode in ("none", "baseline"):
            return 0.0, 0.0
        forecast = self._of(decode)
        requests, tokens = forecast.now(now) if mode == "early" else forecast.landing(now)
        requests, tokens = requests + 1.0, tokens + prompt_tokens
        most = decode.info.max_running
        if most and requests > most:
            requests, tokens = float(most), tokens * most / requests
        cost = decode.cost
        seconds = cost.step_fixed_s + cost.step_request_s * requests + cost.step_token_s * tokens
        if seconds <= self._limit_s:
            return seconds, 0.0
        marginal_s = (seconds - cost.step_fixed_s) / requests
        excess = (seconds - self._limit_s) / marginal_s if marginal_s > 0.0 else 1.0
        return seconds, forecast.drained_s(max(0.0, requests - 1.0 - excess), now, self.lengths)

    def place_free_s(self, node_state: NodeState, now: float) -> float:
        """Seconds until a full node is expected to have a place: the end of its queue, or of one of its answers."""
        queue_s = node_state.estimate.queue_s(now)
        if node_state.info.role != "decode" or not node_state.estimate.requests:
            return queue_s
        forecast = self._of(node_state)
        requests, _ = forecast.now(now)
        if not requests:
            return queue_s or self.lengths.mean * forecast.step_s
        return max(queue_s, forecast.drained_s(requests - 1.0, now, self.lengths))

    def check(self) -> None:
        for forecast in self._decodes.values():
            forecast.check()

    def _of(self, node_state: NodeState) -> DecodeForecast:
        life = (node_state.node, node_state.ref.incarnation)
        forecast = self._decodes.get(life)
        if forecast is None:
            forecast = self._decodes[life] = DecodeForecast(PENDING_S)
        return forecast
