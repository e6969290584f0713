"""The small model for tests marked `real`. It is fetched and converted once per machine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from shared.io.models import DEFAULT_MODEL


@cache
def model_folder() -> Path:
    """Folder of the small model in Hugging Face format."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from shared.engine.weights.fetch import fetch

    return fetch(DEFAULT_MODEL, print)


@pytest.fixture(scope="session")
def small_model() -> Path:
    return model_folder()
