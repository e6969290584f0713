"""Questions to the conductor and the nodes. Every question ends in an event, even if nobody answers."""

from __future__ import annotations

import contextlib

from shared.core.machine import Event
from shared.core.request import events as ev
from shared.io.bus import Bus
from shared.protocol import subjects
from shared.protocol.errors import DeadlineExceeded, TsukimiError, Unavailable, WireError
from shared.protocol.ids import AttemptId
from shared.protocol.requests import Accepted, AttemptState, PlaceGivenUp, Placement, Reserved, SyncRequest


class NodeClient:
    def __init__(self, bus: Bus, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s

    async def place(self, command: ev.AskPlace) -> Event:
        attempt = command.request.attempt
        try:
            placement = await self._bus.request(subjects.PLACE, command.request, Placement, self._timeout_s)
        except DeadlineExceeded as e:
            await self._give_up(attempt)
            return ev.PlaceRefused(attempt, e.to_wire())
        except TsukimiError as e:
            return ev.PlaceRefused(attempt, e.to_wire())
        return ev.PlaceAnswered(attempt, placement)

    async def _give_up(self, attempt: AttemptId) -> None:
        """The conductor need not keep the place for us: it was late, or a node there refused. If this is lost, the place
        frees itself soon."""
        with contextlib.suppress(TsukimiError):
            await self._bus.publish(subjects.PLACE_GIVEN_UP, PlaceGivenUp(attempt))

    async def reserve(self, command: ev.Reserve) -> Event:
        attempt, node = command.request.attempt, command.node.node
        try:
            reserved = await self._bus.request(
                subjects.reserve(node), command.request, Reserved, self._timeout_s
            )
        except TsukimiError as e:
            await self._give_up(attempt)
            return ev.ReserveRefused(attempt, node, e.to_wire())
        return ev.ReserveAnswered(attempt, node, reserved)

    async def submit(self, command: ev.SubmitPrefill) -> Event:
        attempt, node = command.job.attempt, command.node.node
        try:
            await self._bus.request(subjects.prefill(node), command.job, Accepted, self._timeout_s)
        except TsukimiError as e:
            await self._give_up(attempt)
            return ev.SubmitRefused(attempt, node, e.to_wire())
        return ev.SubmitAnswered(attempt, node)

    async def sync(self, command: ev.AskSync) -> Event:
        question = SyncRequest(command.attempt, command.from_index)
        try:
            state = await self._bus.request(
                subjects.sync(command.node), question, AttemptState, self._timeout_s
            )
        except Unavailable as e:
            # Our own lost connection says nothing about the node.
            error = e.to_wire() if self._bus.connected else WireError("deadline_exceeded", "the bus is down")
            return ev.SyncFailed(command.attempt, command.node, error)
        except TsukimiError as e:
            return ev.SyncFailed(command.attempt, command.node, e.to_wire())
        return ev.SyncAnswered(command.attempt, command.node, state)
