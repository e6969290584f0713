"""Which spec a model name stands for, when nodes announce several.

Conductor and gateways call the one rule here, so that prompts are prepared for the nodes that get them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shared.core.conductor.membership import Member
from shared.protocol.model import KVLayout, ModelSpec

KVKind = tuple[bytes, KVLayout]
"""Namespace and layout: nodes with the same ones can use each other's KVCache."""


def kv_kind(spec: ModelSpec) -> KVKind:
    return spec.namespace, spec.layout


def chosen_specs(members: Iterable[Member]) -> dict[str, ModelSpec]:
    """The spec of every model name that a living prefill or decode node announces.

    Of one name, the nodes of one KV kind win: those with a ready decode node (without one, few answers can be given)
    before those without; then the most ready nodes; then the smallest namespace, then layout. Among the winners'
    specs, which may differ in a path, the one of the most ready nodes is chosen; then the smallest in writing.

    It depends on who is there, never on who came first: all that know the same members choose the same. So it cannot
    stay with what it chose before. It changes only when a node becomes ready or ceases to be, and the lead with it: a
    rolling upgrade changes it once. Loads, and repeated announcements, change nothing.
    """
    names: dict[str, dict[ModelSpec, Counter[str]]] = {}
    for member in members:
        info = member.info
        if info.model is None or info.role not in ("prefill", "decode") or not member.alive:
            continue
        ready = names.setdefault(info.model.name, {}).setdefault(info.model, Counter())
        if member.ready:
            ready[info.role] += 1
    return {name: _chosen(ready) for name, ready in names.items()}


def _chosen(ready: dict[ModelSpec, Counter[str]]) -> ModelSpec:
    """Of the specs of one name, each with its ready nodes by role."""
    if len(ready) == 1:
        return next(iter(ready))
    kinds: dict[KVKind, Counter[str]] = {}
    for spec, counts in ready.items():
        kinds.setdefault(kv_kind(spec), Counter()).update(counts)
    best = min(kinds, key=lambda kind: _rank(kinds[kind], kind))
    return min((s for s in ready if kv_kind(s) == best), key=lambda s: (-ready[s].total(), repr(s)))


def _rank(ready: Counter[str], kind: KVKind) -> tuple[bool, int, bytes, str]:
    namespace, layout = kind
    return not ready["decode"], -ready.total(), namespace, repr(layout)
