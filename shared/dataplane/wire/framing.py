"""Bytes to frames and back, without a socket in sight.

header   magic 4 | version u8 | kind u8 | extents u16 | body bytes u32 | payload bytes u64      little-endian
body     msgpack
extents  (offset u64, length u64)*    where in the sender's memory the payload is; none: the payload itself follows
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.dataplane.wire.frames import KINDS, TYPES, Message
from shared.protocol.errors import Invalid

MAGIC = b"TKMD"
VERSION = 1
HEADER = struct.Struct("<4sBBHIQ")
EXTENT = struct.Struct("<QQ")
MAX_BODY_BYTES = 8 << 20
MAX_PAYLOAD_BYTES = 256 << 20
MAX_EXTENTS = 0xFFFF
FRAME_BYTES = 4 << 20
"""Payload that senders aim for in one frame: large enough to be cheap, small enough to be verified in the CPU's cache."""

Extent = tuple[int, int]
"""(offset, length) in somebody's memory."""

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(type_) for kind, type_ in TYPES.items()}


class FrameError(Invalid):
    """What arrived is no frame of this protocol. The stream it came on is beyond repair."""


class Frame(NamedTuple):
    message: Message
    payload_bytes: int = 0
    extents: tuple[Extent, ...] = ()
    """Where the payload is in the sender's memory; empty when it follows on the stream."""


def encode(message: Message, payload_bytes: int = 0, extents: Sequence[Extent] = ()) -> bytes:
    """Everything of a frame but an inline payload. Raises FrameError when it would break a limit."""
    body = _encoder.encode(message)
    if len(body) > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES or len(extents) > MAX_EXTENTS:
        raise FrameError(
            f"{type(message).__name__} of {len(body)} bytes with {payload_bytes} payload bytes in {len(extents)} "
            f"extents is over the limits ({MAX_BODY_BYTES}, {MAX_PAYLOAD_BYTES}, {MAX_EXTENTS})"
        )
    header = HEADER.pack(MAGIC, VERSION, KINDS[type(message)], len(extents), len(body), payload_bytes)
    return header + body + b"".join(EXTENT.pack(*extent) for extent in extents)


class FrameDecoder:
    """One frame after another from bytes cut anywhere. Never holds more than one frame's header, body and extents."""

    def __init__(self) -> None:
        self._header: tuple[int, int, int, int] | None = None
        self._buffer = bytearray()
        self.payload_left = 0
        """Inline payload bytes of the last frame not yet accounted for by `payload_taken`."""

    @property
    def midway(self) -> bool:
        """A frame, or its payload, has begun and is not complete."""
        return bool(self._header or self._buffer or self.payload_left)

    def wanted(self) -> int:
        """How many more bytes before `feed` can get any further."""
        return self._goal() - len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Frame | None:
        """Take at most `wanted()` bytes. Returns the frame they complete, if they do; its payload comes next."""
        if self.payload_left:
            raise FrameError(f"{self.payload_left} payload bytes have not been taken")
        if len(data) > self.wanted():
            raise FrameError(f"{len(data)} bytes given, {self.wanted()} wanted")
        self._buffer += data
        if self._header is None and len(self._buffer) == HEADER.size:
            self._header = _check_header(self._buffer)
            self._buffer.clear()
        if self._header is None or self.wanted():
            return None
        return self._finish()

    def payload_taken(self, count: int) -> None:
        if not 0 <= count <= self.payload_left:
            raise FrameError(f"{count} payload bytes taken, {self.payload_left} left")
        self.payload_left -= count

    def _goal(self) -> int:
        if self._header is None:
            return HEADER.size
        _, extents, body_bytes, _ = self._header
        return body_bytes + extents * EXTENT.size

    def _finish(self) -> Frame:
        assert self._header is not None
        kind, extent_count, body_bytes, payload_bytes = self._header
        try:
            message = _decoders[kind].decode(memoryview(self._buffer)[:body_bytes])
        except msgspec.MsgspecError as e:
            raise FrameError(f"malformed {TYPES[kind].__name__}: {e}") from e
        extents = tuple(EXTENT.iter_unpack(bytes(self._buffer[body_bytes:])))
        if extent_count and sum(length for _, length in extents) != payload_bytes:
            raise FrameError(f"extents do not add up to the payload's {payload_bytes} bytes")
        self._header = None
        self._buffer = bytearray()
        self.payload_left = 0 if extent_count else payload_bytes
        return Frame(message, payload_bytes, extents)


def _check_header(data: bytearray) -> tuple[int, int, int, int]:
    magic, version, kind, extents, body_bytes, payload_bytes = HEADER.unpack(data)
    if magic != MAGIC:
        raise FrameError(f"not a data plane peer: it begins with {bytes(data[:8])!r}")
    if version != VERSION:
        raise FrameError(f"the peer speaks data plane version {version}, this node {VERSION}")
    if kind not in TYPES:
        raise FrameError(f"unknown frame kind {kind}")
    if body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a frame of {body_bytes} + {payload_bytes} bytes is over the limits")
    return kind, extents, body_bytes, payload_bytes
