"""Which test runs which command of the documents."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.support.documented import Command, commands

QUICK = "tests/unit/test_documented_commands.py"
CLUSTERS = "tests/e2e/test_documented_clusters.py"
REAL = "tests/e2e/test_documented_benches.py"
QUICKSTART = "tests/e2e/test_quickstart.py"
COMPOSE = "tests/compose/stack.py"
CI = ".ci/run"


class Claim(NamedTuple):
    files: str
    """A pattern of whole file names."""
    text: str
    """A pattern of whole commands."""
    runner: str
    """`file::name`: a function in a Python file, or words in another one."""

    def covers(self, command: Command) -> bool:
        return bool(
            re.fullmatch(self.files, command.file) and re.fullmatch(self.text, command.text, re.DOTALL)
        )


CLAIMS = (
    Claim("README.md", r"make up", f"{QUICKSTART}::test_make_up_then_curl_then_ctrl_c"),
    Claim("README.md", r"curl -N .*", f"{QUICKSTART}::test_make_up_then_curl_then_ctrl_c"),
    Claim("README.md", r"make down", f"{QUICKSTART}::test_make_down_stops_a_cluster_in_the_background"),
    Claim(r"CONTRIBUTING\.md|docs/.*", r"make (install|compiled|references)", f"{QUICKSTART}::test_make_target"),
    Claim(r"README\.md|CONTRIBUTING\.md", r"make test", f"{CI}::make test"),
    Claim(r"README\.md|CONTRIBUTING\.md", r"make check", f"{CI}::make check"),
    Claim(r"README\.md|CONTRIBUTING\.md", r"\.ci/run", f"{QUICK}::test_a_script_is_a_program"),
    Claim("README.md", r"docker compose up --build", f"{COMPOSE}::stack"),
    Claim("README.md", r"docker compose exec gateway tsukimi status", f"{COMPOSE}::status"),
    Claim("README.md", r"export PIP_EXTRA_INDEX_URL=\.\.\.", f"{QUICK}::test_pip_hears_of_the_index"),
    Claim("README.md", r"\.venv/bin/tsukimi", f"{QUICKSTART}::test_make_target"),
    Claim(r"CONTRIBUTING\.md", r"\.venv/bin/python -m pytest .*", f"{QUICK}::test_pytest_finds_tests"),
    Claim(r".*", r"python -m services\.\w+( --help| --model \.\.\.)?", f"{QUICK}::test_a_service_explains_itself"),
    Claim(r".*", r"tsukimi simulate( .*)?", f"{QUICK}::test_a_trace_is_simulated"),
    Claim(r".*", r"tsukimi reproduce( .*)?", f"{QUICK}::test_the_papers_are_reproduced"),
    Claim(r".*", r"tsukimi replay FILE", f"{QUICK}::test_a_recording_is_replayed"),
    Claim("README.md", r"tsukimi fetch MODEL", f"{REAL}::test_a_model_is_fetched"),
    Claim("README.md", r"tsukimi bench (engine|stack|handoff)", f"{REAL}::test_a_bench_of_its_own"),
    Claim(r".*", r"tsukimi up( --(prefill|decode) \d| --set decode\S+)*", f"{CLUSTERS}::test_a_cluster_answers"),
    Claim("README.md", r"tsukimi up --use prefill=mypackage\.myprefill", f"{CLUSTERS}::test_a_service_in_a_package"),
    Claim(
        r".*", r"tsukimi (status|chat|bench (prefix|serve|trace TRACE)|logs decode-0)",
        f"{CLUSTERS}::test_a_command_on_a_cluster",
    ),
    Claim("README.md", r"tsukimi down", f"{CLUSTERS}::test_a_cluster_answers"),
    Claim(r"docs/experiments\.md", r"tsukimi up --policy \S+", f"{CLUSTERS}::test_the_policy_serves"),
    Claim(
        r"docs/experiments\.md", r"tsukimi up --set conductor\.record=\S+|tsukimi replay /tmp\S+",
        f"{CLUSTERS}::test_what_was_recorded_is_replayed",
    ),
    Claim(
        r"docs/experiments\.md", r"PYTHONPATH=\. tsukimi up .*--use prefill=myprefill|python -m MODULE|curl -s .*",
        f"{CLUSTERS}::test_the_service_serves",
    ),
)  # fmt: skip


def claimed(runner: str) -> list[str]:
    """The commands of a runner, each text once."""
    mine = [claim for claim in CLAIMS if claim.runner == runner]
    return list(dict.fromkeys(c.text for c in commands() if any(claim.covers(c) for claim in mine)))
