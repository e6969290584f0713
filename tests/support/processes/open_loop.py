"""Requests to a cluster at a steady rate, whatever becomes of the earlier ones."""

from __future__ import annotations

import asyncio
import json

import httpx


async def open_loop(url: str, seconds: float, per_s: float, max_tokens: int = 16) -> list[str]:
    """Streamed completions of the toy model. Returns what went wrong with each; an empty string: nothing."""
    limits = httpx.Limits(max_connections=None)  # the usual limit would close the loop
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits, trust_env=False) as client:

        async def one(i: int) -> str:
            body = {
                "model": "toy",
                "prompt": f"request {i} " * 8,
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
            }
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    return f"{response.status_code}: {(await response.aread())[:200]!r}"
                events = [
                    line[5:].strip() async for line in response.aiter_lines() if line.startswith("data:")
                ]
            if not events or events[-1] != "[DONE]":
                return f"it ends with {events[-1:]}"
            errors = [e for e in events[:-1] if "error" in json.loads(e)]
            return errors[0] if errors else ""

        requests = []
        for i in range(int(seconds * per_s)):
            requests.append(asyncio.create_task(one(i)))
            await asyncio.sleep(1.0 / per_s)
        return list(await asyncio.gather(*requests))
