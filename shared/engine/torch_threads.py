"""How torch's threads wait for each other. Imports no torch: what is said here holds for a torch imported later."""

from __future__ import annotations

from shared.io.config import set_environment_default


def sleep_when_idle() -> None:
    """Threads of torch's that have nothing to do sleep at once. Else they look for work for milliseconds, on the CPUs
    that the kernels' own threads, and other services, could use. The user's own OMP_WAIT_POLICY goes before."""
    set_environment_default("OMP_WAIT_POLICY", "passive")
