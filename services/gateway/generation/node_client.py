"""Questions to the conductor and the nodes. Every question ends in an event, even if nobody answers."""

from __future__ import annotations

import asyncio
import contextlib
import time

from msgspec.structs import replace

from shared.core.machine import Event
from shared.core.request import events as ev
from shared.io.bus import Bus
from shared.protocol import subjects
from shared.protocol.errors import DeadlineExceeded, TsukimiError, Unavailable, WireError
from shared.protocol.ids import AttemptId, Incarnation
from shared.protocol.requests import Accepted, AttemptState, PlaceGivenUp, Placement, Reserved, SyncRequest


class NodeClient:
    def __init__(self, bus: Bus, timeout_s: float, incarnation: Incarnation) -> None:
        """`incarnation`: the gateway's life, whose clock stamps questions."""
        self._bus = bus
        self._timeout_s = timeout_s
        self._incarnation = incarnation

    async def place(self, command: ev.AskPlace) -> Event:
        """The conductor is told if nobody waits for its answer any more."""
        attempt = command.request.attempt
        request = replace(
            command.request, asker=self._incarnation, asked_at_s=time.monotonic(), waits_s=self._timeout_s
        )
        try:
            placement = await self._bus.request(subjects.PLACE, request, Placement, self._timeout_s)
        except DeadlineExceeded as e:
            await self._give_up(attempt)
            return ev.PlaceRefused(attempt, e.to_wire())
        except asyncio.CancelledError:  # the client left
            await self._give_up(attempt)
            raise
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
