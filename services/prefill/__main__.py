"""python -m services.prefill"""

from __future__ import annotations

from services.prefill.app import PrefillNode
from services.prefill.config import Config
from shared.io.service import run

if __name__ == "__main__":
    run(Config, "prefill", PrefillNode)
