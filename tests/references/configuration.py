"""configuration.md: what every service can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from services.cache_node.config import CacheNodeConfig
from services.conductor.config import Config as ConductorConfig
from services.decode.config import Config as DecodeConfig
from services.gateway.config import GatewayConfig
from services.prefill.config import Config as PrefillConfig
from shared.io.config import BaseConfig
from shared.io.field_docs import field_docs, type_name
from tests.references.table import code, default_of, page, table

SERVICES: dict[str, type[BaseConfig]] = {
    "gateway": GatewayConfig,
    "conductor": ConductorConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "cache": CacheNodeConfig,
}
"""Role, as in the environment's variables -> its configuration."""
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
ABOUT = """\
Every field can be given in the environment or on the command line; the command line wins. A list or an object is
given as JSON. A field that is unknown, of a wrong type or out of bounds ends the service with exit code 78."""


def render(services: Mapping[str, type[BaseConfig]] | None = None) -> str:
    parts = [_service(role, config) for role, config in (services or SERVICES).items()]
    return page("Configuration", ABOUT, parts)


def _service(role: str, config: type[BaseConfig]) -> str:
    docs = field_docs(config)
    hints = get_type_hints(config, include_extras=True)
    rows = [
        (
            code(field.name),
            code(_type(hints[field.name])),
            default_of(field),
            docs.get(field.name, ""),
            code(f"--{field.name.replace('_', '-')}"),
            code(f"TSUKIMI_{role.upper()}_{field.name.upper()}"),
        )
        for field in msgspec.structs.fields(config)
    ]
    return f"## {role}\n\n" + table(("Field", "Type", "Default", "Meaning", "Flag", "Environment"), rows)


def _type(hint: Any) -> str:
    """The type with its bounds: `int >= 0, <= 1024`."""
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    bounds = [
        f"{sign} {getattr(meta, name)}"
        for meta in metas
        if isinstance(meta, Meta)
        for name, sign in BOUNDS.items()
        if getattr(meta, name) is not None
    ]
    return " ".join([type_name(hint), ", ".join(bounds)]).strip()
