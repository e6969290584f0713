"""The toy engine: a deterministic, torch-free stand-in for a model, behind the same protocol.

The KV of a position is derived from its token, its position, its layer and the chain of rows before it. It is written
into the pages layer by layer. The next token depends on the KV that is *read back* from the pages, of all positions
before it and of none after it. So KV that is wrong, missing or from another sequence changes the text.

A layer's slice holds 16-byte rows. In layer 0, K row p is the chain state after token p, and V row p is (token id,
position, first half of the state). Each other layer holds the same rows XORed with a pattern of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from struct import Struct as Packer

import xxhash
from msgspec import Struct

from shared.core.kv.block_keys import namespace_digest, unpack_tokens
from shared.core.worker.steps import SequenceResult, SequenceStep
from shared.dataplane.api import PageStore
from shared.dataplane.memory.anonymous import Progress
from shared.dataplane.memory.arena import Arena
from shared.engine.api import EngineConfig
from shared.engine.step_checks import refusal
from shared.engine.toy.choice import NoToken, pick, shape, toy_follower
from shared.engine.toy.model import ScriptedFailure, Transcript, next_logits
from shared.protocol.errors import Invalid
from shared.protocol.model import KVLayout, ModelSpec
from shared.text.grammar import GrammarError, error_of
from shared.text.toy_text import EOS, VOCAB_SIZE

LAYERS = 4
CONTEXT_TOKENS = 1 << 20
_ROW_BYTES = 16
_ROW_HEAD = Packer("<II")
_OPTIONS = ("step_ms", "prefill_us")


class ToyOptions(Struct, frozen=True):
    """Simulated speed of a toy, given in its name as `toy:step_ms=20,prefill_us=100`. Not part of the namespace."""

    step_s: float = 0.0
    """Seconds added to a step in which some sequence computes a single token."""
    prefill_token_s: float = 0.0
    """Seconds added for every token of sequences that compute more than one."""


class _Rows(Struct, frozen=True):
    """Layer 0's rows of consecutive positions."""

    keys: bytes
    values: bytes


