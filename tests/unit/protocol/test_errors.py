from __future__ import annotations

import inspect

import pytest

from shared.protocol import errors
from shared.protocol.errors import BY_CODE, Internal, TooLarge, TsukimiError, WireError

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, TsukimiError) and cls is not TsukimiError
]


def test_every_error_has_a_code_of_its_own() -> None:
    assert {cls.code: cls for cls in CLASSES} == BY_CODE
    assert len(CLASSES) == len(BY_CODE)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_the_wire(cls: type[TsukimiError]) -> None:
    back = cls("what happened", param="max_tokens", retry_after_s=1.5).to_wire().to_exception()
    assert type(back) is cls
    assert (str(back), back.param, back.retry_after_s) == ("what happened", "max_tokens", 1.5)


def test_a_code_from_a_later_version_is_internal() -> None:
    back = WireError("quantum", "odd").to_exception()
    assert type(back) is Internal
    assert back.message == "odd"


def test_too_large_is_invalid_and_neither_is_retried() -> None:
    assert not TooLarge.retryable
    assert issubclass(TooLarge, errors.Invalid)
