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

from shared.core.worker.steps import RunStep, SequenceStep
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
from shared.dataplane.wire.checksums import SharedChecksums
from shared.protocol.errors import TsukimiError
from shared.protocol.handoff import HandoffInfo
from shared.protocol.ids import AttemptId


class _Sink(ABC):
    """One open stream of an attempt. `owed` are blocks that are complete and still have to be sent whole."""

    def __init__(self) -> None:
        self.owed: set[int] = set()

    @abstractmethod
    def write(self, layer: int, blocks: Sequence[int], checksums: SharedChecksums | None = None) -> None:
        """One layer of blocks, by their number in the sequence."""

    def settle(self, layers: int, checksums: Sequence[SharedChecksums] = ()) -> None:
        """Send what is owed. `checksums`: one a layer, or none."""
        blocks, self.owed = sorted(self.owed), set()
        for layer in range(layers if blocks else 0):
            self.write(layer, blocks, checksums[layer] if checksums else None)


class _Handoff(_Sink):
    def __init__(self, stream: WriteStream, pages: tuple[int, ...]) -> None:
        super().__init__()
        self.stream = stream
        self.pages = pages

    def write(self, layer: int, blocks: Sequence[int], checksums: SharedChecksums | None = None) -> None:
        self.stream.write(layer, [(block, self.pages[block]) for block in blocks], checksums)


class _Put(_Sink):
    """Blocks that were touched before the pool granted the put are owed."""

    def __init__(self, command: OpenPoolWrite, granted: asyncio.Task[PutStream | TsukimiError]) -> None:
        super().__init__()
        self.granted = granted
        self.stream: PutStream | None = None
        self._first = command.first_block
        self.pages = command.pages

    def write(self, layer: int, blocks: Sequence[int], checksums: SharedChecksums | None = None) -> None:
        offered = [b for b in blocks if 0 <= b - self._first < len(self.pages) and b not in self.owed]
        if self.stream is None:
            self.owed.update(offered)
        elif offered:
            pairs = [(b - self._first, self.pages[b - self._first]) for b in offered]
            self.stream.write(layer, pairs, checksums)

    def settle(self, layers: int, checksums: Sequence[SharedChecksums] = ()) -> None:
        if self.stream is not None:
            super().settle(layers, checksums)


class _Touched:
    """A sequence in a step: its open streams, and the blocks that the step computes a part of."""

    def __init__(self, sequence: SequenceStep, block_tokens: int, sinks: list[_Sink]) -> None:
        end = sequence.start + sequence.tokens
        self.sinks = sinks
        self.blocks = range(sequence.start // block_tokens, (end - 1) // block_tokens + 1)
        self._whole_before = sequence.pages[: sequence.start // block_tokens]
        self._whole_after = sequence.pages[self.blocks.start : end // block_tokens]

    def write(self, layer: int, layers: int) -> None:
        """Send a computed layer, and before the first one what is owed.

        A slice that the step makes or leaves complete is hashed once for all streams. Checksums are kept no longer than
        this call: a step that failed is run again and writes its slices anew.
        """
        several = len(self.sinks) > 1
        if layer == 0:
            owed = [SharedChecksums(i, self._whole_before) for i in range(layers)] if several else []
            for sink in self.sinks:
                sink.settle(layers, owed)
        checksums = SharedChecksums(layer, self._whole_after) if several else None
        for sink in self.sinks:
            sink.write(layer, self.blocks, checksums)


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
        self._final: dict[AttemptId, list[SharedChecksums]] = {}
        """Of attempts of which one stream is committed and another is open: checksums that both use."""
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
            _Touched(s, self._block_tokens, sinks)
            for s in step.sequences
            if (sinks := self._sinks(s.attempt, True, True))
        ]
        if not self._layerwise:
            for one in touched:
                for sink in one.sinks:
                    sink.owed.update(one.blocks)
        if not touched or not self._layerwise:
            return None
        slices, last = sum(len(one.blocks) * len(one.sinks) for one in touched), self._layers - 1

        def on_layer(layer: int) -> None:
            if layer == last:
                self.last_layer_at = time.monotonic()
            else:
                self.early_slices += slices
            for one in touched:
                one.write(layer, self._layers)

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
        await self._settle(command.attempt, handoff, handoff.pages)
        info = HandoffInfo(command.first_token, command.first_logprob, command.cached_tokens)
        reply = await handoff.stream.commit(command.blocks, msgspec.msgpack.encode(info))
        return HandoffEnded(command.attempt, reply.ok, reply.error)

    async def commit_pool_write(self, attempt: AttemptId) -> PoolWriteEnded:
        put = self._puts[attempt]
        granted = await put.granted
        del self._puts[attempt]
        if isinstance(granted, TsukimiError):
            self._final.pop(attempt, None)
            return PoolWriteEnded(attempt, 0, granted.message or granted.code)
        await self._settle(attempt, put, put.pages)
        reply = await granted.commit(len(put.pages))
        return PoolWriteEnded(attempt, reply.stored, reply.error)

    def abort(self, command: AbortStreams) -> list[Awaitable[HandoffEnded | PoolWriteEnded]]:
        """One coroutine for each stream that is given up."""
        endings: list[Awaitable[HandoffEnded | PoolWriteEnded]] = []
        self._final.pop(command.attempt, None)
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

    async def _settle(self, attempt: AttemptId, sink: _Sink, pages: Sequence[int]) -> None:
        """Send what is owed before a commit. No step touches the attempt any more: all its pages are final."""
        known = self._final.pop(attempt, None)
        if known is None:
            known = [SharedChecksums(layer, pages) for layer in range(self._layers)]
        if attempt in self._handoffs or attempt in self._puts:
            self._final[attempt] = known
        if sink.owed:
            await asyncio.to_thread(sink.settle, self._layers, known)
