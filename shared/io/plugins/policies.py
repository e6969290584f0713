"""The conductor's configured policies: found, made, and tried before anything depends on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from shared.core.conductor.decode_policies import DECODE_POLICIES, decode_policy_named
from shared.core.conductor.events import (
    BlocksChanged,
    ConductorConfig,
    LoadReported,
    NodeAnnounced,
    NoticePolicyFailed,
    PlaceAsked,
)
from shared.core.conductor.machine import ConductorMachine
from shared.core.conductor.objectives import Objectives
from shared.core.conductor.placement_policies import POLICIES, policy_named
from shared.core.conductor.policy_options import PolicyOptions
from shared.io.config import ConfigError
from shared.io.plugins.classes import register
from shared.protocol.cluster import BlockEvents, NodeInfo, NodeLoad
from shared.protocol.errors import Invalid
from shared.protocol.ids import NodeRef, Role
from shared.protocol.model import KVLayout, ModelSpec
from shared.protocol.requests import PlaceRequest

BLOCK_TOKENS = 16
MODEL = ModelSpec(
    name="rehearsal",
    path="rehearsal",
    vocab_size=256,
    context_tokens=65_536,
    eos_token_ids=(0,),
    layout=KVLayout(layers=2, kv_heads=1, head_dim=8, block_tokens=BLOCK_TOKENS, dtype="toy", dtype_bytes=4),
    namespace=b"r" * 16,
)
ROLES: tuple[Role, ...] = ("prefill", "decode", "cache")


def load_policies(config: ConductorConfig) -> None:
    """Guarantee that a ConductorMachine can be made of this config and that its policies can place requests: they place a
    few on a made-up cluster of two prefill, two decode and two cache nodes. Raises ConfigError, naming the field."""
    options = PolicyOptions(config.balancing_threshold, config.seed, config.patience)
    try:
        register(POLICIES, config.policy, param="policy")
        register(DECODE_POLICIES, config.decode_policy, param="decode_policy")
        _made("policy", config.policy, lambda: policy_named(config.policy, options), "place")
        _made(
            "decode_policy",
            config.decode_policy,
            lambda: decode_policy_named(config.decode_policy, options),
            "choose",
        )
    except Invalid as e:
        raise ConfigError(e.message, param=e.param) from e
    for error in _rehearsed(config):
        raise policy_failed(config, error, "in a rehearsal")


def policy_failed(config: ConductorConfig, error: str, where: str) -> ConfigError:
    """The error for a policy that failed while placing."""
    fields = {"policy": config.policy, "decode_policy": config.decode_policy}
    own = [name for name, value in fields.items() if ":" in value] or ["policy"]
    named = " or ".join(f"{name} {fields[name]!r}" for name in own)
    return ConfigError(f"{named} failed {where}: {error}", param=own[0])


def _made(param: str, name: str, make: Callable[[], Any], method: str) -> None:
    try:
        made = make()
    except Invalid:
        raise
    except Exception as e:  # a user's class may raise anything
        raise Invalid(f"{param} {name!r} can't be made: {type(e).__name__}: {e}", param=param) from e
    if not callable(getattr(made, method, None)):
        raise Invalid(f"{param} {name!r} has no method {method}(view)", param=param)


# -- rehearsal ---------------------------------------------------------------------------------------------------------


def _rehearsed(config: ConductorConfig) -> Iterator[str]:
    """What went wrong with each of some requests."""
    machine = ConductorMachine(replace(config, objectives=Objectives()))
    held = tuple(number.to_bytes(16, "big") for number in range(20))
    for event in (*_arrivals(held[:10]), *_questions(held)):
        for command in machine.handle(event, 1.0):
            if isinstance(command, NoticePolicyFailed):
                yield command.error


def _arrivals(held: tuple[bytes, ...]) -> Iterator[Any]:
    """Two nodes of each role. The first cache node and the second prefill node hold blocks."""
    for role in ROLES:
        for number in range(2):
            node = f"{role}-{number}"
            host = f"host-{number}" if role != "decode" else f"decode-host-{number}"
            model = MODEL if role != "cache" else None
            ref = NodeRef(node=node, incarnation="1", host=host)
            yield NodeAnnounced(NodeInfo(ref, role, "ready", model=model, kv_blocks=4096))
            yield LoadReported(NodeLoad(node, "1", role, 1, "ready", kv_blocks=4096, queue_s=0.5 * number))
    for node in ("cache-0", "prefill-1"):
        yield BlocksChanged(BlockEvents(node, "1", 1, stored=held))


def _questions(keys: tuple[bytes, ...]) -> Iterator[PlaceAsked]:
    """A new prompt, one whose beginning is held, a short one, one of one token, and a failover."""
    new = tuple(bytes(reversed(key)) for key in keys)
    for number, (block_keys, prompt_tokens, most_tokens, retry) in enumerate(
        (
            (new, 330, 100, False),
            (keys, 330, 100, False),
            ((), 5, 100, False),
            (keys, 330, 1, False),
            (keys, 330, 9, True),
        )
    ):
        request = PlaceRequest(
            attempt=f"rehearsal-{number}/0/0",
            model=MODEL.name,
            prompt_tokens=prompt_tokens,
            block_keys=block_keys,
            max_new_tokens=most_tokens,
            budget_s=600.0,
            retry=retry,
        )
        yield PlaceAsked(request, number)
