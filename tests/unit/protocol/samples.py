"""One message of every kind, with every field set. Their bytes, as first put on a wire, are in golden.json.

Messages only ever gain fields with defaults: then the samples here gain nothing, golden.json stays, and the old bytes
must still decode to the same samples. A new kind of message gets a sample, and its bytes are added with

    python -m tests.unit.protocol.samples
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.protocol import cluster, errors, requests
from shared.protocol.ids import NodeRef
from shared.protocol.model import KVLayout, ModelSpec
from shared.protocol.sampling import SamplingParams, TokenLogprob
from shared.protocol.wire import encode

GOLDEN = Path(__file__).with_name("golden.json")

ATTEMPT = "7f0c1d9e-0000-4000-8000-000000000001/0/2"
KEY = bytes(range(16))
REF = NodeRef("decode-0", "00112233445566aa", tcp="10.0.0.1:7001", shm="tsukimi-1", host="alpha")
SOURCE = requests.BlockSource(REF, 3, 4)
SAMPLING = SamplingParams(0.8, 0.9, 40, 2**64 - 1, 5, (2, 7), True)
LOGPROB = TokenLogprob(-0.25, ((11, -0.25), (12, -1.5)))
DELTA = requests.TokenDelta(ATTEMPT, 5, (11, 12), (LOGPROB, LOGPROB), "stop", "why", 32)
LAYOUT = KVLayout(2, 3, 64, 16, "bfloat16", 2)
MODEL = ModelSpec("smollm2-135m", "/models/smollm2", 49152, 8192, (0, 2), LAYOUT, KEY)

SAMPLES: tuple[Any, ...] = (
    cluster.NodeInfo(
        REF, "decode", "warming", "one token", "0.1.0", 4711, MODEL, 1000, 8, 16,
        cluster.CostCoefficients(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), "127.0.0.1:8000",
    ),
    cluster.NodeLoad(
        "decode-0", REF.incarnation, "decode", 9, "ready", 1, 2, 1000, 10, 20, 0.5, 4096, (ATTEMPT,), {"steps": 3.0}, 77,
    ),
    cluster.NodeLeft("decode-0", REF.incarnation),
    cluster.RollCall("gateway-0"),
    cluster.BlockEvents("cache-0", REF.incarnation, 5, (KEY,), (KEY[::-1],)),
    cluster.SnapshotAsked("conductor-0"),
    cluster.BlockSnapshotPart("cache-0", REF.incarnation, 5, 1, 2, (KEY,)),
    requests.PlaceGivenUp(ATTEMPT),
    requests.PlaceRequest(ATTEMPT, "smollm2-135m", 40, (KEY, KEY[::-1]), 64, 30.0, (("decode-1", "ff"),), True),
    requests.Placement(
        ATTEMPT, REF, REF, (SOURCE,), REF, REF, 2, requests.Prediction(0.1, 0.2, 0.3, 0.4, 0.5), "kvcache_centric", "why",
    ),
    requests.ReserveRequest(
        ATTEMPT, "gateway-0", "aa", "bb", KEY, 40, 64, SAMPLING, (KEY,), (1, 2), REF,
        requests.LocalPrefill(b"\x01\x00\x00\x00", (SOURCE,)), 12.5, 3,
    ),
    requests.Reserved(ATTEMPT, KEY, 7),
    requests.PrefillJob(
        ATTEMPT, "gateway-0", "aa", "bb", KEY, b"\x01\x00\x00\x00", (KEY,), SAMPLING, 64, (SOURCE,), REF,
        requests.HandoffTarget(REF, KEY), 12.5, 3,
    ),
    requests.Accepted(ATTEMPT),
    requests.TokenBatch("decode-0", REF.incarnation, (DELTA,)),
    requests.CancelAttempt(ATTEMPT, "client left"),
    requests.SyncRequest(ATTEMPT, 4),
    requests.AttemptState(ATTEMPT, "running", DELTA),
    errors.WireError("overloaded", "full", "max_tokens", 1.5),
)  # fmt: skip


def golden() -> dict[str, str]:
    """Kind -> bytes (hex)."""
    known: dict[str, str] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return known


if __name__ == "__main__":
    old = golden()
    new = {type(sample).__name__: encode(sample).hex() for sample in SAMPLES}
    GOLDEN.write_text(json.dumps(new | old, indent=1, sort_keys=True) + "\n")
