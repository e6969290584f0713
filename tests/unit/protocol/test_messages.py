"""Messages from other versions: what was once sent decodes for ever, and what is added later hurts nobody."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest
from msgspec import NODEFAULT

from shared.protocol import cluster, errors, requests
from shared.protocol.errors import Invalid
from shared.protocol.requests import TokenDelta
from shared.protocol.sampling import TokenLogprob
from shared.protocol.wire import decode, encode
from tests.unit.protocol.samples import ATTEMPT, SAMPLES, golden

MESSAGES = {
    cls
    for module in (cluster, requests, errors)
    for _, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, msgspec.Struct) and cls.__module__ == module.__name__ and cls.__struct_config__.tag
}
kinds = pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: type(s).__name__)


def test_every_message_has_a_sample_and_a_tag_of_its_own() -> None:
    assert {type(sample) for sample in SAMPLES} == MESSAGES
    tags = [cls.__struct_config__.tag for cls in MESSAGES]
    assert len(set(tags)) == len(tags)


@kinds
def test_golden_bytes_decode(sample: Any) -> None:
    assert decode(bytes.fromhex(golden()[type(sample).__name__]), type(sample)) == sample


@kinds
def test_what_is_encoded_now_decodes_as_itself(sample: Any) -> None:
    assert decode(encode(sample), type(sample)) == sample


@kinds
def test_fields_unknown_here_are_ignored(sample: Any) -> None:
    plain = msgspec.msgpack.decode(encode(sample))
    newer = msgspec.msgpack.encode({**plain, "added_in_a_later_version": {"deep": [1, 2]}})
    assert decode(newer, type(sample)) == sample


@kinds
def test_fields_that_an_older_sender_lacks_have_defaults(sample: Any) -> None:
    plain = msgspec.msgpack.decode(encode(sample))
    fields = msgspec.structs.fields(sample)
    required = {f.encode_name for f in fields if f.required}
    oldest = {name: value for name, value in plain.items() if name == "type" or name in required}
    decoded = decode(msgspec.msgpack.encode(oldest), type(sample))
    for field in fields:
        if field.required:
            assert getattr(decoded, field.name) == getattr(sample, field.name)
        elif field.default is not NODEFAULT:
            assert getattr(decoded, field.name) == field.default


@kinds
def test_a_missing_required_field_is_named(sample: Any) -> None:
    plain = msgspec.msgpack.decode(encode(sample))
    for field in msgspec.structs.fields(sample):
        if field.required:
            lacking = {name: value for name, value in plain.items() if name != field.encode_name}
            with pytest.raises(Invalid, match=field.encode_name):
                decode(msgspec.msgpack.encode(lacking), type(sample))


def test_array_like_structs_grow_at_the_end() -> None:
    shortest = msgspec.msgpack.encode([ATTEMPT, 3])
    assert decode(shortest, TokenDelta) == TokenDelta(ATTEMPT, 3)
    longer = msgspec.msgpack.encode([ATTEMPT, 3, [5], [], None, "", None, 0.0, None, "added later"])
    assert decode(longer, TokenDelta) == TokenDelta(ATTEMPT, 3, (5,))
    assert decode(msgspec.msgpack.encode([-0.5, [], "later"]), TokenLogprob) == TokenLogprob(-0.5)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x00", b"\x81\xa4type\xa4nope", encode(SAMPLES[0])[:-1]])
def test_garbage_is_invalid(data: bytes) -> None:
    with pytest.raises(Invalid, match="malformed"):
        decode(data, cluster.NodeInfo | cluster.NodeLoad)


def test_messages_are_values() -> None:
    for sample in SAMPLES:
        assert sample.__struct_config__.frozen
