"""Framed messages between two processes of a group: a small msgpack header, and raw bytes behind it."""

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
    """The other end has gone."""


class StageChannel(Generic[M]):
    """One end of a connected stream socket; messages of type M arrive. One thread may send and another receive."""

    def __init__(self, connected: socket.socket, arriving: Any) -> None:
        """`arriving`: M."""
        self._socket = connected
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(arriving)

    def send(self, message: msgspec.Struct, payload: memoryview | bytes = b"") -> None:
        """Blocks while the other end has no room. The payload, a view of bytes, may be reused afterwards. Raises
        ChannelClosed."""
        header = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(_SIZES.pack(len(header), len(payload)) + header)
            self._socket.sendall(payload)
        except OSError as e:
            raise ChannelClosed(str(e)) from e

    def receive(self) -> tuple[M, bytearray]:
        """The next message and its payload, a buffer of its own.

        Raises ChannelClosed when the other end went, between two messages or within one."""
        header_bytes, payload_bytes = _SIZES.unpack(self._exactly(_SIZES.size))
        if header_bytes > _MOST_HEADER_BYTES:
            raise ChannelClosed(f"a header of {header_bytes} bytes is none")
        message = self._decoder.decode(self._exactly(header_bytes))
        return message, self._exactly(payload_bytes)

    def close(self) -> None:
        """Idempotent. Whoever waits in `receive`, here or there, gets ChannelClosed."""
        with contextlib.suppress(OSError):  # the other end was first, or this one was
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
    """Receive in a thread of its own, so that who sends need not wait for who computes: `take` each message, until the
    link is closed. Where `take` blocks, the other end will too."""

    def read() -> None:
        try:
            while True:
                take(link.receive())
        except ChannelClosed:
            closed()

    threading.Thread(target=read, name="link", daemon=True).start()


def raw(rows: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, as a payload."""
    array: Any = rows.contiguous().numpy()
    return memoryview(array).cast("B") if array.size else memoryview(b"")
