"""The layout of a model's KVCache. Two nodes must agree on it before any KV moves between them."""

from __future__ import annotations

from msgspec import Struct


class KVLayout(Struct, frozen=True):
    """The canonical block layout, on the wire and in the pool.

    A block is `[layers, 2 (K then V), block_tokens, kv_heads, head_dim]`, C order: the slice of one layer is
    contiguous, so that writing layer by layer needs no copy.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    """`float32`, `bfloat16`, `float16`, or `toy`."""
    dtype_bytes: int

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.slice_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.block_bytes // self.block_tokens


class ModelSpec(Struct, frozen=True):
    """A served model, as announced by the nodes that run it."""

    name: str
    """The id clients use, e.g. `smollm2-135m`."""
    path: str
    """Folder with tokenizer, template and weights; `toy` for the toy engine."""
    vocab_size: int
    context_tokens: int
    """Most tokens (prompt + output) of one sequence."""
    eos_token_ids: tuple[int, ...]
    layout: KVLayout
    namespace: bytes
    """16-byte digest of everything that makes KV incompatible: weights, dtype, layout, block size, rope config, salt."""
