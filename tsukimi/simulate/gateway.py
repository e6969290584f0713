"""The gateway in simulated time: one RequestMachine per request, its commands carried out as control messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shared.core import request_events as ev
from shared.core.conductor_events import PlaceAsked, ReplyPlacement, ReplyRefusal
from shared.core.lifecycle import RequestMachine
from shared.core.machine import Ask
from shared.core.worker import AttemptCancelled, JobSubmitted, Reply, ReserveAsked, SyncAsked, Ticked
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId, NodeId, NodeRef
from shared.protocol.requests import AttemptState, Reserved, TokenDelta
from shared.protocol.sampling import SamplingParams
from tsukimi.simulate.measure import Measures
from tsukimi.simulate.timeline import Timeline
from tsukimi.simulate.trace import TRACE_BLOCK_TOKENS, TraceRequest
from tsukimi.simulate.worker import SimulatedWorker

GATEWAY = "gateway-0"
FOREVER = float("inf")
LIFECYCLE = ev.LifecycleConfig(budget_s=FOREVER, idle_sync_s=FOREVER, gap_sync_s=FOREVER)
"""No message is ever lost here, so that nobody need ask after one."""
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
"""Answers end at their recorded length."""


class Cluster(Protocol):
    timeline: Timeline
    workers: dict[NodeId, SimulatedWorker]

    def ask_conductor(self, event: PlaceAsked) -> None: ...


class SimulatedGateway:
    """Owns all requests."""

    def __init__(
        self, cluster: Cluster, model: str, namespace: bytes, measures: Measures, ended: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._timeline = cluster.timeline
        self._model = model
        self._namespace = namespace
        self._measures = measures
        self._ended = ended
        self._machines: dict[AttemptId, tuple[RequestMachine, int]] = {}
        """By the attempt that is going on, with the request's number."""
        self._asks: dict[Ask, tuple[RequestMachine, int, AttemptId, NodeId, Any]] = {}
        """Questions out: who asked about which attempt, whom, and the event that a refusal becomes."""
        self._ask = 0

    def arrived(self, request: TraceRequest) -> None:
        spec = ev.ChoiceSpec(
            request=f"r{request.number}",
            choice=0,
            model=self._model,
            namespace=self._namespace,
            block_tokens=TRACE_BLOCK_TOKENS,
            prompt_tokens=request.prompt_tokens,
            prompt=b"",
            block_keys=request.block_keys,
            max_new_tokens=request.output_tokens,
            sampling=SAMPLING,
            gateway=GATEWAY,
            gateway_incarnation=GATEWAY,
        )
        self._feed(RequestMachine(spec, LIFECYCLE), request.number, ev.Started())

    def placed(self, answer: ReplyPlacement | ReplyRefusal) -> None:
        """The conductor's answer arrived."""
        machine, number, attempt, _, _ = self._asks.pop(answer.ask)
        if isinstance(answer, ReplyPlacement):
            self._feed(machine, number, ev.PlaceAnswered(attempt, answer.placement))
        else:
            self._feed(machine, number, ev.PlaceRefused(attempt, answer.error))

    def answered(self, reply: Reply) -> None:
        """A worker's answer arrived."""
        machine, number, attempt, node, refused = self._asks.pop(reply.ask)
        message = reply.message
        event: Any
        if isinstance(message, WireError):
            event = refused(attempt, node, message)
        elif isinstance(message, Reserved):
            event = ev.ReserveAnswered(attempt, node, message)
        elif isinstance(message, AttemptState):
            event = ev.SyncAnswered(attempt, node, message)
        else:
            event = ev.SubmitAnswered(attempt, node)
        self._feed(machine, number, event)

    def took_tokens(self, batch: tuple[NodeRef, tuple[TokenDelta, ...]]) -> None:
        """A TokenBatch arrived."""
        ref, deltas = batch
        for delta in deltas:
            found = self._machines.get(delta.attempt)
            if found is not None:
                event = ev.TokensArrived(delta.attempt, ref.node, ref.incarnation, delta)
                self._feed(*found, event)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _feed(self, machine: RequestMachine, number: int, event: Any) -> None:
        for command in machine.handle(event, self._timeline.now):
            match command:
                case ev.Deliver():
                    self._measures.delivered(number, command, self._timeline.now)
                case ev.AskPlace(request=request):
                    self._machines[request.attempt] = (machine, number)
                    ask = self._asking(machine, number, request.attempt, "", None)
                    self._timeline.send(self._cluster.ask_conductor, PlaceAsked(request, ask))
                case ev.Reserve(node=ref, request=request):
                    ask = self._asking(machine, number, request.attempt, ref.node, ev.ReserveRefused)
                    self._timeline.send(self._cluster.workers[ref.node].feed, ReserveAsked(request, ask))
                case ev.SubmitPrefill(node=ref, job=job):
                    ask = self._asking(machine, number, job.attempt, ref.node, ev.SubmitRefused)
                    self._timeline.send(self._cluster.workers[ref.node].feed, JobSubmitted(job, ask))
                case ev.Cancel(node=node, attempt=attempt, reason=reason):
                    self._timeline.send(self._cluster.workers[node].feed, AttemptCancelled(attempt, reason))
                case ev.AskSync(node=node, attempt=attempt, from_index=index):
                    ask = self._asking(machine, number, attempt, node, ev.SyncFailed)
                    self._timeline.send(self._cluster.workers[node].feed, SyncAsked(attempt, index, ask))
                case ev.SetTimer(at=at):
                    self._timeline.at(at, self._tick, (machine, number))
                case ev.Finish():
                    self._measures.finished(number, event.attempt, command)
                    self._forget(event)
                case ev.Fail(error=error):
                    self._measures.failed(number, error)
                    self._forget(event)

    def _asking(
        self, machine: RequestMachine, number: int, attempt: AttemptId, node: NodeId, refused: Any
    ) -> Ask:
        self._ask += 1
        self._asks[self._ask] = (machine, number, attempt, node, refused)
        return self._ask

    def _tick(self, what: tuple[RequestMachine, int]) -> None:
        machine, number = what
        if machine.phase != "ended":
            self._feed(machine, number, Ticked())

    def _forget(self, event: Any) -> None:
        self._machines.pop(event.attempt, None)
        self._ended()
