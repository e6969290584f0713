"""The toy engine's own promises: text depends on every byte of KV, speed options stay out of the
namespace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.engine.api import EngineConfig
from shared.engine.load import load_engine
from shared.engine.toy.engine import ToyEngine, parse_options, toy_spec
from shared.protocol.errors import Invalid
from shared.protocol.sampling import SamplingParams
from tests.support.engine.sequences import Sequences, step

PROMPT = list(b"every good boy deserves favour, and so do girls")


@pytest.fixture
def toy() -> Iterator[Sequences]:
    engine = ToyEngine(EngineConfig("toy", kv_bytes=1 << 20))
    yield Sequences(engine)
    engine.close()


def logprobs(toy: Sequences, pages: tuple[int, ...]) -> object:
    """A fingerprint of the whole next-token distribution after PROMPT, whose KV but the last row is in the
    pages."""
    sample = SamplingParams(temperature=0.0, top_logprobs=30)
    return toy.prefill(PROMPT, pages, start=len(PROMPT) - 1, sample=sample)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("row", [0, 15, 16, 45])
def test_any_wrong_row_changes_the_text(toy: Sequences, layer: int, row: int) -> None:
    pages = toy.pages(len(PROMPT))
    toy.prefill(PROMPT, pages)
    good = logprobs(toy, pages)
    for half in (0, 256):
        byte = half + row % 16 * 16 + 12
        target = toy.engine.store.slice(pages[row // 16], layer)
        target[byte] ^= 1
        assert logprobs(toy, pages) != good
        target[byte] ^= 1
    assert logprobs(toy, pages) == good


def test_missing_swapped_and_foreign_blocks_change_the_text(toy: Sequences) -> None:
    pages, foreign = toy.pages(len(PROMPT)), toy.pages(len(PROMPT))
    toy.prefill(PROMPT, pages)
    toy.prefill(PROMPT[::-1], foreign)
    empty = toy.pages(16)
    good = logprobs(toy, pages)
    for wrong in ((pages[1], pages[0], pages[2]), (foreign[0], *pages[1:]), (*empty, *pages[1:])):
        assert logprobs(toy, wrong) != good


def test_says_its_script_over_prefill_and_decode(toy: Sequences) -> None:
    text = "héllo 😀".encode()
    answers = toy.generate([list(b"<<say:" + text + b">>")], len(text) + 1, chunk=5)
    assert answers == [[*text, 257]]


def test_a_failover_goes_on_with_the_same_text(toy: Sequences) -> None:
    params = SamplingParams(temperature=1.0, seed=77)
    ((*whole,),) = toy.generate([PROMPT], 20, samples=[params])
    ((*rest,),) = toy.generate([PROMPT + whole[:9]], 11, samples=[params])
    assert whole[9:] == rest


def test_a_failing_script_fails_its_sequence_alone(toy: Sequences) -> None:
    bad = list(b"x <<fail>>")
    results = toy.engine.run(
        [
            step("a", 0, PROMPT, toy.pages(60)),
            step("b", 0, bad, toy.pages(16)),
            step("c", 0, PROMPT, toy.pages(60)),
        ]
    )
    assert results[0].tokens == results[2].tokens != ()
    assert "told the toy to fail" in results[1].error


def test_options_set_the_pace_and_not_the_namespace() -> None:
    options = parse_options("toy:step_ms=20,prefill_us=100")
    assert (options.step_s, options.prefill_token_s) == (0.02, 0.0001)
    paced = load_engine(EngineConfig("toy:step_ms=1", kv_bytes=1 << 16), lambda what, fraction: None)
    assert paced.spec == toy_spec()
    paced.close()


@pytest.mark.parametrize("name", ["toys", "toy:speed=1", "toy:step_ms", "toy:step_ms=-1", "toy:step_ms=nan"])
def test_unknown_options_are_refused(name: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_options(name)
    assert refused.value.param == "model"


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(Invalid) as refused:
        ToyEngine(EngineConfig("toy", kv_bytes=100))
    assert refused.value.param == "kv_bytes"


def test_namespaces_differ_by_block_size_and_salt() -> None:
    assert len({toy_spec().namespace, toy_spec(32).namespace, toy_spec(salt="a").namespace}) == 3


def test_the_namespace_is_the_same_in_every_process() -> None:
    code = "from shared.engine.toy.engine import toy_spec; print(toy_spec().namespace.hex())"
    for hash_seed in ("0", "1"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert told.stdout.strip() == toy_spec().namespace.hex()


def test_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from shared.engine.api import EngineConfig\n"
        "from shared.engine.load import load_engine\n"
        "load_engine(EngineConfig('toy', kv_bytes=1 << 16), lambda what, fraction: None).close()\n"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
