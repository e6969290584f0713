"""Tokens that end an answer by the client's wish: told as tokens, not as text."""

from __future__ import annotations

from services.gateway.api.answer import Update
from services.gateway.generation.answer_text import AnswerText
from services.gateway.generation.stop import StopFinder
from shared.protocol.sampling import TokenLogprob
from shared.text.toy_text import ToyText


def test_the_text_excludes_the_token_that_ended_it() -> None:
    text = AnswerText(ToyText().detokenizer(), StopFinder(["zz"]), (ord("."),))
    update = Update(0)
    for token in b"az.":
        text.push(token, TokenLogprob(-1.0), update)
    text.finish(update)
    assert update.text == "az"
    assert [(e.token, e.text_offset) for e in update.entries] == [(97, 0), (122, 1), (46, 2)]
    assert not text.stopped
