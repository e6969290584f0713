"""The health check of containers. Exit code 0: healthy.

    python -m tsukimi.probe http 8000 /live
    python -m tsukimi.probe node decode-0 nats://nats:4222

Imports little, since it runs every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def http_status(host: str, port: int, path: str, timeout_s: float = 2.0) -> int:
    """The status code of a GET; 0 when nobody answers."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
                )
                words = (await reader.readline()).split()
                return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return 0


async def node_stage(url: str, node: str, timeout_s: float = 3.0) -> str:
    """The stage that the node announces at a roll call; empty if it does not answer in time."""
    from shared.io.nats_bus import connect
    from shared.protocol.cluster import NodeInfo, RollCall
    from shared.protocol.subjects import ANNOUNCE, ROLL_CALL

    stage = ""
    heard = asyncio.Event()

    def on_info(info: NodeInfo) -> None:
        nonlocal stage
        if info.ref.node == node:
            stage = info.stage
            heard.set()

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            bus = await connect(url, name="probe")
            try:
                await bus.subscribe_ordered(ANNOUNCE, NodeInfo, on_info)
                await bus.publish(ROLL_CALL, RollCall(asked_by="probe"))
                await heard.wait()
            finally:
                await bus.close()
    return stage


def main() -> None:
    match sys.argv[1:]:
        case ["http", port, path]:
            status = asyncio.run(http_status("127.0.0.1", int(port), path))
            sys.exit(0 if status == 200 else f"GET {path}: {status or 'no answer'}")
        case ["node", node, url]:
            stage = asyncio.run(node_stage(url, node))
            sys.exit(0 if stage == "ready" else f"{node}: {stage or 'no answer'}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
