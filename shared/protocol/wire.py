"""msgpack encoding of every message: one tagged union, decoded by type. Unknown fields are ignored."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from shared.protocol.errors import Invalid

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


class Undecoded(Struct, frozen=True):
    """A message received or sent as raw bytes, for subjects that carry other encodings besides msgpack."""

    data: bytes


def encode(message: Any) -> bytes:
    return message.data if isinstance(message, Undecoded) else _encoder.encode(message)


def decode(data: bytes | memoryview, type_: Any) -> Any:
    """Decode `data` as `type_` (a Struct or a union of tagged Structs). Raises Invalid naming what is wrong."""
    if type_ is Undecoded:
        return Undecoded(bytes(data))
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.msgpack.Decoder(type_)
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise Invalid(f"malformed message: {e}") from e
