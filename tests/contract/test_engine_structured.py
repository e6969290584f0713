"""Structured output on the toy engine and on the real small model: each answer follows its grammar to the end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from shared.engine.api import Engine, EngineConfig
from shared.engine.load import load_engine
from shared.protocol.sampling import NO_GRAMMAR, NO_TOKEN, Grammar, SamplingParams
from tests.support.engine.sequences import GREEDY, Sequences, step
from tests.support.engine.shapes import Machine, Strict, Town

pytestmark = pytest.mark.timeout(900)

MOST = 160


class Weather(Strict):
    report: Literal["rain", "sun"] | bool
    days: list[Literal["mon", "tue", "wed"]] = Field(max_length=4)


SCHEMAS: list[type[BaseModel]] = [Town, Machine, Weather]


@pytest.fixture(
    scope="module", params=["toy", pytest.param("real", marks=[pytest.mark.real, pytest.mark.slow])]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "real":
        folder = request.getfixturevalue("small_model")
        config = EngineConfig(str(folder), "float32", kv_bytes=1 << 29, threads=1)
    else:
        config = EngineConfig("toy", kv_bytes=4 << 20)
    engine = load_engine(config, lambda what, fraction: None)
    yield engine
    engine.close()


class Talk:
    """Runs an engine until its answers end."""

    def __init__(self, engine: Engine) -> None:
        self.run = Sequences(engine)
        self.ends = set(engine.spec.eos_token_ids)
        self._tokenizer: Any = None
        if engine.spec.path != "toy":
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(f"{engine.spec.path}/tokenizer.json")

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids) if self._tokenizer else list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer:
            return str(self._tokenizer.decode(list(tokens)))
        return bytes(t for t in tokens if t < 256).decode()

    def answers(
        self, text: str, samples: Sequence[SamplingParams], most: int = MOST, forget_at: int = -1
    ) -> list[list[int]]:
        """One answer per sampling, all in one batch. From token `forget_at` on, the attempts have new names, as on a node
        that has not seen them before."""
        prompt = self.encode(text)
        tables = [self.run.pages(len(prompt) + most) for _ in samples]
        answers: list[list[int]] = [[] for _ in samples]
        for i in range(most):
            going = [k for k, said in enumerate(answers) if not self.ends & set(said)]
            if not going:
                break
            name = "again" if 0 <= forget_at <= i else "first"
            batch = [
                step(
                    f"{name}/{self.run.attempt(tables[k])}",
                    len(prompt) + i - 1 if i else 0,
                    answers[k][-1:] if i else prompt,
                    tables[k],
                    samples[k],
                    prompt,
                    answers[k],
                )
                for k in going
            ]
            for k, result in zip(going, self.run.engine.run(batch), strict=True):
                assert not result.error, result.error
                answers[k] += result.tokens
        return answers


@pytest.fixture
def talk(engine: Engine) -> Talk:
    return Talk(engine)


def held(engine: Engine, kind: Any, text: str = "", **more: Any) -> SamplingParams:
    params = {"temperature": 0.0, "eos_token_ids": engine.spec.eos_token_ids} | more
    return SamplingParams(grammar=Grammar(kind, text), **params)


def schema(model: type[BaseModel]) -> str:
    return json.dumps(model.model_json_schema())


@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "seeded"])
def test_answers_follow_their_schemas_to_the_end(talk: Talk, engine: Engine, more: dict[str, Any]) -> None:
    samples = [held(engine, "json_schema", schema(model), **more) for model in SCHEMAS]
    for model, said in zip(SCHEMAS, talk.answers("Say it in JSON: ", samples), strict=True):
        assert said[-1] in talk.ends
        model.model_validate_json(talk.decode(said[:-1]))


def test_expressions_and_choices_are_met_whole(talk: Talk, engine: Engine) -> None:
    samples = [
        held(engine, "regex", r"\d{3}-\d{4}"),
        held(engine, "choice", '["maybe", "never"]'),
        held(engine, "grammar", 'start: "<" ("a" | "b")~3 ">"', temperature=1.0, seed=3),
    ]
    number, word, marked = (talk.decode(said[:-1]) for said in talk.answers("The number is ", samples))
    assert re.fullmatch(r"\d{3}-\d{4}", number)
    assert word in ("maybe", "never")
    assert re.fullmatch("<[ab]{3}>", marked)


def test_a_state_made_anew_from_the_tokens_goes_on_the_same(talk: Talk, engine: Engine) -> None:
    sample = held(engine, "json_schema", schema(Town), temperature=0.9, seed=5)
    (undisturbed,) = talk.answers("A town: ", [sample])
    for forget_at in (1, 7, len(undisturbed) - 1):
        assert talk.answers("A town: ", [sample], forget_at=forget_at) == [undisturbed]


def test_neighbours_change_no_token(talk: Talk, engine: Engine) -> None:
    """Holds for greedy and seeded sampling, with and without a grammar."""
    samples = [
        held(engine, "json_schema", schema(Town)),
        GREEDY,
        held(engine, "json_schema", schema(Weather), temperature=0.9, seed=2),
        SamplingParams(
            temperature=0.9, seed=4, frequency_penalty=0.5, min_tokens=3, eos_token_ids=tuple(talk.ends)
        ),
    ]
    together = talk.answers("Once upon a time ", samples, most=30)
    assert [talk.answers("Once upon a time ", [sample], most=30)[0] for sample in samples] == together


def test_an_impossible_grammar_fails_alone(talk: Talk, engine: Engine) -> None:
    prompt = talk.encode("The end of the road")
    bad = [("regex", "a("), ("json_schema", '{"$ref": "#"}'), ("choice", '["x"]')]
    steps = []
    for i, (kind, text) in enumerate(bad):
        sample = held(engine, kind, text)
        said = talk.encode("y") if kind == "choice" else []  # an answer that breaks the grammar
        steps.append(step(f"bad{i}", 0, prompt, talk.run.pages(len(prompt)), sample, prompt, said))
    steps.append(step("good", 0, prompt, talk.run.pages(len(prompt)), GREEDY))
    *failed, good = engine.run(steps)
    assert all(result.error and not result.tokens for result in failed)
    assert good.tokens == talk.run.prefill(prompt, talk.run.pages(len(prompt))).tokens


def test_who_leaves_no_token_is_told_so_and_fails_alone(talk: Talk, engine: Engine) -> None:
    prompt = talk.encode("The end of the road")
    starts = {talk.encode(start)[0] for start in ("y", "ye", "yes")}
    bias = tuple((id_, -100.0) for id_ in starts)
    pages = [talk.run.pages(len(prompt)) for _ in range(4)]
    none_left = step("none", 0, prompt, pages[0], held(engine, "choice", '["yes"]', logit_bias=bias), prompt)
    off = step("off", 0, prompt, pages[1], held(engine, "regex", "a("), prompt)
    none, wrong, good = engine.run([none_left, off, step("good", 0, prompt, pages[2], GREEDY)])
    assert (none.error, none.tokens) == (NO_TOKEN, ())
    assert wrong.error.startswith(NO_GRAMMAR)
    assert good.tokens == talk.run.prefill(prompt, pages[3]).tokens
