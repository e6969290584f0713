"""Who may talk to whom."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.dataplane.wire.frames import Hello
from shared.dataplane.wire.hello import Identity, judge
from shared.protocol.errors import Refused, Unavailable
from shared.protocol.model import KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=4, block_tokens=16, dtype="float32", dtype_bytes=4)
ME = Identity("decode-0", "aaaa", b"\x01" * 16)
GOOD = Hello("prefill-0", "bbbb", "decode-0", "aaaa", LAYOUT, b"\x01" * 16)


def changed(**fields: Any) -> Hello:
    return msgspec.structs.replace(GOOD, **fields)


def test_the_same_everything_is_welcome() -> None:
    assert judge(GOOD, ME, LAYOUT) is None


def test_a_side_without_a_namespace_takes_any() -> None:
    assert judge(changed(namespace=b""), ME, LAYOUT) is None
    assert judge(GOOD, Identity("decode-0", "aaaa"), LAYOUT) is None


@pytest.mark.parametrize("field", ["target", "target_incarnation"])
def test_somebody_else_was_meant(field: str) -> None:
    error = judge(changed(**{field: "other"}), ME, LAYOUT)
    assert isinstance(error, Unavailable)
    assert "other" in error.message
    assert "life aaaa of decode-0" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 3),
        ("kv_heads", 2),
        ("head_dim", 8),
        ("block_tokens", 32),
        ("dtype", "float16"),
        ("dtype_bytes", 2),
    ],
)
def test_every_fact_of_the_layout_counts(field: str, value: Any) -> None:
    error = judge(changed(layout=msgspec.structs.replace(LAYOUT, **{field: value})), ME, LAYOUT)
    assert isinstance(error, Refused)
    assert str(value) in error.message
    assert str(getattr(LAYOUT, field)) in error.message


def test_another_namespace_is_refused() -> None:
    error = judge(changed(namespace=b"\x02" * 16), ME, LAYOUT)
    assert isinstance(error, Refused)
    assert "01" * 16 in error.message
    assert "02" * 16 in error.message
