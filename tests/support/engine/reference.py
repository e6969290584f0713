"""The results of `transformers` itself, in float32: the reference of the exactness tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.support.engine.model import model_folder


@cache
def _model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # with two threads it is many times slower on a busy machine
    return AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32).eval()


def greedy(prompt: Sequence[int], new_tokens: int) -> list[int]:
    """The next `new_tokens` greedy tokens after `prompt`. EOS does not end the answer."""
    import torch

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = _model().generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
            min_new_tokens=new_tokens, eos_token_id=[-1], pad_token_id=0, repetition_penalty=1.0,
        )  # fmt: skip
    return list(out[0, len(prompt) :].tolist())


def logits_of(ids: Sequence[int]) -> Any:
    """Logits at every position, `[len(ids), vocab]`."""
    import torch

    with torch.inference_mode():
        return _model()(torch.tensor([list(ids)]), use_cache=False).logits[0]
