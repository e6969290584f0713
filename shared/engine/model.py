"""The engine for real models: their layers, computed by one of several paths, over KV pages in shared memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from shared.core.kv.block_keys import blocks_for, namespace_digest, unpack_tokens
from shared.core.worker.steps import SequenceResult, SequenceStep
from shared.dataplane.api import PageStore
from shared.dataplane.memory.arena import Arena
from shared.engine.api import EngineConfig, EngineLost, OnLayer, Progress
from shared.engine.attention.api import AttentionBatch, AttentionShape, Span
from shared.engine.device import fault_after_error, needs_memory
from shared.engine.graphs.sizes import capture_sizes
from shared.engine.hardware import Hardware, choose
from shared.engine.kv.mirrored import MirroredPages
from shared.engine.kv.paged import DTYPES, Outgoing, Pages, SharedPages
from shared.engine.paths import lean
from shared.engine.paths.api import AfterLayer, Forward
from shared.engine.paths.general import GeneralPath
from shared.engine.paths.graphed import GraphedPath
from shared.engine.paths.lean import LeanPath
from shared.engine.pipeline.group import start_group
from shared.engine.sampling.sampler import Sampler
from shared.engine.step_checks import refusal
from shared.engine.weights import servable
from shared.engine.weights import transformers as hf
from shared.engine.weights.digest import weights_digest
from shared.io.models import ModelPath, resolve_model
from shared.protocol.errors import Invalid
from shared.protocol.model import KVLayout, ModelSpec
from shared.protocol.sampling import SamplingParams
from shared.text.grammar import Follower, file_tokenizer

log = structlog.get_logger(__name__)


_STAGES_NEED = (
    "only models that the lean path computes, on the CPU with the C++ kernels, can be cut into stages"
)

_COSMETIC = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Entries of config.json that do not affect KV. They are left out of the namespace."""


