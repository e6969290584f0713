"""A data plane peer as a separate process that tests kill. Prints its address, then each event, as one JSON line each.

python -m tests.support.processes.dataplane_peer pool|landing|write|put <node> <transport> [<target ref>]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec

from shared.core.kv.block_keys import block_keys, pack_tokens
from shared.dataplane.api import LandingCommit
from shared.protocol.ids import NodeRef
from tests.support.fakes.endpoints import LAYOUT, NAMESPACE, DictPool, Site, site
from tests.support.processes.spawn import spawn, tail, wait_until

LANDING = b"L" * 16
PAGES = 64
PROMPT = pack_tokens(range(8 * LAYOUT.block_tokens))
PROMPT_KEYS = block_keys(NAMESPACE, PROMPT, LAYOUT.block_tokens)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def run(mode: str, node: str, transport: str, target: NodeRef | None) -> None:
    async with site(node, transport, pages=PAGES, order="page" if mode == "pool" else "layer") as me:
        ref = me.endpoint.ref
        if mode == "pool":
            me.endpoint.serve_pool(DictPool(PAGES))
        if mode == "landing":
            me.endpoint.open_landing(LANDING, range(PAGES), on_commit)
        say(ref=msgspec.to_builtins(ref))
        if mode == "write":
            assert target is not None
            await write_for_ever(me, target)
        if mode == "put":
            assert target is not None
            say(stored=await put_prompt(me, target))
        await asyncio.Event().wait()


def on_commit(commit: LandingCommit) -> None:
    say(ok=commit.ok, error=commit.error)


async def write_for_ever(me: Site, target: NodeRef) -> None:
    stream = me.endpoint.open_write(target, LANDING)

    def write() -> None:
        while True:
            for layer in range(LAYOUT.layers):
                stream.write(layer, [(block, block) for block in range(8)])

    await asyncio.to_thread(write)


async def put_prompt(me: Site, target: NodeRef) -> int:
    put = await me.endpoint.open_put(target, NAMESPACE, PROMPT_KEYS)
    for page in range(len(PROMPT_KEYS)):
        me.arena.slice(page, 0)[:4] = page.to_bytes(4, "little")
    for layer in range(LAYOUT.layers):
        put.write(layer, [(i, i) for i in range(len(PROMPT_KEYS))])
    return (await put.commit(len(PROMPT_KEYS))).stored


class PeerProcess:
    """Handle on a peer process, which ends with the `with` block at the latest."""

    def __init__(
        self, folder: Path, mode: str, node: str, transport: str, target: NodeRef | None = None, **env: str
    ) -> None:
        self._log = folder / f"{node}-{mode}.log"
        self._skip = len(self._log.read_text()) if self._log.exists() else 0
        args = [sys.executable, "-m", "tests.support.processes.dataplane_peer", mode, node, transport]
        if target is not None:
            args.append(json.dumps(msgspec.to_builtins(target)))
        self.process = spawn(args, log=self._log, cwd=Path(__file__).parents[3], env={**os.environ, **env})
        self.ref = msgspec.convert(self.line("ref")["ref"], NodeRef)

    def line(self, word: str) -> dict[str, object]:
        """Wait for the first line with that word and return it."""
        wait_until(lambda: bool(self._lines(word)), 20.0, f"{word}: {tail(self._log)}")
        return self._lines(word)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10.0)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def _lines(self, word: str) -> list[dict[str, object]]:
        lines = self._log.read_text()[self._skip :].splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [line for line in found if word in line]


if __name__ == "__main__":
    its_target = msgspec.convert(json.loads(sys.argv[4]), NodeRef) if len(sys.argv) > 4 else None
    asyncio.run(run(sys.argv[1], sys.argv[2], sys.argv[3], its_target))
