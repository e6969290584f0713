"""A policy of a user that is wrong is a configuration error before anything depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.core.conductor.events import ConductorConfig
from shared.core.conductor.objectives import Objectives
from shared.core.conductor.placement_policies import POLICIES
from shared.io.config import ConfigError
from shared.io.plugins.policies import load_policies
from tests.support.fakes import broken_policies

BROKEN = broken_policies.__name__


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fastest", "must be one of"),
        (f"{BROKEN}:Missing", "Missing"),
        (f"{BROKEN}:NoPlace", "no method place"),
        (f"{BROKEN}:CannotBeMade", "wants more memory"),
        (f"{BROKEN}:TakesNothing", "TypeError"),
        (f"{BROKEN}:NOT_A_CLASS", "TypeError"),
        (f"{BROKEN}:AlwaysRaises", "ZeroDivisionError"),
        (f"{BROKEN}:NamesNobody", "AttributeError"),
        (f"{BROKEN}:NamesAStranger", "KeyError"),
        (f"{BROKEN}:PredictsNonsense", "nan"),
    ],
)
def test_a_wrong_policy_is_named_with_what_is_wrong(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as wrong:
        load_policies(ConductorConfig(policy=name))
    assert name in str(wrong.value)
    assert wrong.value.param == "policy"


@pytest.mark.parametrize(
    ("name", "said"),
    [("NoPlace", "no method choose"), ("ChooseRaises", "ZeroDivisionError"), ("Missing", "Missing")],
)
def test_so_is_a_wrong_decode_policy(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as wrong:
        load_policies(ConductorConfig(decode_policy=f"{BROKEN}:{name}"))
    assert wrong.value.param == "decode_policy"
    assert name in str(wrong.value)


def test_where_it_fails_is_told() -> None:
    with pytest.raises(ConfigError, match=r"broken_policies\.py:\d+"):
        load_policies(ConductorConfig(policy=f"{BROKEN}:AlwaysRaises"))


@pytest.mark.parametrize("policy", [*sorted(POLICIES), "tests.support.fakes.policies:LongPromptsWait"])
@pytest.mark.parametrize("inline_tokens", [0, 64])
def test_a_right_policy_passes_whatever_the_objectives(policy: str, inline_tokens: int) -> None:
    objectives = Objectives(ttft_s=1e-6, tbt_s=1e-6, max_wait_s=1e-6)
    load_policies(ConductorConfig(policy=policy, inline_tokens=inline_tokens, objectives=objectives))


def test_a_policy_may_refuse() -> None:
    load_policies(ConductorConfig(policy=f"{BROKEN}:Refuses"))


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_next_to_me.py").write_text(Path(broken_policies.__file__).read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_policies(ConductorConfig(policy="policy_next_to_me:AlwaysRaises"))
