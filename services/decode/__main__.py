"""python -m services.decode"""

from __future__ import annotations

from services.decode.app import DecodeNode
from services.decode.config import Config
from shared.io.service import run

if __name__ == "__main__":
    run(Config, "decode", DecodeNode)
