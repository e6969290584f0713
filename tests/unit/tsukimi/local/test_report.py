from __future__ import annotations

import io

from rich.console import Console

from tsukimi.local.report import LineReport, TableReport, make_report


def test_a_moving_percentage_is_one_line() -> None:
    out = io.StringIO()
    report = LineReport(Console(file=out, width=200))
    for percent in (10, 20, 30):
        report.stage("decode-0", "loading", f"touching the KV pages ({percent}%)")
    report.stage("decode-0", "ready", "")
    assert [line.split("] ")[1] for line in out.getvalue().splitlines()] == [
        "decode-0     loading (touching the KV pages (10%))",
        "decode-0     ready",
    ]


def test_a_failure_shows_the_end_of_the_log() -> None:
    out = io.StringIO()
    LineReport(Console(file=out, width=200)).failure(
        "decode-0", "exited with code 3", "logs/decode-0.log", ["oh no"]
    )
    assert "decode-0 failed: it exited with code 3." in out.getvalue()
    assert "The end of logs/decode-0.log:\n  | oh no" in out.getvalue()


def test_a_terminal_gets_a_table_and_lines_after_it() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    report = make_report(console)
    assert isinstance(report, TableReport)
    report.stage("decode-0", "loading", "reading")
    report.summary(["Ready: here"])
    report.stage("decode-0", "restarting", "was killed by SIGKILL")
    report.close()
    text = out.getvalue()
    assert (
        text.index("reading") < text.index("Ready: here") < text.index("restarting (was killed by SIGKILL)")
    )


def test_a_pipe_gets_lines() -> None:
    assert not isinstance(make_report(Console(file=io.StringIO())), TableReport)
