"""The messages of the data plane. The client is whoever connected; streams and reads are numbered by it, per connection.

    client                                   server
    Hello                                 -> Welcome | Rejected
    OpenWrite, Write*, Commit | Abort     -> StreamEnded          (also unasked: the landing is refused)
    OpenPut                               -> PutGranted           then Write*, Commit | Abort -> StreamEnded
    OpenRead                              -> ReadGranted, Blocks* then CloseRead

Frames of one connection are handled in order. Within a major version fields are only added, at the end, with defaults.
"""

from __future__ import annotations

from msgspec import Struct

from shared.protocol.errors import WireError
from shared.protocol.ids import BlockKey, Incarnation, LandingId, NodeId
from shared.protocol.model import KVLayout


class Hello(Struct, frozen=True):
    """Who calls, whom it means, and what its KV looks like."""

    node: NodeId
    incarnation: Incarnation
    target: NodeId
    target_incarnation: Incarnation
    """Another life of the target must refuse: it holds nothing of what the caller thinks."""
    layout: KVLayout
    namespace: bytes = b""
    """Empty: any (a cache node's)."""


class Welcome(Struct, frozen=True):
    node: NodeId
    incarnation: Incarnation


class Rejected(Struct, frozen=True):
    error: WireError


class OpenWrite(Struct, frozen=True, array_like=True):
    """Bind a stream to a landing. Only one writer ever gets a landing."""

    stream: int
    landing: LandingId


class Write(Struct, frozen=True, array_like=True):
    """One layer of some blocks; the payload is their slices in the same order. A later write of a slice supersedes
    an earlier one."""

    stream: int
    layer: int
    blocks: list[int]
    checksums: list[int]


class Commit(Struct, frozen=True, array_like=True):
    """The stream's first `blocks` blocks are complete."""

    stream: int
    blocks: int
    info: bytes = b""


class Abort(Struct, frozen=True, array_like=True):
    stream: int


class StreamEnded(Struct, frozen=True, array_like=True):
    """The server no longer takes anything for the stream, nor reads the client's memory for it."""

    stream: int
    ok: bool
    error: str = ""
    stored: int = 0


class OpenPut(Struct, frozen=True, array_like=True):
    stream: int
    namespace: bytes
    keys: list[BlockKey]


class PutGranted(Struct, frozen=True, array_like=True):
    """Indices among the keys that are wanted; none: there is nothing to do and the stream is over."""

    stream: int
    wanted: list[int]
    error: WireError | None = None


class OpenRead(Struct, frozen=True, array_like=True):
    read: int
    namespace: bytes
    keys: list[BlockKey]
    patience_s: float = 0.0
    """The pool may answer that much later, if it lacks some of the blocks until then. 0: it answers at once."""


class ReadGranted(Struct, frozen=True, array_like=True):
    """Checksums of the run of blocks that will follow."""

    read: int
    checksums: list[int]
    error: WireError | None = None
    waited_s: float = 0.0
    """Of a patient read: seconds that the pool took to answer."""


class Blocks(Struct, frozen=True, array_like=True):
    """Whole blocks, `first` counted from the read's first key; the payload is `[blocks][layers][slice]`."""

    read: int
    first: int
    count: int


class CloseRead(Struct, frozen=True, array_like=True):
    """The client is done with the read, or gives it up. Also the end of an unfinished one."""

    read: int


Message = (
    Hello | Welcome | Rejected | OpenWrite | Write | Commit | Abort | StreamEnded
    | OpenPut | PutGranted | OpenRead | ReadGranted | Blocks | CloseRead
)  # fmt: skip

TYPES: dict[int, type[Message]] = {
    1: Hello, 2: Welcome, 3: Rejected, 4: OpenWrite, 5: Write, 6: Commit, 7: Abort, 8: StreamEnded,
    9: OpenPut, 10: PutGranted, 11: OpenRead, 12: ReadGranted, 13: Blocks, 14: CloseRead,
}  # fmt: skip
KINDS: dict[type[Message], int] = {type_: kind for kind, type_ in TYPES.items()}
