"""Drives an engine in tests the way the batching code does: each sequence has its own pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

import msgspec

from shared.core.kv.block_keys import blocks_for, pack_tokens
from shared.core.worker.steps import SequenceResult, SequenceStep
from shared.engine.api import Engine
from shared.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


_LIVES = count()


class Sequences:
    """Hands out an engine's pages and runs sequences on it. Pages are handed out in a scattered order, and not reused
    before `reset`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        stride = next(s for s in range(7, 10_000) if _coprime(s, engine.store.pages))
        self._order = [(i * stride) % engine.store.pages for i in range(engine.store.pages)]
        self._life = next(_LIVES)
        self._used = 0

    def pages(self, tokens: int) -> tuple[int, ...]:
        wanted = blocks_for(tokens, self.engine.spec.layout.block_tokens)
        assert self._used + wanted <= len(self._order), "the test needs more pages than the engine has"
        taken = self._order[self._used : self._used + wanted]
        self._used += wanted
        return tuple(taken)

    def reset(self) -> None:
        """Make all pages available again. Their old content stays in them as garbage."""
        self._life = next(_LIVES)
        self._used = 0

    def attempt(self, pages: tuple[int, ...]) -> str:
        """The id of the attempt that these pages belong to. It differs for other pages, and after a reset."""
        return f"{self._life}/{pages[0]}"

    def prefill(
        self,
        prompt: Sequence[int],
        pages: tuple[int, ...],
        *,
        start: int = 0,
        chunk: int = 0,
        sample: SamplingParams = GREEDY,
        on_layer: Callable[[int], None] | None = None,
    ) -> SequenceResult:
        """Compute prompt[start:] in chunks and sample the first token."""
        size = chunk or len(prompt)
        result = SequenceResult("")
        for at in range(start, len(prompt), size):
            part = prompt[at : at + size]
            last = at + size >= len(prompt)
            (result,) = self.engine.run(
                [step(self.attempt(pages), at, part, pages, sample if last else None, prompt)], on_layer
            )
        return result

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        chunk: int = 0,
        samples: Iterable[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """Prefill each prompt alone, then decode all in one batch. Returns the answers in order; EOS does not end one."""
        params = list(samples) if samples is not None else [GREEDY] * len(prompts)
        tables = [self.pages(len(prompt) + new_tokens) for prompt in prompts]
        answers = [
            list(self.prefill(prompt, pages, chunk=chunk, sample=sample).tokens)
            for prompt, pages, sample in zip(prompts, tables, params, strict=True)
        ]
        for _ in range(new_tokens - 1):
            batch = [
                step(
                    self.attempt(tables[i]),
                    len(prompts[i]) + len(answers[i]) - 1,
                    answers[i][-1:],
                    tables[i],
                    params[i],
                    prompts[i],
                    answers[i],
                )
                for i in range(len(prompts))
            ]
            for answer, result in zip(answers, self.engine.run(batch), strict=True):
                assert not result.error, result.error
                answer.extend(result.tokens)
        return answers

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks between pages, as a transfer does."""
        for source, target in zip(sources, targets, strict=True):
            for layer in range(self.engine.spec.layout.layers):
                self.engine.store.slice(target, layer)[:] = self.engine.store.slice(source, layer)

    def content(self, page: int, layer: int) -> bytes:
        return bytes(self.engine.store.slice(page, layer))


def step(
    attempt: str,
    start: int,
    tokens: Sequence[int],
    pages: tuple[int, ...],
    sample: SamplingParams | None = GREEDY,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
) -> SequenceStep:
    """A step of a sequence. `prompt` and `answer` are the tokens so far, for sampling parameters that look at them."""
    plain = SequenceStep(attempt, start, len(tokens), pack_tokens(tokens), pages, sample)
    if sample is None or not sample.looks_back:
        return plain
    past = (*(prompt if sample.looks_at_prompt else ()), *answer)
    return msgspec.structs.replace(plain, past=pack_tokens(past), answered=len(answer))


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1
