"""What is to be generated: the same for every front, whatever the client's dialect."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.protocol.ids import RequestId
from shared.protocol.model import ModelSpec
from shared.protocol.sampling import SamplingParams

Kind = Literal["chat", "completion"]


class Prompt(Struct, frozen=True):
    tokens: bytes
    """Token ids, little-endian u32."""
    count: int
    max_new_tokens: int


class GenerateRequest(Struct, frozen=True):
    """Checked against the model: nothing in it can surprise a node."""

    id: RequestId
    kind: Kind
    spec: ModelSpec
    prompts: tuple[Prompt, ...]
    n: int
    """Choices per prompt; choice i of the answer is number i % n of prompt i // n."""
    sampling: SamplingParams
    """Of the first choice; the others' seeds are derived."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """End the answer and have no text; they are among sampling's ends too."""
    stream: bool = False
    include_usage: bool = False
    grammar_field: str = ""
    """The body's name for sampling's grammar."""
    wants_ids: bool = False
    """The client wants token ids beside the text."""
    created: int = 0
    """Unix time."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n
