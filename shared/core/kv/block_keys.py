"""Tokens to chained block keys.

key(i) = blake2b-128(key(i-1) || token ids of block i), with the namespace digest as the root's parent. A key therefore
names a block *and everything before it*, in one namespace (model weights, dtype, layout, block size, rope, salt): equal
keys mean interchangeable KV, in any process, on any machine, whatever PYTHONHASHSEED is. Only full blocks have keys.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from shared.protocol.ids import BlockKey

KEY_BYTES = 16
TOKEN_BYTES = 4


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError on an id outside u32."""
    packed = array.array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    unpacked = array.array("I")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked.tolist()


def namespace_digest(**facts: str | int | float | bytes) -> bytes:
    """Digest (16 bytes) of everything that makes KV incompatible. Canonical: order of the facts does not matter."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"tsukimi-ns")
    for name in sorted(facts):
        value = facts[name]
        kind, raw = ("b", value) if isinstance(value, bytes) else (type(value).__name__, repr(value).encode())
        digest.update(f"{name}:{kind}:{len(raw)}:".encode() + raw)
    return digest.digest()


def root_key(namespace: bytes) -> BlockKey:
    """Parent of every chain's first block."""
    return blake2b(namespace, digest_size=KEY_BYTES, person=b"tsukimi-root").digest()


def extend_chain(parent: BlockKey, tokens: bytes, block_tokens: int) -> list[BlockKey]:
    """Keys of the full blocks of `tokens` (packed), continuing a chain after `parent`."""
    size = block_tokens * TOKEN_BYTES
    keys: list[BlockKey] = []
    for end in range(size, len(tokens) + 1, size):
        parent = blake2b(parent + tokens[end - size : end], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def block_keys(namespace: bytes, tokens: bytes, block_tokens: int) -> list[BlockKey]:
    """Keys of all full blocks of a prompt."""
    return extend_chain(root_key(namespace), tokens, block_tokens)


def reusable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """How many leading blocks may be taken from the cache: at least the prompt's last token is always computed."""
    return (prompt_tokens - 1) // block_tokens if prompt_tokens > 0 else 0


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks needed to hold `tokens` tokens."""
    return -(-tokens // block_tokens)


def longest_run(
    keys: Sequence[BlockKey], held: set[BlockKey] | frozenset[BlockKey] | dict[BlockKey, object]
) -> int:
    """Number of leading keys that are held. Counting stops at the first key that is not."""
    for i, key in enumerate(keys):
        if key not in held:
            return i
    return len(keys)
