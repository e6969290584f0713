"""`tsukimi up`: checks, fetches the model, and runs a launcher here or in the background."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from shared.io.models import ALIASES, looks_like_hub_id, resolve_model
from shared.protocol.errors import Invalid
from tsukimi.errors import ToolError
from tsukimi.local import nats
from tsukimi.local.launcher import Addresses, Launcher
from tsukimi.local.plan import ClusterOptions, plan
from tsukimi.local.report import make_report
from tsukimi.local.rundir import RunDir, display_path

HTTP_HOST = "127.0.0.1"


def up(options: ClusterOptions, run_dir: RunDir, console: Console) -> int:
    """Run a cluster until it is stopped. Returns the exit code."""
    run_dir.claim()
    keep_state = True
    try:
        preflight(options)
        model = fetch_model(options.model)
        port = nats.free_port()
        specs = plan(options, port, nats.find_binary())
        addresses = Addresses(nats_port=port, http_host=HTTP_HOST, http_port=options.port)
        report = make_report(console)
        try:
            launcher = Launcher(
                specs, run_dir, addresses, model, report, summary(options, model, run_dir, addresses)
            )
            code = asyncio.run(launcher.run())
        finally:
            report.close()
        keep_state = code != 0
        return code
    finally:
        run_dir.release(keep_state=keep_state)


def preflight(options: ClusterOptions) -> None:
    """Raises ToolError for what would fail later with a worse message."""
    try:
        free = nats.can_bind(HTTP_HOST, options.port)
    except PermissionError:
        raise ToolError(
            f"this user may not listen on port {options.port}; choose another with --port."
        ) from None
    if not free:
        raise ToolError(
            f"port {options.port} is in use; stop what listens there, or choose another with --port."
        )
    available = available_bytes()
    if available is not None and options.memory_bytes > available:
        raise ToolError(
            f"{options.prefill + options.decode} compute nodes and {options.cache} cache nodes would take "
            f"{options.memory_bytes >> 20} MiB for KV, but only {available >> 20} MiB of memory are free; "
            "lower --kv-memory or --pool-memory, or start fewer nodes."
        )


def available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def fetch_model(model: str) -> str:
    """Get the model's files, showing the progress. Returns the id that clients use. Raises ToolError if that fails."""
    try:
        return resolve_model(model).name
    except Invalid as missing:
        if model not in ALIASES and not looks_like_hub_id(model):
            raise ToolError(missing.message) from missing
    if (
        subprocess.run([sys.executable, "-m", "shared.engine.weights.fetch", model], check=False).returncode
        != 0
    ):
        raise ToolError(f"the model {model!r} cannot be had (see above).")
    return resolve_model(model).name


def summary(options: ClusterOptions, model: str, run_dir: RunDir, addresses: Addresses) -> list[str]:
    """Lines that say what to do with a cluster that is ready."""
    command = command_name()
    where = "" if str(run_dir.path) == ".run" else f" --run-dir {display_path(run_dir.path)}"
    return [
        "",
        f"Ready: {addresses.url} serves {model} ({options.prefill} prefill, {options.decode} decode, "
        f"{options.cache} cache). Ask it something:",
        "",
        f"  curl -N {addresses.url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{model}", "stream": true, "messages": '
        '[{"role": "user", "content": "What is the capital of France?"}]}\'',
        "",
        f"  talk    {command} chat{where}",
        f"  watch   {command} status{where}",
        f"  logs    {display_path(run_dir.logs)}/*.log  ({command} logs{where} decode-0)",
        f"  stop    Ctrl-C here, or {command} down{where}",
    ]


def command_name() -> str:
    """How to call this tool from the current folder."""
    script = Path(sys.argv[0])
    if script.name != "tsukimi":
        return f"{display_path(Path(sys.executable))} -m tsukimi"
    on_path = any(Path(folder).resolve() == script.resolve().parent for folder in os.get_exec_path())
    return "tsukimi" if on_path else display_path(script)


def up_detached(arguments: list[str], run_dir: RunDir, console: Console) -> int:
    """Start a launcher in the background with the given arguments of `up`. Returns once it is ready or has ended."""
    if run_dir.is_locked():
        raise ToolError(run_dir.already_running())
    run_dir.path.mkdir(parents=True, exist_ok=True)
    with run_dir.launcher_log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tsukimi", "up", *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    with run_dir.launcher_log.open("r", errors="replace") as log:
        while True:
            code = process.poll()
            state = run_dir.read()
            ready = state is not None and state.launcher.pid == process.pid and state.phase == "ready"
            console.out(log.read(), end="", highlight=False)
            if ready or code is not None:
                return code or 0
            time.sleep(0.1)
