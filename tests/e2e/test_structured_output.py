"""An answer looks as an OpenAI client asked it to look, whatever dies meanwhile."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.support.engine.shapes import Machine, Strict, Town
from tests.support.processes.launched import Launched, launched

REAL = pytest.param("smollm2-135m", marks=[pytest.mark.real, pytest.mark.slow])
MESSAGES: Any = [{"role": "user", "content": "Describe it in JSON."}]


@pytest.fixture(scope="module", params=["toy:step_ms=20", REAL])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    flags = ["--model", request.param, "--decode", "2", "--kv-memory", "128M", "--pool-memory", "64M"]
    flags += ["--set", "conductor.inline_tokens=0"]  # every prompt goes by a prefill node
    if not request.param.startswith("toy"):
        flags += ["--dtype", "float32"]
    with launched(tmp_path_factory.mktemp("structured") / "run", *flags) as running:
        yield running


@pytest.fixture
def client(cluster: Launched) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def model(cluster: Launched) -> str:
    return next(str(n["model"]) for n in cluster.status()["nodes"] if n["role"] == "decode")


class Plan(Strict):
    """Long enough for something to happen meanwhile."""

    days: list[Literal["monday", "tuesday", "wednesday"]] = Field(min_length=12, max_length=12)


ENDLESS: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}


def schema_of(shape: type[BaseModel]) -> Any:
    named = {"name": shape.__name__, "schema": shape.model_json_schema(), "strict": True}
    return {"type": "json_schema", "json_schema": named}


@pytest.mark.parametrize("shape", [Town, Machine, Plan])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_follows_its_schema(
    client: AsyncOpenAI, model: str, shape: type[BaseModel], stream: bool
) -> None:
    options: Any = {"temperature": 0.7, "seed": 5, "max_tokens": 400, "response_format": schema_of(shape)}
    if stream:
        text, finish = await streamed(client, model, **options)
    else:
        answer = await client.chat.completions.create(model=model, messages=MESSAGES, **options)
        text, finish = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    shape.model_validate_json(text)
    assert finish == "stop"


async def streamed(
    client: AsyncOpenAI, model: str, then: Callable[[], Awaitable[None]] | None = None, **options: Any
) -> tuple[str, str | None]:
    """Text and finish of a stream; `then` happens while it runs."""
    text, finish = "", None
    stream = await client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **options)
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
        if then is not None and len(text) > 20:
            assert finish is None
            await then()
            then = None
    assert then is None
    return text, finish


async def test_the_extensions_and_other_fields_of_sampling(client: AsyncOpenAI, model: str) -> None:
    async def ask(**extra: Any) -> Any:
        names = ("frequency_penalty", "presence_penalty", "logit_bias", "response_format")
        known = {name: extra.pop(name) for name in names if name in extra}
        answer = await client.completions.create(
            model=model,
            prompt="Say",
            max_tokens=40,
            temperature=0,
            extra_body=extra | {"return_token_ids": True},
            **known,
        )
        return answer.choices[0]

    assert re.fullmatch(r"\d{3}-\d{4}", (await ask(guided_regex=r"\d{3}-\d{4}")).text)
    assert (await ask(guided_choice=["maybe", "never"])).text in ("maybe", "never")
    assert (await ask(structured_outputs={"choice": ["so", "so be it"]})).text in ("so", "so be it")
    plain = await ask()
    assert (await ask(logit_bias={"99": 100})).token_ids == [99] * 40
    assert (await ask(frequency_penalty=2.0, presence_penalty=2.0)).token_ids != plain.token_ids
    assert (await ask(repetition_penalty=3.0, min_p=0.1)).token_ids != plain.token_ids
    stop = plain.token_ids[4]
    first = plain.token_ids.index(stop)
    stopped = await ask(stop_token_ids=[stop])
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", plain.token_ids[: first + 1])
    assert plain.text.startswith(stopped.text)
    assert len(stopped.text) < len(plain.text)
    later = await ask(stop_token_ids=[stop], min_tokens=20)
    assert len(later.token_ids) >= 20
    assert stop not in later.token_ids[:20]


async def test_an_answer_cut_short_says_so(client: AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=5, temperature=0, response_format=schema_of(Plan)
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": ENDLESS}, "response_format"),
        ({"guided_regex": "a("}, "guided_regex"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ],
)  # fmt: skip
async def test_what_can_not_be_made_is_a_400(client: AsyncOpenAI, model: str, body: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        await client.chat.completions.create(model=model, messages=MESSAGES, extra_body=body)
    assert e.value.param == param


async def test_a_decode_node_killed_mid_answer_changes_nothing(
    cluster: Launched, client: AsyncOpenAI, model: str
) -> None:
    """The state of the grammar and of the penalties is made anew from the tokens by whoever goes on."""
    options: Any = {"temperature": 0.8, "seed": 9, "max_tokens": 400, "response_format": schema_of(Plan)}
    options |= {"frequency_penalty": 0.2, "extra_body": {"repetition_penalty": 1.05}}
    undisturbed = await streamed(client, model, **options)
    Plan.model_validate_json(undisturbed[0])

    async def kill_the_busy() -> None:
        status = await asyncio.to_thread(cluster.status)
        busy = [n["node"] for n in status["nodes"] if n["role"] == "decode" and n["running"]]
        assert len(busy) == 1
        cluster.signal(busy[0], signal.SIGKILL)

    assert await streamed(client, model, kill_the_busy, **options) == undisturbed
    cluster.wait_ready()
