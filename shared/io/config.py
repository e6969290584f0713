"""A service's configuration: defaults < environment TSUKIMI_<ROLE>_<FIELD> < command line --field value.

The only module that reads the environment. A mistake (unknown field, wrong type, out of bounds) raises ConfigError
naming the field and the source of its value. The process then exits with CONFIG_EXIT_CODE, so that a supervisor can tell
it from a crash and does not restart it.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from shared.io.field_docs import field_docs, type_name
from shared.protocol.errors import Invalid

CONFIG_EXIT_CODE = 78
"""Exit code of a process whose configuration cannot work: EX_CONFIG of sysexits.h."""

DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
"""Where the bus is, unless somebody says otherwise."""

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
ShareOrZero = Annotated[float, Meta(ge=0, le=1)]
PositiveS = Annotated[float, Meta(gt=0)]
SecondsOrZero = Annotated[float, Meta(ge=0)]


class ConfigError(Invalid):
    """The configuration cannot work, neither now nor after a restart."""


class HelpAsked(Exception):
    """`--help` was given; the text is the argument."""


class BaseConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration that every service has."""

    node: str = ""
    """Name of this node, unique in the cluster and the same after restarts (default: the role and `-0`)."""
    nats_url: str = DEFAULT_NATS_URL
    """Address of the control bus."""
    host: str = ""
    """Identity of this machine. Nodes with the same one exchange KV through shared memory (default: the host name)."""
    bind: str = "127.0.0.1"
    """Address to listen on: the data plane's, or the gateway's HTTP server's."""
    advertise: str = ""
    """Address that other nodes reach the data plane at (default: bind)."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe lines to log."""
    heartbeat_s: PositiveS = 0.5
    """Seconds between heartbeats."""
    lost_after_s: PositiveS = 2.0
    """A node that is silent for this many seconds counts as lost."""
    grace_s: SecondsOrZero = 10.0
    """Seconds to finish running work after SIGTERM."""
    record: str = ""
    """File to record every event and command of the node's machine in; empty: none."""
    parent_pid: CountOrZero = 0
    """Process id: the service ends when that process has ended; 0: never."""


C = TypeVar("C", bound=BaseConfig)


def environment(name: str, default: str = "") -> str:
    """One variable outside any service's configuration."""
    return os.environ.get(name, default)


def set_environment_default(name: str, value: str) -> None:
    """Set a variable for libraries that are configured by the environment only. What the user set stays."""
    os.environ.setdefault(name, value)


def load_config(
    config_type: type[C], role: str, argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> C:
    """Merge the three sources, and fill in defaults that depend on the machine. Raises ConfigError, HelpAsked."""
    if "--help" in argv or "-h" in argv:
        raise HelpAsked(describe(config_type, role))
    known = config_type.__struct_fields__
    given = _from_environment(role, known, os.environ if environ is None else environ)
    given |= _from_arguments(config_type, argv)
    try:
        config = msgspec.convert(
            {name: _parsed(v) for name, (_, v) in given.items()}, config_type, strict=False
        )
    except msgspec.ValidationError as e:
        raise _explained(e, given) from e
    return msgspec.structs.replace(
        config,
        node=config.node or f"{role}-0",
        host=config.host or socket.gethostname(),
        advertise=config.advertise or config.bind,
    )


def describe(config_type: type[BaseConfig], role: str) -> str:
    """The text of --help."""
    lines = [f"Configuration of the {role} service, given as --field value:", ""]
    docs = field_docs(config_type)
    hints = get_type_hints(config_type)
    for field in msgspec.structs.fields(config_type):
        default = "required" if field.required else f"default {field.default!r}"
        lines.append(f"  --{field.name.replace('_', '-')}  {type_name(hints[field.name])}, {default}")
        lines.append(f"      {docs.get(field.name, '')}")
    lines += ["", f"Every field can also be set in the environment, e.g. TSUKIMI_{role.upper()}_NODE."]
    return "\n".join(lines)


def redacted(config: Struct) -> dict[str, Any]:
    """The configuration for people and logs, without secrets and passwords in URLs."""
    return {name: _without_secrets(name, value) for name, value in msgspec.structs.asdict(config).items()}


# -- sources ---------------------------------------------------------------------------------------------------------

Given = dict[str, tuple[str, str]]
"""Field -> (where it was given, the text)."""


def _from_environment(role: str, known: Sequence[str], environ: Mapping[str, str]) -> Given:
    prefix = f"TSUKIMI_{role.upper()}_"
    given: Given = {}
    for variable, value in environ.items():
        if variable.startswith(prefix):
            given[_known(variable.removeprefix(prefix).lower(), known, variable)] = (variable, value)
    return given


def _from_arguments(config_type: type[BaseConfig], argv: Sequence[str]) -> Given:
    hints = get_type_hints(config_type)
    given: Given = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}: fields are given as --field value")
        flag, has_value, value = word.partition("=")
        name = _known(flag[2:].replace("-", "_"), config_type.__struct_fields__, flag)
        if not has_value:
            alone = not rest or rest[0].startswith("--")
            if alone and hints[name] is not bool:
                raise ConfigError(f"{flag} needs a value", param=name)
            value = "true" if alone else rest.pop(0)
        given[name] = (flag, value)
    return given


def _known(name: str, known: Sequence[str], source: str) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(f"{source}: no such field" + (f"; did you mean {near[0]}?" if near else ""), param=name)


def _parsed(text: str) -> Any:
    """Lists and objects are JSON. Other values are converted later, to the field's type."""
    if text[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text


def _explained(error: msgspec.ValidationError, given: Given) -> ConfigError:
    at = re.search(r"`\$\.(\w+)", str(error))
    name = at[1] if at else ""
    if name not in given:
        return ConfigError(str(error), param=name or None)
    source, text = given[name]
    shown = _without_secrets(name, text)
    return ConfigError(f"{source}={shown!r}: {str(error).split(' - at ')[0]}", param=name)


_SECRET_NAME = re.compile(r"(^|_)(secret|password|token|keys?|salt)$")
_URL_PASSWORD = re.compile(r"(://)[^/@\s]+@")


def _without_secrets(name: str, value: Any) -> Any:
    if value and _SECRET_NAME.search(name):
        return "***"
    return _URL_PASSWORD.sub(r"\1***@", value) if isinstance(value, str) else value
