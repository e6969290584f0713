from __future__ import annotations

import inspect

import nats.errors
import pytest

from shared.io.nats_errors import MEANING, translated
from shared.protocol.errors import DeadlineExceeded, Overloaded, TooLarge, TsukimiError, Unavailable

CLASSES = [c for _, c in inspect.getmembers(nats.errors, inspect.isclass) if issubclass(c, nats.errors.Error)]


@pytest.mark.parametrize("foreign", CLASSES)
def test_every_error_of_the_client_has_a_meaning(foreign: type[Exception]) -> None:
    assert foreign in MEANING
    assert issubclass(MEANING[foreign], TsukimiError)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        (nats.errors.OutboundBufferLimitError(), Overloaded),
        (nats.errors.MaxPayloadError(), TooLarge),
        (nats.errors.FlushTimeoutError(), DeadlineExceeded),
        (ConnectionResetError("gone"), Unavailable),
    ],
)
def test_they_are_raised_as_ours_with_the_cause(foreign: Exception, ours: type[TsukimiError]) -> None:
    with pytest.raises(ours) as e, translated():
        raise foreign
    assert e.value.__cause__ is foreign


def test_a_subclass_unknown_here_means_what_its_base_means() -> None:
    class Newer(nats.errors.ConnectionClosedError):
        pass

    with pytest.raises(Unavailable), translated():
        raise Newer


def test_other_exceptions_pass() -> None:
    with pytest.raises(KeyError), translated():
        raise KeyError("mine")
