"""`tsukimi simulate --policy module:Class` with a module in the current folder, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fakes import broken_policies
from tests.support.typed import Terminal
from tests.support.worlds.traces import dialogues


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    (tmp_path / "trace.jsonl").write_bytes(b"\n".join(dialogues(20)))
    (tmp_path / "next_to_me.py").write_text(Path(broken_policies.__file__).read_text())
    return Terminal(tmp_path)


def test_a_policy_in_the_current_folder_is_found(terminal: Terminal) -> None:
    source = "from shared.core.conductor.placement_policies import LoadBalance\n"
    source += "class Own(LoadBalance):\n    def __init__(self, options): ...\n"
    (terminal.folder / "own_policy.py").write_text(source)
    assert "20" in terminal.type("tsukimi simulate trace.jsonl --policy own_policy:Own")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("next_to_me:Missing", "Missing"),
        ("nowhere_to_be_found:Own", "nowhere_to_be_found"),
        ("next_to_me:NoPlace", "has no method place(view)"),
        ("next_to_me:CannotBeMade", "wants more memory"),
        ("next_to_me:AlwaysRaises", "next_to_me.py:"),
        ("next_to_me:RaisesForLongPrompts", "failed on r"),
    ],
)
def test_a_wrong_one_is_a_sentence_and_the_exit_code_of_a_configuration_error(
    terminal: Terminal, policy: str, said: str
) -> None:
    done = terminal.run(f"tsukimi simulate trace.jsonl --policy {policy}")
    assert done.returncode == 78, done.stderr
    assert policy in done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