class ToyEngine:
    """Implements engine.api.Engine. Cheap: a step hashes the bytes of the pages, and loops over new tokens only."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        self._options = parse_options(config.model)
        layout = toy_layout(config.block_tokens)
        pages = config.kv_bytes // layout.block_bytes
        if pages < 1:
            raise Invalid(
                f"kv_bytes {config.kv_bytes} is less than a block of {layout.block_bytes} bytes",
                param="kv_bytes",
            )
        self.spec = toy_spec(config.block_tokens, config.salt)
        self._arena = Arena(layout, pages, progress=progress)
        self.store: PageStore = self._arena
        self._follower = toy_follower()

    def run(
        self, sequences: Sequence[SequenceStep], on_layer: Callable[[int], None] | None = None
    ) -> list[SequenceResult]:
        errors = [refusal(sequence, self.spec, self.store.pages) for sequence in sequences]
        rows = [
            _Rows(b"", b"") if error else self._compute(sequence)
            for sequence, error in zip(sequences, errors, strict=True)
        ]
        pause_s = self._duration_s(sequences) / LAYERS
        for layer in range(LAYERS):
            for sequence, new in zip(sequences, rows, strict=True):
                self._write(sequence, layer, new)
            if pause_s:
                time.sleep(pause_s)
            if on_layer is not None:
                on_layer(layer)
        return [self._finish(sequence, error) for sequence, error in zip(sequences, errors, strict=True)]

    def fault(self) -> str:
        return ""

    def close(self) -> None:
        self._arena.close()

    def _duration_s(self, sequences: Sequence[SequenceStep]) -> float:
        prefill_tokens = sum(s.tokens for s in sequences if s.tokens > 1)
        decodes = any(s.tokens == 1 for s in sequences)
        return prefill_tokens * self._options.prefill_token_s + (self._options.step_s if decodes else 0.0)

    def _compute(self, sequence: SequenceStep) -> _Rows:
        state = self._state_before(sequence)
        keys, values = [], []
        for position, token in enumerate(unpack_tokens(sequence.token_ids), sequence.start):
            head = _ROW_HEAD.pack(token, position)
            state = xxhash.xxh3_128_digest(state + head)
            keys.append(state)
            values.append(head + state[:8])
        return _Rows(b"".join(keys), b"".join(values))

    def _state_before(self, sequence: SequenceStep) -> bytes:
        if sequence.start == 0:
            return self.spec.namespace
        page, row = divmod(sequence.start - 1, self.spec.layout.block_tokens)
        return bytes(self.store.slice(sequence.pages[page], 0)[row * _ROW_BYTES : (row + 1) * _ROW_BYTES])

    def _write(self, sequence: SequenceStep, layer: int, rows: _Rows) -> None:
        keys, values = _in_layer(rows.keys, layer), _in_layer(rows.values, layer)
        block = self.spec.layout.block_tokens
        done = 0
        while done < len(keys) // _ROW_BYTES:
            page, row = divmod(sequence.start + done, block)
            count = min(block - row, len(keys) // _ROW_BYTES - done)
            target = self.store.slice(sequence.pages[page], layer)
            for half, new in ((0, keys), (block, values)):
                into = (half + row) * _ROW_BYTES
                target[into : into + count * _ROW_BYTES] = new[
                    done * _ROW_BYTES : (done + count) * _ROW_BYTES
                ]
            done += count

    def _finish(self, sequence: SequenceStep, error: str) -> SequenceResult:
        if error or sequence.sample is None:
            return SequenceResult(sequence.attempt, error=error)
        end = sequence.start + sequence.tokens
        transcript, content = self._read_back(sequence.pages, end)
        try:
            logits = next_logits(transcript, content)
            shaped = shape(logits, sequence, self._follower, content) if sequence.sample.reshapes else None
        except GrammarError as e:
            return SequenceResult(sequence.attempt, error=error_of(e))
        except (ScriptedFailure, NoToken) as e:
            return SequenceResult(sequence.attempt, error=str(e))
        token, logprob = pick(logits, sequence.sample, end, shaped)
        return SequenceResult(sequence.attempt, (token,), () if logprob is None else (logprob,))

    def _read_back(self, pages: Sequence[int], end: int) -> tuple[Transcript, bytes]:
        """The tokens of positions before `end`, and a digest of all their KV, read from the pages alone."""
        block = self.spec.layout.block_tokens
        full, rest = divmod(end, block)
        half = block * _ROW_BYTES
        digest = xxhash.xxh3_128()
        first_values = b""
        for layer in range(LAYERS):
            slices = [self.store.slice(page, layer) for page in pages[:full]]
            values = [s[half:] for s in slices]
            if rest:
                last = self.store.slice(pages[full], layer)
                slices.append(last[: rest * _ROW_BYTES])
                values.append(last[half : half + rest * _ROW_BYTES])
                slices.append(values[-1])
            digest.update(b"".join(slices))
            if layer == 0:
                first_values = b"".join(values)
        return Transcript(first_values[0::_ROW_BYTES], first_values[1::_ROW_BYTES]), digest.digest()


def parse_options(model: str) -> ToyOptions:
    """Options in a toy's name. Raises Invalid on anything but `toy` and `toy:option=number,...`."""
    name, _, listed = model.partition(":")
    if name != "toy":
        raise Invalid(f"{model!r} is not a toy model", param="model")
    given: dict[str, float] = {}
    for part in filter(None, listed.split(",")):
        key, _, value = part.partition("=")
        try:
            given[key] = float(value)
        except ValueError:
            given[key] = -1.0
        if key not in _OPTIONS or not 0 <= given[key] < 1e9:
            raise Invalid(
                f"toy option {part!r} is not one of {', '.join(_OPTIONS)} with a number", param="model"
            )
    return ToyOptions(given.get("step_ms", 0.0) / 1e3, given.get("prefill_us", 0.0) / 1e6)


def toy_layout(block_tokens: int) -> KVLayout:
    return KVLayout(
        layers=LAYERS, kv_heads=1, head_dim=4, block_tokens=block_tokens, dtype="toy", dtype_bytes=4
    )


def toy_spec(block_tokens: int = 16, salt: str = "") -> ModelSpec:
    """The model spec that a toy node announces; the same in every process for the same arguments."""
    layout = toy_layout(block_tokens)
    return ModelSpec(
        name="toy",
        path="toy",
        vocab_size=VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
        eos_token_ids=(EOS,),
        layout=layout,
        namespace=namespace_digest(weights="toy-1", dtype=layout.dtype, block_tokens=block_tokens, salt=salt),
    )


def _in_layer(rows: bytes, layer: int) -> bytes:
    """Layer 0's rows, converted to those of `layer`."""
    if layer == 0 or not rows:
        return rows
    mask = blake2b(b"layer %d" % layer, digest_size=_ROW_BYTES).digest() * (len(rows) // _ROW_BYTES)
    mixed = int.from_bytes(rows, "little") ^ int.from_bytes(mask, "little")
    return mixed.to_bytes(len(rows), "little")
