from __future__ import annotations

import socket
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from shared.io.config import BaseConfig, ConfigError, HelpAsked, load_config, redacted


class Config(BaseConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_running: Annotated[int, Meta(ge=1, le=1000, description="Sequences in a batch.")] = 8
    eager: bool = False
    """Start at once."""
    buckets: tuple[float, ...] = ()
    api_key: str = ""
    block_tokens: int = 16


def load(*argv: str, **environ: str) -> Config:
    return load_config(Config, "decode", argv, environ)


def test_defaults_depend_on_role_and_machine() -> None:
    config = load()
    assert (config.node, config.host, config.advertise) == ("decode-0", socket.gethostname(), "127.0.0.1")
    assert load("--bind", "10.0.0.1").advertise == "10.0.0.1"


def test_the_command_line_beats_the_environment_beats_the_defaults() -> None:
    environ = {
        "TSUKIMI_DECODE_MAX_RUNNING": "3",
        "TSUKIMI_DECODE_GRACE_S": "1",
        "TSUKIMI_PREFILL_NODE": "other",
    }
    config = load("--max-running=5", **environ)
    assert (config.max_running, config.grace_s, config.heartbeat_s) == (5, 1.0, 0.5)


def test_values_are_coerced_by_type_and_flags_spelt_either_way() -> None:
    config = load("--max_running", "7", "--eager", "--buckets", "[0.1, 2]", "--log-level", "debug")
    assert (config.max_running, config.eager, config.buckets, config.log_level) == (
        7,
        True,
        (0.1, 2.0),
        "debug",
    )
    assert load("--eager", "false").eager is False
    assert load(TSUKIMI_DECODE_EAGER="1").eager is True


@pytest.mark.parametrize(
    ("argv", "environ", "field", "message"),
    [
        (["--max-runing", "3"], {}, "max_runing", "--max-runing: no such field; did you mean max_running?"),
        ([], {"TSUKIMI_DECODE_HEARBEAT_S": "1"}, "hearbeat_s", "TSUKIMI_DECODE_HEARBEAT_S: no such field"),
        (["--max-running", "many"], {}, "max_running", "--max-running='many': Expected `int`"),
        (["--max-running", "0"], {}, "max_running", "--max-running='0': Expected `int` >= 1"),
        (["--max-running", "1001"], {}, "max_running", "<= 1000"),
        (
            [],
            {"TSUKIMI_DECODE_HEARTBEAT_S": "0"},
            "heartbeat_s",
            "TSUKIMI_DECODE_HEARTBEAT_S='0': Expected `float` > 0",
        ),
        (["--log-level", "loud"], {}, "log_level", "--log-level='loud': Invalid enum value"),
        (["--buckets", "[1, x]"], {}, "buckets", "--buckets="),
        (["--node"], {}, "node", "--node needs a value"),
        (["--node", "--eager"], {}, "node", "--node needs a value"),
        (["node"], {}, None, "unexpected argument 'node'"),
    ],
)
def test_mistakes_name_the_field_and_where_it_was_given(
    argv: list[str], environ: dict[str, str], field: str | None, message: str
) -> None:
    with pytest.raises(ConfigError) as e:
        load(*argv, **environ)
    assert message in str(e.value)
    assert e.value.param == field


def test_a_wrong_secret_is_not_shown() -> None:
    class Keyed(BaseConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
        key: int = 0

    with pytest.raises(ConfigError) as e:
        load_config(Keyed, "decode", ["--key", "hush"], {})
    assert "hush" not in str(e.value)


def test_help_names_every_field_with_its_type_default_and_meaning() -> None:
    with pytest.raises(HelpAsked) as e:
        load("--max-running", "0", "--help")
    text = str(e.value)
    for name in Config.__struct_fields__:
        assert f"--{name.replace('_', '-')}  " in text
    assert "--max-running  int, default 8\n      Sequences in a batch." in text
    assert "--eager  bool, default False\n      Start at once." in text
    assert "--log-level  debug|info|warning|error, default 'info'" in text
    assert "TSUKIMI_DECODE_" in text


def test_secrets_are_redacted() -> None:
    shown = redacted(load("--api-key", "hush", "--nats-url", "nats://me:hush@there:4222"))
    assert shown["api_key"] == "***"
    assert shown["nats_url"] == "nats://***@there:4222"
    assert shown["block_tokens"] == 16
    assert redacted(load())["api_key"] == ""
    assert "hush" not in repr(shown)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(AttributeError):
        load().node = "x"  # type: ignore[misc]
    assert msgspec.structs.replace(load(), node="x").node == "x"
