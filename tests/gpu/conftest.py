"""All of this folder needs a GPU and FlashInfer; it is skipped, with the reason, where either is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def _lacking() -> str:
    if not find_spec("torch"):
        return "the engine extra is not installed"
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU here"
    return "" if find_spec("flashinfer") else "flashinfer-python is not installed (extra `gpu`)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    lacking = _lacking() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(1800))  # FlashInfer compiles each kernel at its first use
        if lacking:
            item.add_marker(pytest.mark.skip(reason=lacking))
