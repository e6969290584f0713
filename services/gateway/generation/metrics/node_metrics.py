"""What the totals in heartbeats mean: one metric for each meaning, with its kind, its unit and a help text.

Nodes report totals by short names. A row here turns one into a family of its own. What has no row, e.g. a counter of a
user's own service, appears in the family OTHER under its short name, so that nothing that a node reports is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from shared.protocol.ids import Role

Kind = Literal["counter", "gauge"]
UNITS = ("seconds", "bytes", "tokens", "blocks", "slices")


class NodeMetric(NamedTuple):
    """One family, and one label value within it where several totals are parts of one meaning."""

    family: str
    """As it is scraped: a counter ends in `_total`."""
    kind: Kind
    help: str
    label: tuple[str, str] | None = None
    """Name and value."""

    @property
    def unit(self) -> str:
        """A word of the name; empty: a plain number of what the name says."""
        return next((word for word in self.family.split("_") if word in UNITS), "")


def _counter(family: str, help: str, label: tuple[str, str] | None = None) -> NodeMetric:
    return NodeMetric(family, "counter", help, label)


def _gauge(family: str, help: str) -> NodeMetric:
    return NodeMetric(family, "gauge", help)


def _ended(how: str) -> NodeMetric:
    about = "Attempts that ended; quietly: handed over or cancelled"
    return _counter("tsukimi_worker_attempts_ended_total", about, ("how", how))


def _outcome(outcome: str) -> NodeMetric:
    about = "Generation requests that ended"
    return _counter("tsukimi_gateway_requests_ended_total", about, ("outcome", outcome))


def _tokens(kind: str) -> NodeMetric:
    about = "Tokens of requests that ended"
    return _counter("tsukimi_gateway_tokens_total", about, ("kind", kind))


LOADS: dict[str, NodeMetric] = {
    "running": _gauge("tsukimi_node_requests_running", "What a node works on now: attempts, or a gateway's choices"),
    "waiting": _gauge("tsukimi_node_requests_waiting", "Attempts that are taken in and do not run yet"),
    "kv_blocks": _gauge("tsukimi_node_kv_blocks", "KV blocks that a node has room for"),
    "kv_blocks_held": _gauge("tsukimi_node_kv_blocks_held", "KV blocks that requests pin now"),
    "kv_blocks_cached": _gauge("tsukimi_node_kv_blocks_cached", "KV blocks kept for reuse, free to evict"),
    "queue_s": _gauge("tsukimi_node_queue_seconds", "Predicted wait of a prompt that comes now"),
    "batch_tokens": _gauge("tsukimi_node_batch_tokens", "KV tokens of the running batch"),
}  # fmt: skip
"""Field of NodeLoad -> the metric that shows it."""

ENDPOINT: dict[str, NodeMetric] = {
    "bytes_sent": _counter("tsukimi_dataplane_sent_bytes_total", "KV bytes sent to other nodes"),
    "bytes_received": _counter("tsukimi_dataplane_received_bytes_total", "KV bytes received from other nodes"),
    "slices_sent": _counter("tsukimi_dataplane_slices_sent_total", "Layers of blocks sent"),
    "slices_received": _counter("tsukimi_dataplane_slices_received_total", "Layers of blocks received"),
    "slices_corrupt": _counter("tsukimi_dataplane_slices_corrupt_total", "Layers of blocks whose checksum was wrong"),
    "blocks_corrupt": _counter("tsukimi_dataplane_blocks_corrupt_total", "Blocks whose checksum was wrong"),
    "blocks_fetched": _counter("tsukimi_dataplane_blocks_fetched_total", "Blocks read from cache nodes"),
    "stale_writes_refused": _counter("tsukimi_dataplane_slices_refused_total", "Layers for pages with a new owner"),
    "connections_opened": _counter("tsukimi_dataplane_connections_opened_total", "Connections that this node opened"),
    "connections_accepted": _counter("tsukimi_dataplane_connections_accepted_total", "Connections others opened"),
    "connections_refused": _counter("tsukimi_dataplane_connections_refused_total", "Connections of unfit peers"),
    "connections_lost": _counter("tsukimi_dataplane_connections_lost_total", "Connections that broke"),
    "block_events_dropped": _counter("tsukimi_node_block_events_dropped_total", "Messages of block events not sent"),
}  # fmt: skip
"""Of every node with a data plane."""

WORKER: dict[str, NodeMetric] = {
    "accepted": _counter("tsukimi_worker_attempts_accepted_total", "Attempts taken in"),
    "refused": _counter("tsukimi_worker_attempts_refused_total", "Attempts refused"),
    "orphaned": _counter("tsukimi_worker_attempts_orphaned_total", "Attempts cancelled because their gateway was gone"),
    "late_ignored": _counter("tsukimi_worker_late_events_ignored_total", "Events about attempts that were over"),
    **{f"ended_{how}": _ended(how) for how in ("stop", "length", "moved", "failed", "refused", "quietly")},
    "steps": _counter("tsukimi_worker_steps_total", "Runs of the engine over a batch"),
    "steps_failed": _counter("tsukimi_worker_steps_failed_total", "Runs of the engine that failed"),
    "prompt_tokens_computed": _counter("tsukimi_worker_prompt_tokens_computed_total", "Prompt tokens computed"),
    "tokens_generated": _counter("tsukimi_worker_tokens_generated_total", "Answer tokens generated"),
    "cached_tokens": _counter("tsukimi_worker_prompt_tokens_cached_total", "Prompt tokens that needed no computing"),
    "fetched_tokens": _counter("tsukimi_worker_prompt_tokens_fetched_total", "Prompt tokens fetched from cache nodes"),
    "fetches_failed": _counter("tsukimi_worker_fetches_failed_total", "Fetches from cache nodes that failed"),
    "blocks_pooled": _counter("tsukimi_worker_blocks_pooled_total", "Blocks that cache nodes stored from this node"),
    "pool_writes_failed": _counter("tsukimi_worker_pool_writes_failed_total", "Writes to cache nodes that failed"),
    "handoffs_failed": _counter("tsukimi_worker_handoffs_failed_total", "Hand-offs to decode nodes that failed"),
    "landings_failed": _counter("tsukimi_worker_landings_failed_total", "Landings that no whole prompt came to"),
    "preempted": _counter("tsukimi_worker_sequences_preempted_total", "Sequences given up for want of KV blocks"),
    "tokens_dropped": _counter("tsukimi_worker_token_messages_dropped_total", "Messages of tokens not sent"),
    "layer_slices_sent_before_last_layer": _counter(
        "tsukimi_worker_slices_sent_early_total", "Layers of blocks sent before the last layer was computed"
    ),
    "engine_s": _counter("tsukimi_worker_engine_seconds_total", "Time that the engine ran"),
    "last_layer_at_s": _gauge(
        "tsukimi_worker_last_layer_clock_seconds", "The host's clock when the last layer was last computed"
    ),
}  # fmt: skip
DECODE: dict[str, NodeMetric] = {
    "landing_first_slice_at_s": _gauge(
        "tsukimi_decode_landing_first_slice_clock_seconds",
        "The host's clock when the latest landing began to fill",
    ),
}
"""Points in time are of the host's monotonic clock: compare them with each other on one host, and with nothing else."""

