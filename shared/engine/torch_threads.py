"""How torch's threads wait for each other. Does not import torch: the setting must be made before torch is imported."""

from __future__ import annotations

from shared.io.config import set_environment_default


def sleep_when_idle() -> None:
    """Make torch's idle threads sleep at once. By default they spin for milliseconds, on CPUs that the kernels' own
    threads and other services could use. An OMP_WAIT_POLICY set by the user takes precedence."""
    set_environment_default("OMP_WAIT_POLICY", "passive")
