"""Compiled code decides exactly as its source does: simulated runs are identical, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worlds.traces import dialogues
from tsukimi.compiled.build import CannotCompile, build
from tsukimi.compiled.sources import ROOT

PROGRAM = """
import sys
from pathlib import Path
if sys.argv[1] == "compiled":
    from tsukimi.compiled.load import use_compiled
    assert use_compiled()
from tsukimi.simulate.cluster import SimulatedCluster
from tsukimi.simulate.config import SimulationConfig
from tsukimi.simulate.report import report, to_json
from tsukimi.simulate.trace import read_trace
import shared.core.conductor.machine as conductor
assert conductor.__file__.endswith(".py") == (sys.argv[1] == "source")
requests = read_trace(Path(sys.argv[2]), speed=4.0, requests=0)
own = "tests.support.fakes.policies:LongPromptsWait"
for policy in ("random", "load_balance", "cache_aware", "kvcache_centric", own):
    config = SimulationConfig(
        prefill=3, decode=2, policy=policy,
        ttft_slo_s=6.0, tbt_slo_s=0.2, admission="predictive", pool_tokens=100_000, kv_tokens=60_000,
        inline_tokens=600, chunk_tokens=4096, max_prefills=3, keep_blocks=True,
    )
    cluster = SimulatedCluster(config, requests)
    cluster.run()
    cluster.check()
    sys.stdout.buffer.write(to_json(report(cluster)))
"""


@pytest.mark.timeout(600)  # compiles the source first, unless that has been done already
def test_compiled_runs_are_those_of_the_source(tmp_path: Path) -> None:
    try:
        build()
    except CannotCompile as e:
        pytest.skip(f"nothing can be compiled here: {e}")
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"\n".join(dialogues(300)))
    source, compiled = run("source", trace), run("compiled", trace)
    assert b'"rejected": 0,' not in source  # some requests were rejected, so admission is covered too
    assert compiled == source


def run(how: str, trace: Path) -> bytes:
    command = [sys.executable, "-c", PROGRAM, how, str(trace)]
    done = subprocess.run(command, capture_output=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
