"""Bodies: what is taken, and what is refused with the name of the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.api.body import parse_object
from services.gateway.api.errors import ContextExceeded
from services.gateway.api.request import GenerateRequest
from services.gateway.api.validate import check_body, complete
from shared.core.kv.block_keys import unpack_tokens
from shared.engine.toy.engine import toy_spec
from shared.protocol.errors import Invalid
from shared.protocol.sampling import SamplingParams
from shared.text.text import SamplingDefaults
from shared.text.toy_text import EOS, ToyText

SPEC = msgspec.structs.replace(toy_spec(), context_tokens=1000)
HELLO = [{"role": "user", "content": "hello"}]
FRESH_SEED = 77


def chat(**more: Any) -> GenerateRequest:
    body = {"model": "toy", "messages": HELLO} | more
    return complete(check_body("chat", body), SPEC, ToyText(), "r", FRESH_SEED, 0, 1 << 20)


def completion(**more: Any) -> GenerateRequest:
    body = {"model": "toy", "prompt": "hello"} | more
    return complete(check_body("completion", body), SPEC, ToyText(), "r", FRESH_SEED, 0, 1 << 20)


def refused(call: Any, **body: Any) -> Invalid:
    with pytest.raises(Invalid) as e:
        call(**body)
    return e.value


# -- taken -----------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    r = chat()
    assert (r.n, r.stop, r.stream, r.include_usage) == (1, (), False, False)
    assert (r.sampling.temperature, r.sampling.top_p, r.sampling.top_k, r.sampling.seed) == (
        1.0,
        1.0,
        0,
        FRESH_SEED,
    )
    assert r.sampling.top_logprobs is None
    assert r.prompts[0].max_new_tokens == 1000 - r.prompts[0].count
    assert completion().prompts[0].max_new_tokens == 16


def test_what_a_request_leaves_open_the_model_decides() -> None:
    text = ToyText()
    text.sampling = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40)

    def sampling(**more: Any) -> SamplingParams:
        body = {"model": "toy", "messages": HELLO} | more
        return complete(check_body("chat", body), SPEC, text, "r", FRESH_SEED, 0, 1 << 20).sampling

    assert (sampling().temperature, sampling().top_p, sampling().top_k) == (0.2, 0.9, 40)
    said = sampling(temperature=1, top_p=1, top_k=0)
    assert (said.temperature, said.top_p, said.top_k) == (1.0, 1.0, 0)


def test_nulls_are_absent() -> None:
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "stream",
        "stream_options",
        "seed",
        "max_tokens",
        "logprobs",
    ]
    assert chat(**dict.fromkeys([*names, "tools", "logit_bias", "response_format"])) == chat()


def test_unknown_and_neutral_fields_are_ignored() -> None:
    neutral = {"presence_penalty": 0, "logit_bias": {}, "tools": [], "response_format": {"type": "text"}}
    assert chat(user="me", metadata={"a": 1}, no_such_field=3, **neutral) == chat()


def test_all_forms_of_a_prompt() -> None:
    forms: list[tuple[Any, list[list[int]]]] = [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98]], [[97], [98]]),
    ]
    for prompt, ids in forms:
        assert [unpack_tokens(p.tokens) for p in completion(prompt=prompt).prompts] == ids


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert chat(messages=[{"role": "user", "content": parts}]) == chat()


def test_both_names_of_max_tokens() -> None:
    assert chat(max_tokens=5).prompts[0].max_new_tokens == 5
    assert chat(max_completion_tokens=6, max_tokens=5).prompts[0].max_new_tokens == 6


def test_a_negative_seed_is_a_seed() -> None:
    assert chat(seed=-1).sampling.seed == (1 << 64) - 1


def test_the_answer_is_not_longer_than_any_node_has_room_for() -> None:
    checked = check_body("chat", {"model": "toy", "messages": HELLO})
    request = complete(checked, SPEC, ToyText(), "r", 0, 0, most_tokens=100)
    assert request.prompts[0].count + request.prompts[0].max_new_tokens == 100


def test_what_no_node_can_ever_hold_is_refused() -> None:
    checked = check_body("completion", {"model": "toy", "prompt": "abc", "max_tokens": 98})
    with pytest.raises(
        ContextExceeded, match=r"3 prompt tokens and 98 .* 100 tokens that a node has room for"
    ) as e:
        complete(checked, SPEC, ToyText(), "r", 0, 0, most_tokens=100)
    assert e.value.param == "max_tokens"


def test_how_tokens_are_drawn() -> None:
    s = completion(
        min_p=0.1, repetition_penalty=1.2, presence_penalty=-2, frequency_penalty=2, logit_bias={"5": -100, "319": 3},
        min_tokens=4,
    ).sampling  # fmt: skip
    assert (s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (0.1, 1.2, -2.0, 2.0)
    assert s.logit_bias == ((5, -100.0), (319, 3.0))
    assert s.min_tokens == 4
    assert s.looks_back


def test_tokens_that_a_client_names_end_the_answer_as_the_model_s_own_do() -> None:
    def ends(**more: Any) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
        request = completion(**more)
        return request.sampling.eos_token_ids, request.sampling.ignore_eos, request.stop_token_ids

    assert ends() == ((EOS,), False, ())
    assert ends(stop_token_ids=[9, 7, 9]) == ((EOS, 9, 7), False, (9, 7))
    assert ends(stop_token_ids=[9], ignore_eos=True) == ((9,), False, (9,))
    assert ends(ignore_eos=True) == ((EOS,), True, ())


def test_the_makers_penalties_are_defaults_too() -> None:
    text = ToyText()
    text.sampling = SamplingDefaults(min_p=0.05, repetition_penalty=1.1)
    body = {"model": "toy", "messages": HELLO}
    said = complete(check_body("chat", body), SPEC, text, "r", FRESH_SEED, 0, 1 << 20).sampling
    assert (said.min_p, said.repetition_penalty) == (0.05, 1.1)


# -- refused ---------------------------------------------------------------------------------------------------------

EITHER: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"model": ""}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0.5}, "max_tokens"),
    ({"max_tokens": 1e18}, "max_tokens"),
    ({"max_tokens": 10**18}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 9999999}, "top_k"),
    ({"seed": "a"}, "seed"),
    ({"seed": 1 << 64}, "seed"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 3}, "best_of"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": "much"}, "repetition_penalty"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"logit_bias": {"320": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": True}}, "logit_bias"),
    ({"logit_bias": {"5": None}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"stop_token_ids": [320], "min_tokens": 3}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [5] * 257}, "stop_token_ids"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True}, "echo"),
    ({"ignore_eos": "no"}, "ignore_eos"),
]

CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "king", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 2 * 10**9}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]

COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"prompt": "x" * 1001}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 2 * 10**9}, "logprobs"),
]


@pytest.mark.parametrize(("body", "param"), EITHER)
@pytest.mark.parametrize("call", [chat, completion])
def test_a_bad_value_is_refused_by_name(call: Any, body: dict[str, Any], param: str) -> None:
    assert refused(call, **body).param == param


@pytest.mark.parametrize(("body", "param"), CHAT)
def test_bad_messages_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refused(chat, **body).param == param


@pytest.mark.parametrize(("body", "param"), COMPLETION)
def test_bad_prompts_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refused(completion, **body).param == param


def test_missing_fields_are_named() -> None:
    for kind, field in (("chat", "messages"), ("completion", "prompt")):
        with pytest.raises(Invalid) as e:
            check_body(kind, {"model": "toy"})  # type: ignore[arg-type]
        assert e.value.param == field


def test_an_answer_that_does_not_fit_names_both_sizes() -> None:
    error = refused(chat, max_tokens=999)
    assert isinstance(error, ContextExceeded)
    assert "999" in error.message
    assert "1000" in error.message


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b'"x"', None),
        (b"null", None),
        (b'{"a":"\xff"}', None),
        (b"[" * 100_000, None),
        (b'{"messages":[{"content":"\\ud800"}]}', "messages[0].content"),
        (b'{"stop":"a\\udfffb"}', "stop"),
        (b'{"stop":["ok","\\ud800\\ud800"]}', "stop[1]"),
        (b'{"temperature":NaN}', "temperature"),
        (b'{"temperature":Infinity}', "temperature"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(data: bytes, param: str | None) -> None:
    with pytest.raises(Invalid) as e:
        parse_object(data)
    assert e.value.param == param


def test_of_a_repeated_key_the_last_counts() -> None:
    assert parse_object(b'{"a":1,"a":2}') == {"a": 2}
