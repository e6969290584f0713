"""The two engines that are compared: this one, and transformers with its sdpa attention and DynamicCache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from shared.core.kv.block_keys import blocks_for, pack_tokens
from shared.core.worker.steps import SequenceStep
from shared.engine.api import EngineConfig
from shared.engine.kv.paged import DTYPES
from shared.engine.load import load_engine
from shared.io.models import resolve_model
from shared.protocol.sampling import SamplingParams

hf: Any = transformers

GREEDY = SamplingParams(temperature=0.0)
BLOCK_TOKENS = 16


class Contender(Protocol):
    """Not thread-safe; every call computes from scratch."""

    def prefill(self, tokens: int) -> float:
        """Seconds to compute a prompt and its first token."""
        ...

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Median seconds of a decode step of `batch` sequences that begin with `context` tokens each, over `steps`
        steps."""
        ...

    def about(self) -> str: ...


class Tsukimi:
    """Implements Contender."""

    def __init__(
        self,
        model: str,
        dtype: str,
        threads: int,
        backend: str,
        kv_tokens: int,
        stages: int = 1,
        piece_tokens: int = 256,
    ) -> None:
        config = EngineConfig(
            model,
            dtype,
            BLOCK_TOKENS,
            kv_bytes=1 << 60,
            threads=threads,
            backend=backend,
            stages=stages,
            piece_tokens=piece_tokens,
        )
        self._said = -1
        self._engine = load_engine(_with_room(config, kv_tokens), lambda what, fraction: None)
        self._about = f"{self._engine.spec.layout.dtype}, {backend}"

    def prefill(self, tokens: int) -> float:
        step = self._step("prompt", 0, tokens, 0)
        began = time.perf_counter()
        self._run([step])
        return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> float:
        pages = blocks_for(context + steps + 1, BLOCK_TOKENS)
        for i in range(batch):
            self._run([self._step(f"s{i}", 0, context, i * pages)])
        return _median(
            lambda n: self._run([self._step(f"s{i}", context + n, 1, i * pages) for i in range(batch)]), steps
        )

    def said(self) -> int:
        """The latest token sampled."""
        return self._said

    def about(self) -> str:
        return self._about

    def _step(self, attempt: str, start: int, tokens: int, first_page: int) -> SequenceStep:
        ids = pack_tokens(_text(self._engine.spec.vocab_size, start, tokens))
        pages = range(first_page, first_page + blocks_for(start + tokens, BLOCK_TOKENS))
        return SequenceStep(attempt, start, tokens, ids, tuple(pages), GREEDY)

    def _run(self, steps: list[SequenceStep]) -> None:
        for result in self._engine.run(steps):
            assert not result.error, result.error
            self._said = result.tokens[-1]


class Transformers:
    """Implements Contender."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        folder = Path(resolve_model(model).path)
        self._model = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation="sdpa"
        ).eval()
        self._dtype = dtype

    def prefill(self, tokens: int) -> float:
        ids = self._ids(1, 0, tokens)
        began = time.perf_counter()
        self._forward(ids, hf.DynamicCache(config=self._model.config))
        return time.perf_counter() - began

    def decode(self, batch: int, context: int, steps: int) -> float:
        cache = hf.DynamicCache(config=self._model.config)
        self._forward(self._ids(1, 0, context), cache)
        cache.batch_repeat_interleave(batch)  # all sequences have the same context, so it is computed once
        return _median(lambda n: self._forward(self._ids(batch, context + n, 1), cache), steps)

    def generate(self, batch: int, context: int, new_tokens: int) -> None:
        """Generate with transformers' static batch: all prompts start together, and all answers have the same length."""
        ids = self._ids(batch, 0, context)
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )

    def about(self) -> str:
        return f"{self._dtype}, sdpa, DynamicCache"

    def _ids(self, batch: int, start: int, tokens: int) -> torch.Tensor:
        return torch.tensor([_text(self._model.config.vocab_size, start, tokens)] * batch)

    def _forward(self, ids: torch.Tensor, cache: Any) -> None:
        with torch.inference_mode():
            self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)


def _with_room(config: EngineConfig, kv_tokens: int) -> EngineConfig:
    """The configuration with KV memory for `kv_tokens` tokens."""
    from msgspec.structs import replace

    text = hf.AutoConfig.from_pretrained(Path(resolve_model(config.model).path)).get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    token_bytes = 2 * text.num_hidden_layers * kv_heads * head_dim * DTYPES[config.dtype].itemsize
    return replace(config, kv_bytes=kv_tokens * token_bytes)


def _text(vocabulary: int, start: int, tokens: int) -> list[int]:
    """Meaningless token ids, the same for both contenders."""
    return [(position * 37 + 11) % (vocabulary - 1) for position in range(start, start + tokens)]


def _median(run: Callable[[int], None], steps: int) -> float:
    """Median seconds of the last two thirds of the steps: the first third warms caches."""
    seconds = []
    for n in range(steps):
        began = time.perf_counter()
        run(n)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[steps // 3 :])
