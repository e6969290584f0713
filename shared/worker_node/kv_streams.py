"""What a worker streams out: every step's touched blocks, a layer at a time, to decode nodes and cache nodes.

Opened, committed and aborted on the event loop's thread. Written by the engine's thread while a step runs, and by another
one before a commit, when no step touches the attempt any more.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from shared.core.worker.steps import RunStep
from shared.core.worker.transfers import (
    AbortStreams,
    CommitHandoff,
    HandoffEnded,
    OpenHandoff,
    OpenPoolWrite,
    PoolWriteEnded,
    SendBlocks,
)
from shared.dataplane.api import DataPlane, PutStream, WriteStream
from shared.protocol.errors import TsukimiError
from shared.protocol.handoff import HandoffInfo
from shared.protocol.ids import AttemptId


class _Sink(ABC):
    """One open stream of an attempt. `owed` are blocks that are complete and still have to be sent whole."""

    def __init__(self) -> None:
        self.owed: set[int] = set()

    @abstractmethod
    def write(self, layer: int, blocks: Sequence[int]) -> None:
        """One layer of blocks, by their number in the sequence."""

    def settle(self, layers: int) -> None:
        """Send what is owed."""
        blocks, self.owed = sorted(self.owed), set()
        for layer in range(layers if blocks else 0):
            self.write(layer, blocks)


class _Handoff(_Sink):
    def __init__(self, stream: WriteStream, pages: tuple[int, ...]) -> None:
        super().__init__()
        self.stream = stream
        self._pages = pages

    def write(self, layer: int, blocks: Sequence[int]) -> None:
        self.stream.write(layer, [(block, self._pages[block]) for block in blocks])


class _Put(_Sink):
    """Blocks that were touched before the pool granted the put are owed."""

    def __init__(self, command: OpenPoolWrite, granted: asyncio.Task[PutStream | TsukimiError]) -> None:
        super().__init__()
        self.granted = granted
        self.stream: PutStream | None = None
        self._first = command.first_block
        self.pages = command.pages

    def write(self, layer: int, blocks: Sequence[int]) -> None:
        offered = [b for b in blocks if 0 <= b - self._first < len(self.pages) and b not in self.owed]
        if self.stream is None:
            self.owed.update(offered)
        elif offered:
            self.stream.write(layer, [(b - self._first, self.pages[b - self._first]) for b in offered])

    def settle(self, layers: int) -> None:
        if self.stream is not None:
            super().settle(layers)


class KVStreams:
    """Every open stream ends in exactly one HandoffEnded or PoolWriteEnded, given by the coroutine that commits or
    aborts it; by then nothing reads its pages any more."""

    def __init__(
        self,
        plane: DataPlane,
        layers: int,
        block_tokens: int,
        tasks: asyncio.TaskGroup,
        *,
        layerwise: bool = True,
    ) -> None:
        """`layerwise` off: nothing is sent before a stream is committed."""
        self._plane = plane
        self._layerwise = layerwise
        self._layers = layers
        self._block_tokens = block_tokens
        self._tasks = tasks
        self._handoffs: dict[AttemptId, _Handoff] = {}
        self._puts: dict[AttemptId, _Put] = {}
        self.early_slices = 0
        """Slices given to streams before the last layer of their step was computed."""
        self.last_layer_at = 0.0
        """time.monotonic() when the last layer of the latest streamed step was computed."""

    # -- opening and writing ---------------------------------------------------------------------------------------

    def open_handoff(self, command: OpenHandoff) -> None:
        stream = self._plane.open_write(command.target.decode, command.target.landing)
        self._handoffs[command.attempt] = _Handoff(stream, command.pages)

    def open_pool_write(self, command: OpenPoolWrite) -> None:
        granted = self._tasks.create_task(self._ask_pool(command))
        self._puts[command.attempt] = _Put(command, granted)

    async def _ask_pool(self, command: OpenPoolWrite) -> PutStream | TsukimiError:
        try:
            stream = await self._plane.open_put(command.pool, command.namespace, command.keys)
        except TsukimiError as e:
            return e
        self._puts[command.attempt].stream = stream
        return stream

    def send_blocks(self, command: SendBlocks) -> None:
        """All layers of complete blocks, at the latest before the stream is committed."""
        blocks = range(command.first_block, command.first_block + command.blocks)
        for sink in self._sinks(command.attempt, command.to_handoff, command.to_pool):
            sink.owed.update(blocks)

    def layer_writer(self, step: RunStep) -> Callable[[int], None] | None:
        """What is to be called as each layer of a step is computed; None if nothing of it is streamed."""
        touched = [
            (sink, range(s.start // self._block_tokens, (s.start + s.tokens - 1) // self._block_tokens + 1))
            for s in step.sequences
            for sink in self._sinks(s.attempt, True, True)
        ]
        if not self._layerwise:
            for sink, blocks in touched:
                sink.owed.update(blocks)
        if not touched or not self._layerwise:
            return None
        slices, last = sum(len(blocks) for _, blocks in touched), self._layers - 1

        def on_layer(layer: int) -> None:
            if layer == last:
                self.last_layer_at = time.monotonic()
            else:
                self.early_slices += slices
            for sink, blocks in touched:
                if layer == 0:
                    sink.settle(self._layers)
                sink.write(layer, blocks)

        return on_layer

    def _sinks(self, attempt: AttemptId, to_handoff: bool, to_pool: bool) -> list[_Sink]:
        sinks: list[_Sink] = []
        if to_handoff and attempt in self._handoffs:
            sinks.append(self._handoffs[attempt])
        if to_pool and attempt in self._puts:
            sinks.append(self._puts[attempt])
        return sinks

    # -- ending ----------------------------------------------------------------------------------------------------

    async def commit_handoff(self, command: CommitHandoff) -> HandoffEnded:
        handoff = self._handoffs.pop(command.attempt)
        await self._settle(handoff)
        info = HandoffInfo(command.first_token, command.first_logprob, command.cached_tokens)
        reply = await handoff.stream.commit(command.blocks, msgspec.msgpack.encode(info))
        return HandoffEnded(command.attempt, reply.ok, reply.error)

    async def commit_pool_write(self, attempt: AttemptId) -> PoolWriteEnded:
        put = self._puts[attempt]
        granted = await put.granted
        del self._puts[attempt]
        if isinstance(granted, TsukimiError):
            return PoolWriteEnded(attempt, 0, granted.message or granted.code)
        await self._settle(put)
        reply = await granted.commit(len(put.pages))
        return PoolWriteEnded(attempt, reply.stored, reply.error)

    def abort(self, command: AbortStreams) -> list[Awaitable[HandoffEnded | PoolWriteEnded]]:
        """One coroutine for each stream that is given up."""
        endings: list[Awaitable[HandoffEnded | PoolWriteEnded]] = []
        if command.handoff and command.attempt in self._handoffs:
            endings.append(self._abort_handoff(command.attempt, self._handoffs.pop(command.attempt)))
        if command.pool and command.attempt in self._puts:
            endings.append(self._abort_put(command.attempt))
        return endings

    async def _abort_handoff(self, attempt: AttemptId, handoff: _Handoff) -> HandoffEnded:
        await handoff.stream.abort()
        return HandoffEnded(attempt, False, "given up")

    async def _abort_put(self, attempt: AttemptId) -> PoolWriteEnded:
        granted = await self._puts[attempt].granted
        del self._puts[attempt]
        if not isinstance(granted, TsukimiError):
            await granted.abort()
        return PoolWriteEnded(attempt, 0, "given up")

    async def _settle(self, sink: _Sink) -> None:
        if sink.owed:
            await asyncio.to_thread(sink.settle, self._layers)
