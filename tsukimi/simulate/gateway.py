"""The gateway in simulated time: one RequestMachine per request, its commands carried out as control messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from shared.core.conductor.events import GivenUp, PlaceAsked, ReplyPlacement, ReplyRefusal
from shared.core.machine import Ask, Ticked
from shared.core.request import events as ev
from shared.core.request.machine import RequestMachine
from shared.core.worker.events import AttemptCancelled, JobSubmitted, Reply, ReserveAsked, SyncAsked
from shared.protocol.errors import WireError
from shared.protocol.ids import AttemptId, NodeId, NodeRef
from shared.protocol.requests import AttemptState, Reserved, TokenDelta
from shared.protocol.sampling import SamplingParams
from tsukimi.simulate.measure import Measures
from tsukimi.simulate.timeline import Timeline
from tsukimi.simulate.trace import TraceRequest
from tsukimi.simulate.worker import SimulatedWorker

GATEWAY = "gateway-0"
FOREVER = float("inf")
LIFECYCLE = ev.LifecycleConfig(budget_s=FOREVER, idle_sync_s=FOREVER, gap_sync_s=FOREVER)
"""Longer than any run: no message is lost here, so nobody need ask after one."""
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
"""Answers end at their recorded length."""


class Cluster(Protocol):
    timeline: Timeline
    workers: dict[NodeId, SimulatedWorker]

    def ask_conductor(self, event: PlaceAsked | GivenUp) -> None: ...


class SimulatedGateway:
    """Owns all requests."""

    def __init__(
        self,
        cluster: Cluster,
        model: str,
        namespace: bytes,
        block_tokens: int,
        measures: Measures,
        ended: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._timeline = cluster.timeline
        self._model = model
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._measures = measures
        self._ended = ended
        self._machines: dict[AttemptId, tuple[RequestMachine, int]] = {}
        """Running requests by their current attempt, with the request's number."""
        self._asks: dict[Ask, tuple[RequestMachine, int, AttemptId, NodeId, Any]] = {}
        """Open questions: the attempt, who was asked, and the event that a refusal becomes."""
        self._ask = 0
        self._do: dict[type, Callable[[RequestMachine, int, Any, Any], None]] = {
            ev.Deliver: self._deliver,
            ev.AskPlace: self._ask_place,
            ev.Reserve: self._reserve,
            ev.SubmitPrefill: self._submit,
            ev.Cancel: self._cancel,
            ev.AskSync: self._ask_sync,
            ev.SetTimer: self._set_timer,
            ev.Finish: self._finish,
            ev.Fail: self._fail,
        }

    def arrived(self, request: TraceRequest) -> None:
        spec = ev.ChoiceSpec(
            request=f"r{request.number}",
            choice=0,
            model=self._model,
            namespace=self._namespace,
            block_tokens=self._block_tokens,
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
            if refused is not ev.SyncFailed:
                self._timeline.send(self._cluster.ask_conductor, GivenUp(attempt))
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
            self._do[type(command)](machine, number, event, command)

    def _deliver(self, machine: RequestMachine, number: int, event: Any, command: ev.Deliver) -> None:
        self._measures.delivered(number, command, self._timeline.now)

    def _ask_place(self, machine: RequestMachine, number: int, event: Any, command: ev.AskPlace) -> None:
        request = command.request
        self._machines[request.attempt] = (machine, number)
        ask = self._asking(machine, number, request.attempt, "", None)
        self._timeline.send(self._cluster.ask_conductor, PlaceAsked(request, ask))

    def _reserve(self, machine: RequestMachine, number: int, event: Any, command: ev.Reserve) -> None:
        node, request = command.node.node, command.request
        ask = self._asking(machine, number, request.attempt, node, ev.ReserveRefused)
        self._timeline.send(self._cluster.workers[node].feed, ReserveAsked(request, ask))

    def _submit(self, machine: RequestMachine, number: int, event: Any, command: ev.SubmitPrefill) -> None:
        node, job = command.node.node, command.job
        ask = self._asking(machine, number, job.attempt, node, ev.SubmitRefused)
        self._timeline.send(self._cluster.workers[node].feed, JobSubmitted(job, ask))

    def _cancel(self, machine: RequestMachine, number: int, event: Any, command: ev.Cancel) -> None:
        cancelled = AttemptCancelled(command.attempt, command.reason)
        self._timeline.send(self._cluster.workers[command.node].feed, cancelled)

    def _ask_sync(self, machine: RequestMachine, number: int, event: Any, command: ev.AskSync) -> None:
        ask = self._asking(machine, number, command.attempt, command.node, ev.SyncFailed)
        asked = SyncAsked(command.attempt, command.from_index, ask)
        self._timeline.send(self._cluster.workers[command.node].feed, asked)

    def _set_timer(self, machine: RequestMachine, number: int, event: Any, command: ev.SetTimer) -> None:
        self._timeline.at(command.at, self._tick, (machine, number))

    def _finish(self, machine: RequestMachine, number: int, event: Any, command: ev.Finish) -> None:
        self._measures.finished(number, event.attempt, command, machine.prefilled)
        self._forget(event)

    def _fail(self, machine: RequestMachine, number: int, event: Any, command: ev.Fail) -> None:
        self._measures.failed(number, command.error, machine.cached_tokens)
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
