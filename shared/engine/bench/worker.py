"""Runs a contender in its own process, so that its peak memory can be measured. It answers one call at a time and is idle
between calls, while the other contender computes."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shared.engine.torch_threads import sleep_when_idle


class Worker:
    """Starts the process. `ask` calls a method of the contender there."""

    def __init__(self, kind: str, **arguments: Any) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.ask("about")

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return the method's result. Raises RuntimeError with the error if it raised."""
        self._pipe.send((method, arguments))
        try:
            error, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process ended with {self._process.exitcode}") from None
        if error:
            raise RuntimeError(error)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        self._process.kill()


def _serve(kind: str, arguments: dict[str, Any], pipe: Connection) -> None:
    if kind == "Tsukimi":
        sleep_when_idle()
    from shared.engine.bench import contenders

    contender: Any = None
    while True:
        try:
            method, values = pipe.recv()
        except EOFError:
            return
        try:
            if contender is None:
                contender = getattr(contenders, kind)(**arguments)
            answer = peak_bytes() if method == "peak_bytes" else getattr(contender, method)(*values)
            pipe.send(("", answer))
        except Exception as e:
            pipe.send((f"{type(e).__name__}: {e}", None))


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