CACHE: dict[str, NodeMetric] = {
    "puts": _counter("tsukimi_cache_puts_total", "Writers that offered blocks"),
    "puts_aborted": _counter("tsukimi_cache_puts_aborted_total", "Puts that their writer gave up"),
    "puts_expired": _counter("tsukimi_cache_puts_expired_total", "Puts whose writer fell silent"),
    "blocks_offered": _counter("tsukimi_cache_blocks_offered_total", "Blocks that writers offered"),
    "blocks_stored": _counter("tsukimi_cache_blocks_stored_total", "Blocks stored"),
    "blocks_evicted": _counter("tsukimi_cache_blocks_evicted_total", "Blocks evicted to make room"),
    "blocks_refused": _counter("tsukimi_cache_blocks_refused_total", "Blocks wanted that there was no room for"),
    "reads": _counter("tsukimi_cache_reads_total", "Readers that asked for blocks"),
    "reads_expired": _counter("tsukimi_cache_reads_expired_total", "Reads that took longer than their lease"),
    "blocks_asked": _counter("tsukimi_cache_blocks_asked_total", "Blocks that readers asked for"),
    "blocks_served": _counter("tsukimi_cache_blocks_served_total", "Blocks that readers got"),
}  # fmt: skip

CONDUCTOR: dict[str, NodeMetric] = {
    "placed": _counter("tsukimi_conductor_requests_placed_total", "Requests placed"),
    "refused": _counter("tsukimi_conductor_requests_refused_total", "Requests refused"),
    "let_through": _counter("tsukimi_conductor_requests_let_through_total", "Requests placed though over an objective"),
    "policy_failures": _counter(
        "tsukimi_conductor_policy_failures_total", "Requests placed by a built-in policy because the own one failed"
    ),
    "expired": _counter("tsukimi_conductor_questions_expired_total", "Questions read when nobody waited for them"),
    "blocks_indexed": _gauge("tsukimi_conductor_blocks_indexed", "Blocks whose holders the conductor knows"),
    "block_event_gaps": _counter("tsukimi_conductor_block_event_gaps_total", "How often block events were missing"),
    "messages_refused": _counter("tsukimi_bus_messages_refused_total", "Messages refused: too many at once"),
    "messages_undecodable": _counter("tsukimi_bus_messages_undecodable_total", "Messages that could not be decoded"),
    "messages_dropped": _counter("tsukimi_bus_messages_dropped_total", "Messages dropped because they came too fast"),
    "handler_bugs": _counter("tsukimi_bus_handlers_failed_total", "Message handlers that failed by a bug"),
    "handlers_cancelled": _counter("tsukimi_bus_handlers_cancelled_total", "Message handlers cancelled by a drain"),
    "replies_too_large": _counter("tsukimi_bus_replies_too_large_total", "Replies over the bus's max_payload"),
    "replies_lost": _counter("tsukimi_bus_replies_lost_total", "Replies that could not be sent"),
    "bus_errors": _counter("tsukimi_bus_errors_total", "Errors that the bus's client told of"),
    "reconnects": _counter("tsukimi_bus_reconnects_total", "How often the bus came back"),
}  # fmt: skip

GATEWAY: dict[str, NodeMetric] = {
    "requests_started": _counter("tsukimi_gateway_requests_started_total", "Generation requests that arrived"),
    **{f"requests_{outcome}": _outcome(outcome) for outcome in ("ok", "error", "aborted", "rejected")},
    **{f"{kind}_tokens": _tokens(kind) for kind in ("prompt", "cached", "completion")},
}  # fmt: skip

ROWS: Mapping[Role, Mapping[str, NodeMetric]] = {
    "gateway": GATEWAY,
    "conductor": CONDUCTOR,
    "prefill": WORKER | ENDPOINT,
    "decode": WORKER | DECODE | ENDPOINT,
    "cache": CACHE | ENDPOINT,
}
"""Role -> name in its heartbeats -> metric."""

UP = _gauge("tsukimi_node_up", "1 while heartbeats come")
OTHER = _counter(
    "tsukimi_node_other_total", "Totals without a family of their own, by their names in heartbeats"
)


def node_metric(role: Role, counter: str) -> NodeMetric:
    """The row of a total that a node of that role reports; OTHER, labelled with the name, if there is none."""
    return ROWS[role].get(counter) or OTHER._replace(label=("counter", counter))
