"""There is no media input: whatever might be some is refused, so that two images never get the KV of one."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.api.request import Kind
from services.gateway.api.validate import check_body
from shared.protocol.errors import Invalid
from tests.support.fakes.fake_cluster import memory_cluster

LOOK = {"type": "text", "text": "What is this?"}
URL = {"url": "data:image/png;base64,AAAA"}
IMAGE = {"type": "image_url", "image_url": URL}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
EARLIER = {"role": "user", "content": "hello"}


def asking(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [EARLIER, {"role": "user", "content": content} | more]}


CHATS: list[tuple[dict[str, Any], str]] = [
    (asking([IMAGE]), "messages[1].content[0].type"),
    (asking([LOOK, IMAGE]), "messages[1].content[1].type"),
    (asking([LOOK, LOOK, AUDIO]), "messages[1].content[2].type"),
    (asking([LOOK, {"image_url": URL, "type": "image_url"}]), "messages[1].content[1].type"),
    (asking([{"type": "image_url", "image_url": "not even an object"}]), "messages[1].content[0].type"),
    (asking([{"type": "video_url", "video_url": URL}]), "messages[1].content[0].type"),
    (asking([{"type": "file", "file": {"file_id": "f"}}]), "messages[1].content[0].type"),
    (asking([{"type": "image", "source": {"data": "AAAA"}}]), "messages[1].content[0].type"),
    (asking([LOOK | {"image_url": URL}]), "messages[1].content[0].image_url"),
    (asking([LOOK], images=["AAAA"]), "messages[1].images"),
    (asking("and then?", audio={"id": "audio_1"}), "messages[1].audio"),
    (asking("look") | {"images": ["AAAA"]}, "images"),
    (asking("look") | {"multi_modal_data": {"image": "AAAA"}}, "multi_modal_data"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "look", "image_data": [{"data": "AAAA", "id": 1}]}, "image_data"),
    ({"prompt": "look", "prompt_embeds": "AAAA"}, "prompt_embeds"),
]
ALL: list[tuple[Kind, dict[str, Any], str]] = [("chat", *c) for c in CHATS]
ALL += [("completion", *c) for c in COMPLETIONS]


@pytest.mark.parametrize(("kind", "body", "param"), ALL)
def test_media_are_refused_by_name(kind: Kind, body: dict[str, Any], param: str) -> None:
    with pytest.raises(Invalid) as e:
        check_body(kind, body)
    assert e.value.param == param
    assert e.value.message.startswith(param)


def test_text_in_parts_is_text() -> None:
    nothing = {"image_url": None, "audio": None}
    check_body("chat", asking([LOOK, LOOK | nothing], images=[], audio=None) | {"images": []})


async def test_an_image_is_answered_400_and_reaches_nobody() -> None:
    async with memory_cluster() as cluster:
        for body, param in CHATS:
            for stream in (False, True):
                said = await cluster.http.post("/v1/chat/completions", json=body | {"stream": stream})
                assert said.status_code == 400
                error = said.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert not cluster.conductor.placed
        text = asking([LOOK]) | {"max_tokens": 3}
        assert (await cluster.http.post("/v1/chat/completions", json=text)).status_code == 200
