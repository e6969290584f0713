"""Loads models by the transformers library, and replaces the attention in every layer by our own paged attention.

A forward pass is packed: all tokens of a step form one batch row, with position ids that say where each token is in its
sequence. The KV cache is outside of the model. The caller of a forward pass gives it an `Attend`; every layer calls that
with its queries, keys and values after RoPE.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from msgspec import Struct

from shared.engine.attention.api import Reach
from shared.protocol.errors import Invalid

hf: Any = transformers

_NAME = "tsukimi_paged"
_NOT_HONOURED = ("s_aux", "position_bias", "head_mask")
"""Arguments that some models pass to their attention and that none of our backends supports."""


class Attend(Protocol):
    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        reach: Reach,
    ) -> torch.Tensor:
        """Queries are [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim]. The output has the shape
        of the queries."""
        ...


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attend: Attend,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    used = [name for name in _NOT_HONOURED if features.get(name) is not None]
    if used or attention_mask is not None or not getattr(module, "is_causal", True):
        raise Invalid(f"the model's attention uses {', '.join(used) or 'a mask of its own'}", param="model")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    reach = Reach(sliding_window or 0, softcap or 0.0)
    output = attend.attend(module.layer_idx, queries, keys, values, scale, reach)
    return output[None], None


hf.AttentionInterface.register(_NAME, _paged_attention)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in evaluation mode. Raises Invalid if a weight is missing or has the wrong shape."""
    hf.utils.logging.disable_progress_bar()
    try:
        model, told = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_NAME, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as e:
        raise Invalid(f"the weights in {folder} cannot be loaded: {e}", param="model") from e
    wrong = sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Invalid(f"the weights in {folder} lack {', '.join(wrong[:3])}{more}", param="model")
    return model.to(device).eval()


def forward(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Logits [len(keep), vocab] of the rows `keep` of a packed step. Call under inference mode."""
    output = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=keep,
        attend=attend,
    )
    logits: torch.Tensor = output.logits[0]
    return logits


class Attention(Struct, frozen=True):
    """How a model's layers use attention, as found by `probe`."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    reaches: tuple[Reach, ...]
    """One per layer."""


class _Probe:
    """Records the arguments of each layer's attention, and returns zeros."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, int, int, float]] = []
        self.reaches: list[Reach] = []

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        reach: Reach,
    ) -> torch.Tensor:
        self.reaches.append(reach)
        self.seen.append((layer, queries.shape[1], keys.shape[1], keys.shape[2], values.shape[2], scale))
        return torch.zeros_like(queries)


def probe(model: Any) -> Attention:
    """Run one token through the model to find out how its layers use attention. Raises Invalid if this cannot be served:
    if layers differ in heads, head_dim or scale, do not call attention once each in order, or have keys and values of
    different dimensions."""
    seen = _Probe()
    device = model.device
    one = torch.zeros(1, dtype=torch.long, device=device)
    with torch.inference_mode():
        forward(model, one, one, one, seen)
    layers = [layer for layer, *_ in seen.seen]
    uses = {tuple(rest) for _, *rest in seen.seen}
    if layers != list(range(model.config.num_hidden_layers)) or len(uses) != 1:
        raise Invalid(
            f"the model's layers use attention in {len(uses)} ways, in the order {layers}", param="model"
        )
    ((query_heads, kv_heads, head_dim, value_dim, scale),) = uses
    if head_dim != value_dim:
        raise Invalid(f"the model's keys have {head_dim} dimensions, its values {value_dim}", param="model")
    reaches = tuple(seen.reaches)
    return Attention(len(layers), int(query_heads), int(kv_heads), int(head_dim), float(scale), reaches)


def eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """All token ids that end an answer, from the model's, the generation's and the tokenizer's configuration."""
    found: set[int] = set()
    generation = folder / "generation_config.json"
    sources = [config.eos_token_id]
    if generation.is_file():
        sources.append(hf.GenerationConfig.from_pretrained(folder).eos_token_id)
    if (folder / "tokenizer_config.json").is_file():
        sources.append(hf.AutoTokenizer.from_pretrained(folder, local_files_only=True).eos_token_id)
    for source in sources:
        found.update(source if isinstance(source, list) else [] if source is None else [source])
    return tuple(sorted(found))
