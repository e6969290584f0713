"""A request body: JSON to a checked structure. Every mistake becomes an Invalid that names its field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from shared.protocol.errors import Invalid

T = TypeVar("T")


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. If a key is repeated, its last value counts."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError as e:
        raise Invalid("the body is nested too deeply") from e
    except msgspec.DecodeError as e:
        _name_the_field(data)
        raise Invalid(f"the body is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise Invalid("the body must be a JSON object")
    return value


def convert(value: Mapping[str, Any], type_: type[T]) -> T:
    """Convert to a Struct, strictly. null counts as absent where a field may be absent."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as e:
        message, _, path = str(e).partition(" - at `")
        param = path.removesuffix("`").removeprefix("$").removeprefix(".")
        if missing := re.search(r"missing required field `(\w+)`", message):
            param = f"{param}.{missing[1]}".removeprefix(".")
        raise Invalid(f"{param}: {message}" if param else message, param=param or None) from e


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    todo = [(value, path)]
    while todo:
        value, path = todo.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, Mapping):
            todo += [(v, f"{path}.{k}".removeprefix(".")) for k, v in value.items()]
        elif isinstance(value, list):
            todo += [(v, f"{path}[{i}]") for i, v in enumerate(value)]


def _name_the_field(data: bytes) -> None:
    """Name the field that is wrong in JSON that only a lax parser accepts (lone surrogates, NaN, infinities)."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(value, dict):
        return
    for path, text in _strings(value, ""):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise Invalid(f"{path}: not valid Unicode: a lone surrogate", param=path) from e
    for key, number in value.items():
        if isinstance(number, float) and not abs(number) < float("inf"):
            raise Invalid(f"{key}: {number} is not a number in JSON", param=key)
