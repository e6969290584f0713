"""The uniform random number behind every sampled token. It is a function of (seed, absolute position) and nothing else.

So the same number is drawn for a token alone, in a batch, on another node or after a failover. Every engine uses this
function.
"""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

_COUNTER = Struct("<QQ")
_MANTISSA_BITS = 53


def uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1), a multiple of 2**-53. `seed` is taken modulo 2**64."""
    counter = _COUNTER.pack(seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    word = int.from_bytes(blake2b(counter, digest_size=8, person=b"tsukimi-draw").digest(), "little")
    return (word >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS
