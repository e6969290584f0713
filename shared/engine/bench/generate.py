"""`python -m shared.engine.bench.generate`: transformers' static generate on one batch, once per line on standard input.

For each it writes one line: the seconds it took. `tsukimi bench stack` compares the cluster with this.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import torch
import typer

from shared.engine.bench.contenders import Transformers
from shared.engine.hardware import cpu_computes_bfloat16


def main(
    model: Annotated[str, typer.Option()],
    threads: Annotated[int, typer.Option()],
    batch: Annotated[int, typer.Option()],
    input_tokens: Annotated[int, typer.Option()],
    output_tokens: Annotated[int, typer.Option()],
    dtype: Annotated[str, typer.Option()] = "auto",
) -> None:
    if dtype == "auto":
        dtype = "bfloat16" if cpu_computes_bfloat16() else "float32"
    peer = Transformers(model, dtype, threads)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        with torch.inference_mode():
            peer.generate(batch, input_tokens, output_tokens)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    typer.run(main)
