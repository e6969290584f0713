"""What is to be generated, in one form for all fronts."""

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
    """A request that has been checked against the model: a node can serve it as it is."""

    id: RequestId
    kind: Kind
    spec: ModelSpec
    prompts: tuple[Prompt, ...]
    n: int
    """Choices per prompt; choice i of the answer is number i % n of prompt i // n."""
    sampling: SamplingParams
    """Seed of the first choice. The other choices' seeds are derived from it."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer and have no text. The sampling parameters list them too."""
    stream: bool = False
    include_usage: bool = False
    grammar_field: str = ""
    """The field of the body that the grammar came from."""
    wants_ids: bool = False
    """The client wants token ids beside the text."""
    created: int = 0
    """Unix time."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n
