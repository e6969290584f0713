"""A stand-in for any service, for tests of the launcher: announces itself, answers roll calls, and misbehaves when told.

`--behaviour`: `well`; `config_error` exits with 78; `crash` exits with 3 before it is ready; `stubborn` ignores SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import cast

from shared.io.nats_bus import connect
from shared.protocol.cluster import NodeInfo, NodeLoad, RollCall, Stage
from shared.protocol.ids import NodeRef, Role, new_incarnation
from shared.protocol.subjects import ANNOUNCE, ROLL_CALL, heartbeat


async def serve(flags: dict[str, str]) -> None:
    node = flags["node"]
    role = cast(Role, node.rsplit("-", 1)[0])
    ref = NodeRef(node=node, incarnation=new_incarnation())
    stop = asyncio.Event()
    if flags.get("behaviour") == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    bus = await connect(flags["nats_url"], name=node)

    async def announce(stage: Stage, detail: str = "") -> None:
        await bus.publish(ANNOUNCE, NodeInfo(ref=ref, role=role, stage=stage, detail=detail, pid=os.getpid()))

    async def on_roll_call(_: RollCall) -> None:
        await announce("ready")

    await announce("loading", "pretending")
    if flags.get("behaviour") == "crash":
        print("this stand-in crashes on purpose", flush=True)
        sys.exit(3)
    http = None
    if "port" in flags:
        http = await asyncio.start_server(_answer, "127.0.0.1", int(flags["port"]))
    await bus.subscribe(ROLL_CALL, RollCall, on_roll_call)
    await announce("ready")
    for seq in range(1 << 30):
        load = NodeLoad(
            node=node, incarnation=ref.incarnation, role=role, seq=seq, stage="ready", kv_blocks=100, kv_blocks_cached=7,
            counters={"prompt_tokens_computed": 30.0, "cached_tokens": 10.0} if role == "prefill" else {},
        )  # fmt: skip
        await bus.publish(heartbeat(role, node), load)
        try:
            await asyncio.wait_for(stop.wait(), 0.3)
            break
        except TimeoutError:
            pass
    if http is not None:
        http.close()
    await bus.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    writer.close()


def main() -> None:
    words = iter(sys.argv[1:])
    flags = {flag.removeprefix("--").replace("-", "_"): next(words) for flag in words}
    if flags.get("behaviour") == "config_error":
        print("kv_bytes: a stand-in whose configuration cannot work", flush=True)
        sys.exit(78)
    asyncio.run(serve(flags))


if __name__ == "__main__":
    main()
