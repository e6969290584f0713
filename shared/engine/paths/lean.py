"""The lean path: models of Llama's block on the CPU. The C++ kernels compute whole layers in one call.

Weights are packed for the kernels: Q, K and V as one product, gate and up as one. Activations are float32; where the CPU
has bf16 products, the inputs of products are bf16. A sequence's logits are bit-identical whatever other sequences are in
the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shared.engine.attention.api import AttentionBatch, AttentionShape
from shared.engine.attention.native import computes
from shared.engine.native.kernels import Kernels, Layer, Reach
from shared.engine.native.plan import StepPlan
from shared.engine.native.store import Store
from shared.engine.paths.api import AfterLayer
from shared.engine.paths.lean_pass import Pass, Space, whole_panels

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Values of config.model_type whose layers are Llama's block, with or without QKV biases and norms of Q and K."""


def fits(config: Any, shape: AttentionShape, dtype: torch.dtype) -> bool:
    """Whether the lean path can compute this model."""
    return (
        config.model_type in FAMILY
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)
        and not getattr(config, "attention_bias", False)
        and getattr(config, "pretraining_tp", 1) == 1
        and config.hidden_size % 2 == config.intermediate_size % 2 == 0
        and computes(shape, dtype)
    )


class LeanPath:
    """Implements paths.api.Forward. If `part` is given, it has only those layers, plus the embedding if they include the
    first layer and the head if they include the last. Takes over the model's weights: the model is unusable
    afterwards."""

    def __init__(
        self,
        model: Any,
        shape: AttentionShape,
        layers: Sequence[torch.Tensor],
        kernels: Kernels,
        part: range | None = None,
    ) -> None:
        blocks = list(model.model.layers)
        self._part = range(len(blocks)) if part is None else part
        model.model.layers = torch.nn.ModuleList()  # frees the weights of layers outside the part
        self._kernels = kernels
        self._pages = layers
        self._plan = StepPlan(kernels, shape)
        self._shape = shape
        self._config = model.config
        self._rotary = model.model.rotary_emb
        self._kind = kernels.kind(model.dtype)
        self._store = Store()
        self._kept: list[torch.Tensor] = []
        """Keeps alive what the kernels' structures point to."""
        packed = [self._packed(blocks[i], shape.reach(i), layers[i]) for i in self._part]
        self._layers = (Layer * len(packed))(*packed)
        self._norm = self._floats(model.model.norm.weight)
        nothing = torch.empty(0)
        self._embedding = model.model.embed_tokens.weight.detach() if self._part.start == 0 else nothing
        self.vocab = model.lm_head.weight.shape[0]
        self._head = (
            kernels.pack(model.lm_head.weight.detach(), self._store)
            if self._part.stop == len(blocks)
            else nothing
        )
        if not model.config.tie_word_embeddings:
            model.lm_head.weight = None
        self._space = Space(0, self._config, shape, kernels.panel)

    def logits(
        self,
        batch: AttentionBatch,
        token_ids: torch.Tensor,
        keep: torch.Tensor,
        after_layer: AfterLayer | None,
    ) -> torch.Tensor:
        entered = self.enter(batch, self.embed(token_ids))
        return self.finish(entered, self._part.start, keep.tolist(), after_layer)

    def fault(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to close."""

    # -- the steps of a pass ---------------------------------------------------------------------------------------

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Float32 rows [tokens, hidden]. Only if this part has the first layer."""
        return self._embedding[token_ids].float()

    def enter(self, batch: AttentionBatch, x: torch.Tensor) -> Pass:
        """Begin a pass of rows x, float32 [tokens, hidden], through layers. x is changed in place. One pass at a time:
        the next call reuses its plan and buffers."""
        self._plan.set(batch)
        if len(x) > self._space.rows:
            self._space = Space(len(x), self._config, self._shape, self._kernels.panel)
        cosines, sines = self._angles(x, batch)
        item_bytes = self._pages[self._part.start].element_size()
        return Pass(
            self._kernels, self._plan, self._space, self._layers, self._part.start, item_bytes,
            batch, x, cosines, sines,
        )  # fmt: skip

    def finish(
        self, entered: Pass, first: int, keep: Sequence[int], after_layer: AfterLayer | None
    ) -> torch.Tensor:
        """Compute from layer `first` to the end. Returns logits [len(keep), vocab] of the rows `keep`, ascending. Only if
        this part has the last layer. In the last layer, only K and V are computed for the other rows: nothing reads
        their output."""
        if len(keep) == len(entered.x):
            entered.through(range(first, self._part.stop), after_layer)
            return self._project(entered.x)
        last = self._part.stop - 1
        entered.through(range(first, last), after_layer)
        entered.write_kv(last, after_layer)
        if not keep:
            return torch.empty(0, self.vocab)
        kept = self.enter(entered.batch.only(keep, self._shape.block_tokens), entered.x[list(keep)])
        kept.through(range(last, last + 1), None)
        return self._project(kept.x)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of rows that have passed the last layer."""
        return self._kernels.product(x, self._head, self.vocab, self._norm, self._config.rms_norm_eps)

    def _angles(self, x: torch.Tensor, batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [rows, head_dim / 2] of the rows' positions, with the model's RoPE scaling applied."""
        positions = torch.tensor([list(batch.positions())], dtype=torch.long)
        cosines, sines = self._rotary(x[None], positions)
        half = self._shape.head_dim // 2
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    # -- weights ---------------------------------------------------------------------------------------------------

    def _packed(self, block: Any, reach: Any, pages: torch.Tensor) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        queries, keys, values = attention.q_proj, attention.k_proj, attention.v_proj
        layer = Layer(
            kind=self._kind,
            hidden=self._config.hidden_size,
            inner=whole_panels(self._config.intermediate_size, self._kernels.panel),
            epsilon=self._config.rms_norm_eps,
            qkv=self._weights(queries, keys, values),
            out=self._weights(attention.o_proj),
            gate_up=self._in_turns(mlp.gate_proj, mlp.up_proj),
            down=self._widened(mlp.down_proj),
            attention_norm=self._floats(block.input_layernorm.weight).data_ptr(),
            mlp_norm=self._floats(block.post_attention_layernorm.weight).data_ptr(),
            reach=Reach(reach.window, reach.cap),
            pages=pages.data_ptr(),
        )
        if queries.bias is not None:
            bias = torch.cat([queries.bias, keys.bias, values.bias])
            layer.qkv_bias = self._floats(bias).data_ptr()
        if hasattr(attention, "q_norm"):
            layer.query_norm = self._floats(attention.q_norm.weight).data_ptr()
            layer.key_norm = self._floats(attention.k_norm.weight).data_ptr()
        return layer

    def _weights(self, *linears: Any) -> int:
        """Pack the weights of linears that share their input, stacked along the outputs. Frees the model's own copies."""
        return self._kept_packed(torch.cat([linear.weight.detach() for linear in linears]), *linears)

    def _in_turns(self, *linears: Any) -> int:
        """Like _weights, but with panels of the linears alternating: the thread that computes a panel of gate also
        computes the matching panel of up, and needs both to apply the activation."""
        panel = self._kernels.panel
        parts = []
        for linear in linears:
            outputs, inputs = linear.weight.shape
            whole = linear.weight.new_zeros(whole_panels(outputs, panel), inputs)
            whole[:outputs] = linear.weight.detach()
            parts.append(whole.view(-1, panel, inputs))
        return self._kept_packed(torch.stack(parts, dim=1).flatten(0, 2), *linears)

    def _widened(self, linear: Any) -> int:
        """Like _weights for one linear, with its inputs padded by zeros to whole panels, as _in_turns pads outputs."""
        outputs, inputs = linear.weight.shape
        whole = linear.weight.new_zeros(outputs, whole_panels(inputs, self._kernels.panel))
        whole[:, :inputs] = linear.weight.detach()
        return self._kept_packed(whole, linear)

    def _kept_packed(self, weights: torch.Tensor, *linears: Any) -> int:
        packed = self._kernels.pack(weights, self._store)
        for linear in linears:
            linear.weight = None
        self._kept.append(packed)
        return packed.data_ptr()

    def _floats(self, weights: torch.Tensor) -> torch.Tensor:
        floats = weights.detach().float().contiguous()
        self._kept.append(floats)
        return floats
