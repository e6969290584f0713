"""Framed messages between two processes of a group: a small msgpack header, followed by raw bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
import torch

_SIZES = struct.Struct("<IQ")
"""Bytes of the header, bytes of the payload."""
_MOST_HEADER_BYTES = 1 << 26

M = TypeVar("M")


class ChannelClosed(Exception):
    """The other end is closed, or its process has ended."""


class StageChannel(Generic[M]):
    """One end of a connected stream socket. It receives messages of type M and sends any Struct. One thread may send
    while another receives."""

    def __init__(self, connected: socket.socket, arriving: Any) -> None:
        """`arriving` is the type M, for the decoder."""
        self._socket = connected
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(arriving)

    def send(self, message: msgspec.Struct, payload: memoryview | bytes = b"") -> None:
        """Blocks while the socket's buffer is full. The payload is a view of bytes and may be reused afterwards. Raises
        ChannelClosed."""
        header = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(_SIZES.pack(len(header), len(payload)) + header)
            self._socket.sendall(payload)
        except OSError as e:
            raise ChannelClosed(str(e)) from e

    def receive(self) -> tuple[M, bytearray]:
        """Block for the next message. Returns it and its payload, in a new buffer.

        Raises ChannelClosed if the other end closes, between two messages or within one."""
        header_bytes, payload_bytes = _SIZES.unpack(self._exactly(_SIZES.size))
        if header_bytes > _MOST_HEADER_BYTES:
            raise ChannelClosed(f"a header of {header_bytes} bytes is too large")
        message = self._decoder.decode(self._exactly(header_bytes))
        return message, self._exactly(payload_bytes)

    def close(self) -> None:
        """Idempotent. A thread that waits in `receive`, at either end, gets ChannelClosed."""
        with contextlib.suppress(OSError):  # one of the ends is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as e:
                raise ChannelClosed(str(e)) from e
            if count == 0:
                raise ChannelClosed("the other end has closed")
            view = view[count:]
        return buffer


def read_ahead(
    link: StageChannel[M], take: Callable[[tuple[M, bytearray]], None], closed: Callable[[], None]
) -> None:
    """Receive in a separate thread, so that the sender need not wait until this process has computed. The thread calls
    `take` with each message and its payload, and `closed` once the link is closed. While `take` blocks, nothing is
    received, so in the end the sender blocks too."""

    def read() -> None:
        try:
            while True:
                take(link.receive())
        except ChannelClosed:
            closed()

    threading.Thread(target=read, name="link", daemon=True).start()


def raw(rows: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, as a payload."""
    array: Any = rows.contiguous().numpy()
    return memoryview(array).cast("B") if array.size else memoryview(b"")