class ModelEngine:
    """Implements engine.api.Engine."""

    def __init__(self, spec: ModelSpec, arena: Arena, pages: Pages, forward: Forward) -> None:
        self.spec = spec
        self.store: PageStore = arena
        self._arena = arena
        self._pages = pages
        self._forward = forward
        self._sampler = Sampler(_follower(spec))
        self._closed = False
        self._lost = ""

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress, hardware: Hardware | None = None) -> ModelEngine:
        """Raises Invalid if the model is not on this machine or cannot be served; see load.load_engine. `hardware`
        overrides the choice by the configuration's backend and dtype."""
        found = resolve_model(config.model)
        folder = Path(found.path)
        progress("reading the configuration", 0.0)
        model_config = servable.read_config(folder)
        servable.require_servable(model_config)
        servable.require_whole_weights(folder)
        progress("readying the kernels", 0.05)  # the first time on a machine, this builds them
        hardware = hardware or choose(config.backend, config.dtype)
        if config.stages > 1 and hardware.kernels is None:
            raise Invalid(f"{config.stages} stages: {_STAGES_NEED}", param="stages")
        if config.threads > 0 or config.stages > 1:
            torch.set_num_threads(config.threads or max(1, torch.get_num_threads() // config.stages))
        progress("loading the weights", 0.1)
        with needs_memory("the weights", "model"):
            model = hf.load_model(folder, DTYPES[hardware.dtype], hardware.device)
        attention = hf.probe(model)
        layout = _layout(attention, config, hardware)
        progress("digesting the weights", 0.4)
        spec = _spec(found, model_config, layout, config.salt)
        arena = Arena(
            layout,
            config.kv_bytes // layout.block_bytes,
            progress=lambda done, total: progress("touching the KV pages", 0.5 + 0.4 * done / total),
        )
        with needs_memory(f"{config.kv_bytes} bytes of KV", "kv_bytes"):
            pages: Pages = (
                MirroredPages(arena, hardware.device, config.staging_bytes)
                if hardware.mirrored
                else SharedPages(arena)
            )
        forward = _forward(config, folder, model, attention, arena, pages, hardware)
        if isinstance(forward, GraphedPath):
            _capture(forward, config, spec, arena, hardware, progress)
        engine = cls(spec, arena, pages, forward)
        progress("trying one token", 0.95)
        try:
            engine._require_sound()
            for tokens in hardware.first_prompts:
                engine._run_prompt(min(tokens, spec.context_tokens, arena.pages * config.block_tokens))
        except BaseException:
            engine.close()
            raise
        progress("ready", 1.0)
        return engine

    def run(self, sequences: Sequence[SequenceStep], on_layer: OnLayer | None = None) -> list[SequenceResult]:
        errors = [refusal(sequence, self.spec, self.store.pages) for sequence in sequences]
        good = [sequence for sequence, error in zip(sequences, errors, strict=True) if not error]
        try:
            done = iter(self._run(good, on_layer))
        except Exception as e:
            self._lost = fault_after_error(self._pages.layers[0].device)
            if self._lost:
                raise EngineLost(self._lost) from e
            raise
        return [
            SequenceResult(sequence.attempt, error=error) if error else next(done)
            for sequence, error in zip(sequences, errors, strict=True)
        ]

    def fault(self) -> str:
        return "" if self._closed else self._lost or self._forward.fault()

    def close(self) -> None:
        """Idempotent. The engine cannot run afterwards."""
        if self._closed:
            return
        self._closed = True
        self._forward.close()
        del self._pages, self._forward  # their tensors would keep the arena's memory alive
        self._arena.close()

    def _run(self, sequences: Sequence[SequenceStep], on_layer: OnLayer | None) -> list[SequenceResult]:
        if not sequences:
            if on_layer is not None:
                for layer in range(self.spec.layout.layers):
                    on_layer(layer)
            return []
        batch = _pack(sequences, self.spec.layout.block_tokens)
        for sequence, span in zip(sequences, batch.spans, strict=True):
            self._pages.prepare(
                sequence.attempt, span.pages, blocks_for(span.start, self.spec.layout.block_tokens)
            )
        sampled = [i for i, sequence in enumerate(sequences) if sequence.sample is not None]
        outgoing = self._pages.outgoing(batch)
        with torch.inference_mode():
            keep = [batch.spans[i].rows.stop - 1 for i in sampled]
            logits = self._logits(sequences, batch, keep, outgoing, on_layer)
            results = self._sampler.sample(logits, [sequences[i] for i in sampled]) if sampled else []
            outgoing.settle()
        told = iter(results)
        return [SequenceResult(s.attempt) if s.sample is None else next(told) for s in sequences]

    def _logits(
        self,
        sequences: Sequence[SequenceStep],
        batch: AttentionBatch,
        keep: list[int],
        outgoing: Outgoing,
        on_layer: OnLayer | None,
    ) -> torch.Tensor:
        ids = [token for sequence in sequences for token in unpack_tokens(sequence.token_ids)]
        logits = self._forward.logits(
            batch,
            torch.tensor(ids, dtype=torch.long),
            torch.tensor(keep, dtype=torch.long),
            _publishing(outgoing, on_layer),
        )
        if on_layer is None:
            outgoing.publish(range(self.spec.layout.layers))
        else:
            outgoing.settle()  # before sampling waits for the device, so that on_layer is not called late
        return logits

    def _require_sound(self) -> None:
        result = self._run_prompt(1)
        if result.error:
            raise Invalid(f"the model's weights are damaged: {result.error} after one token", param="model")

    def _run_prompt(self, tokens: int) -> SequenceResult:
        pages = tuple(range(blocks_for(tokens, self.spec.layout.block_tokens)))
        greedy = SamplingParams(temperature=0.0)
        (result,) = self.run([SequenceStep("warm-up", 0, tokens, bytes(4 * tokens), pages, greedy)])
        return result


def _follower(spec: ModelSpec) -> Follower | None:
    """None if grammars cannot be followed: the folder has no usable tokenizer.json, or the model has no EOS token."""
    path = Path(spec.path) / "tokenizer.json"
    if not path.is_file() or not spec.eos_token_ids:
        return None
    try:
        return Follower(file_tokenizer(path, spec.vocab_size, spec.eos_token_ids))
    except Invalid as e:
        log.warning("no_structured_output", reason=str(e))
        return None


def _pack(sequences: Sequence[SequenceStep], block_tokens: int) -> AttentionBatch:
    spans, row = [], 0
    for sequence in sequences:
        end = sequence.start + sequence.tokens
        spans.append(Span(sequence.start, end, sequence.pages[: blocks_for(end, block_tokens)], row))
        row += sequence.tokens
    return AttentionBatch(tuple(spans))


def _publishing(outgoing: Outgoing, on_layer: OnLayer | None) -> AfterLayer | None:
    """The callback after each layer: publishes the layer's KV, then calls on_layer. None if on_layer is None."""
    if on_layer is None:
        return None
    return lambda layer: outgoing.publish(range(layer, layer + 1), partial(on_layer, layer))


def _layout(seen: hf.Attention, config: EngineConfig, hardware: Hardware) -> KVLayout:
    layout = KVLayout(
        layers=seen.layers,
        kv_heads=seen.kv_heads,
        head_dim=seen.head_dim,
        block_tokens=config.block_tokens,
        dtype=hardware.dtype,
        dtype_bytes=DTYPES[hardware.dtype].itemsize,
    )
    if config.kv_bytes < layout.block_bytes:
        raise Invalid(
            f"kv_bytes {config.kv_bytes} is less than a block of {layout.block_bytes} bytes", param="kv_bytes"
        )
    return layout


def _forward(
    config: EngineConfig,
    folder: Path,
    model: Any,
    seen: hf.Attention,
    arena: Arena,
    pages: Pages,
    hardware: Hardware,
) -> Forward:
    """The fastest path that can compute this model on this hardware."""
    shape = AttentionShape(
        seen.query_heads, seen.kv_heads, seen.head_dim, config.block_tokens, seen.scale, seen.reaches
    )
    fits = hardware.kernels is not None and lean.fits(model.config, shape, model.dtype)
    if config.stages > 1:
        if not fits or hardware.kernels is None:
            raise Invalid(
                f"{config.stages} stages of a {model.config.model_type} model: {_STAGES_NEED}", param="stages"
            )
        if config.stages > seen.layers:
            raise Invalid(f"{config.stages} stages cannot share {seen.layers} layers", param="stages")
        return start_group(config, folder, model, shape, arena, pages.layers, hardware.kernels)
    if fits and hardware.kernels is not None:
        return LeanPath(model, shape, pages.layers, hardware.kernels)
    backend = hardware.backend(shape, pages.layers)
    if hardware.capture is None or pages.scrap is None or config.graph_rows == 0:
        return GeneralPath(model, backend)
    return GraphedPath(model, backend, pages.scrap, seen.layers)


def _capture(
    path: GraphedPath,
    config: EngineConfig,
    spec: ModelSpec,
    arena: Arena,
    hardware: Hardware,
    progress: Progress,
) -> None:
    assert hardware.capture is not None
    path.capture(
        capture_sizes(config.graph_rows),
        min(blocks_for(spec.context_tokens, config.block_tokens), arena.pages),
        hardware.capture(hardware.device),
        lambda done: progress("capturing decode steps", 0.9 + 0.05 * done),
    )


def _spec(found: ModelPath, config: Any, layout: KVLayout, salt: str) -> ModelSpec:
    folder = Path(found.path)
    facts = {key: value for key, value in config.to_dict().items() if key not in _COSMETIC}
    return ModelSpec(
        name=found.name,
        path=found.path,
        vocab_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        eos_token_ids=hf.eos_token_ids(folder, config),
        layout=layout,
        namespace=namespace_digest(
            weights=weights_digest(folder),
            config=json.dumps(facts, sort_keys=True, default=_plain),
            dtype=layout.dtype,
            block_tokens=layout.block_tokens,
            salt=salt,
        ),
    )


def _plain(value: object) -> object:
    """JSON for values that json cannot encode. Sets are sorted, so that the result is the same in every process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
