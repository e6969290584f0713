from __future__ import annotations

from pathlib import Path

import pytest

from shared.core.machine import Command, Event
from shared.io.recorder import Recorder, read_recording


class Came(Event, frozen=True):
    key: bytes


class Went(Event, frozen=True):
    n: int


class Send(Command, frozen=True):
    to: str
    after_s: float = 0.1


class Stop(Command, frozen=True):
    pass


RECORDS = [
    (0.1 + 0.2, Came(bytes(range(256))), [Send("a"), Stop()]),
    (1e9 / 3, Went(-1), []),
    (1e9 / 3, Went(2), [Send("é", 1 / 3)]),
]


def record(path: Path) -> list[int]:
    """Sizes of the file after each record."""
    recorder = Recorder(path)
    sizes = [0]
    for now, event, commands in RECORDS:
        recorder.record(now, event, commands)
        sizes.append(path.stat().st_size)
    recorder.close()
    recorder.close()
    return sizes


def test_what_is_read_is_what_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "log")
    assert list(read_recording(tmp_path / "log", Came | Went, Send | Stop)) == RECORDS


def test_a_recorder_appends(tmp_path: Path) -> None:
    record(tmp_path / "log")
    record(tmp_path / "log")
    assert list(read_recording(tmp_path / "log", Came | Went, Send | Stop)) == RECORDS * 2


def test_a_cut_tail_is_ignored_wherever_it_is_cut(tmp_path: Path) -> None:
    sizes = record(tmp_path / "log")
    whole = (tmp_path / "log").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        complete = max(n for n, end in enumerate(sizes) if end <= size)
        assert list(read_recording(tmp_path / "cut", Came | Went, Send | Stop)) == RECORDS[:complete]


def test_each_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "log")
    recorder.record(*RECORDS[0])
    assert list(read_recording(tmp_path / "log", Came | Went, Send | Stop)) == RECORDS[:1]
    recorder.close()


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_recording(tmp_path / "none", Came, Stop))
