"""The frame codec: any cut of the stream is the same stream, and rubbish is an error at once."""

from __future__ import annotations

import itertools
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.dataplane.wire import framing
from shared.dataplane.wire.frames import (
    KINDS,
    TYPES,
    Abort,
    Blocks,
    Commit,
    Message,
    OpenRead,
    StreamEnded,
    Write,
)
from shared.dataplane.wire.framing import EXTENT, HEADER, Frame, FrameDecoder, FrameError, encode

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
messages = st.one_of(
    st.builds(Write, stream=u32, layer=u32, blocks=st.lists(u32), checksums=st.lists(u64)),
    st.builds(Commit, stream=u32, blocks=u32, info=st.binary()),
    st.builds(OpenRead, read=u32, namespace=st.binary(max_size=16), keys=st.lists(st.binary(max_size=16))),
    st.builds(StreamEnded, stream=u32, ok=st.booleans(), error=st.text()),
)
extents = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**16)), max_size=5)
frames = st.lists(st.tuples(messages, st.binary(max_size=64), extents), max_size=4)


def on_the_wire(message: Message, payload: bytes, extents: list[tuple[int, int]]) -> bytes:
    if extents:
        return encode(message, sum(length for _, length in extents), extents)
    return encode(message, len(payload)) + payload


def decode_in_pieces(stream: bytes, sizes: list[int]) -> list[tuple[Frame, bytes]]:
    decoder, found, at = FrameDecoder(), [], 0
    pieces = itertools.cycle(sizes or [len(stream) or 1])
    while at < len(stream):
        piece = stream[at : at + next(pieces)]
        at += len(piece)
        while piece:
            if decoder.payload_left:
                part, piece = piece[: decoder.payload_left], piece[decoder.payload_left :]
                decoder.payload_taken(len(part))
                found[-1] = (found[-1][0], found[-1][1] + part)
                continue
            wanted = decoder.wanted()
            frame = decoder.feed(piece[:wanted])
            piece = piece[wanted:]
            if frame is not None:
                found.append((frame, b""))
    assert not decoder.midway
    return found


@given(frames=frames, sizes=st.lists(st.integers(1, 40), max_size=8))
def test_any_split_of_the_stream_decodes_the_same(
    frames: list[tuple[Message, bytes, list[tuple[int, int]]]], sizes: list[int]
) -> None:
    stream = b"".join(on_the_wire(*frame) for frame in frames)
    decoded = decode_in_pieces(stream, sizes)
    assert [(frame.message, payload) for frame, payload in decoded] == [
        (message, b"" if extents else payload) for message, payload, extents in frames
    ]
    assert [list(frame.extents) for frame, _ in decoded] == [extents for _, _, extents in frames]


@given(garbage=st.binary(min_size=HEADER.size, max_size=200))
def test_garbage_is_an_error_and_never_a_wait_for_more(garbage: bytes) -> None:
    if garbage.startswith(framing.MAGIC):
        garbage = b"x" + garbage
    with pytest.raises(FrameError, match="not a data plane peer"):
        FrameDecoder().feed(garbage[: HEADER.size])


@given(body=st.binary(max_size=100), kind=st.sampled_from(sorted(TYPES)))
def test_a_garbled_body_is_an_error_or_a_message(body: bytes, kind: int) -> None:
    decoder = FrameDecoder()
    try:
        frame = decoder.feed(HEADER.pack(framing.MAGIC, framing.VERSION, kind, 0, len(body), 0))
        if body:
            frame = decoder.feed(body)
    except FrameError:
        return
    assert frame is not None
    assert isinstance(frame.message, TYPES[kind])


@pytest.mark.parametrize(
    ("body", "payload"), [(framing.MAX_BODY_BYTES + 1, 0), (0, framing.MAX_PAYLOAD_BYTES + 1)]
)
def test_sizes_over_the_limits_are_refused_before_anything_is_allocated(body: int, payload: int) -> None:
    with pytest.raises(FrameError, match="over the limits"):
        FrameDecoder().feed(HEADER.pack(framing.MAGIC, framing.VERSION, 7, 0, body, payload))


def test_too_much_is_not_sent_either() -> None:
    with pytest.raises(FrameError, match="over the limits"):
        encode(Abort(1), framing.MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(FrameError, match="over the limits"):
        encode(Commit(1, 1, bytes(framing.MAX_BODY_BYTES)))


def test_another_version_is_named() -> None:
    with pytest.raises(FrameError, match=f"version 9, this node {framing.VERSION}"):
        FrameDecoder().feed(HEADER.pack(framing.MAGIC, 9, 7, 0, 0, 0))


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(FrameError, match="unknown frame kind 200"):
        FrameDecoder().feed(HEADER.pack(framing.MAGIC, framing.VERSION, 200, 0, 0, 0))


def test_extents_that_do_not_add_up_are_refused() -> None:
    good = encode(Blocks(1, 0, 1), 30, [(0, 10), (100, 20)])
    bad = bytearray(good)
    bad[-EXTENT.size :] = EXTENT.pack(100, 21)
    decoder = FrameDecoder()
    decoder.feed(bytes(bad[: HEADER.size]))
    with pytest.raises(FrameError, match="do not add up"):
        decoder.feed(bytes(bad[HEADER.size :]))


def test_fields_added_by_a_later_version_are_ignored() -> None:
    body = msgspec.msgpack.encode([7, "what a later version adds"])
    decoder = FrameDecoder()
    decoder.feed(HEADER.pack(framing.MAGIC, framing.VERSION, KINDS[Abort], 0, len(body), 0))
    frame = decoder.feed(body)
    assert frame is not None
    assert frame.message == Abort(7)


def test_golden_bytes_of_version_1() -> None:
    assert encode(Abort(7)) == b"TKMD" + struct.pack("<BBHIQ", 1, 7, 0, 2, 0) + b"\x91\x07"
