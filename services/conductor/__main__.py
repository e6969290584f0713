"""python -m services.conductor"""

from __future__ import annotations

from services.conductor.app import ConductorApp
from services.conductor.config import Config
from shared.io.service import run

if __name__ == "__main__":
    run(Config, "conductor", ConductorApp)
