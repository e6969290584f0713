"""From updates to OpenAI objects: chunks of a stream, or one whole answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET, UnsetType

from services.gateway.api import openai_response_objects as shapes
from services.gateway.api.answer import TokenEntry, Update, Usage
from services.gateway.api.request import GenerateRequest
from shared.core.kv.block_keys import unpack_tokens
from shared.text.text import TextModel


class Answers:
    """Builds the objects of one request. Remembers only which choices have had their first chunk."""

    def __init__(self, request: GenerateRequest, text: TextModel) -> None:
        self._request = request
        self._text = text
        self._chat = request.kind == "chat"
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self._id = prefix + request.id.replace("-", "")
        self._fingerprint = "fp_" + request.spec.namespace.hex()[:10]
        self._greeted: set[int] = set()
        self._usage_field: UnsetType | None = None if request.include_usage else UNSET

    # -- streams -----------------------------------------------------------------------------------------------------

    def chunks(self, update: Update) -> list[shapes.Answer]:
        """The role (chats only), the text and the end are separate chunks."""
        choices: list[Any] = []
        build = self._chat_chunk if self._chat else self._completion_choice
        if self._chat and update.choice not in self._greeted:
            self._greeted.add(update.choice)
            choices.append(shapes.ChunkChoice(update.choice, shapes.Delta(role="assistant", content="")))
        if update.text or update.entries or update.ids:
            choices.append(build(update, None))
        if update.finish:
            choices.append(build(Update(update.choice), update.finish))
        return [self._chunk([choice], self._usage_field) for choice in choices]

    def usage_chunk(self, usage: Usage) -> shapes.Answer:
        return self._chunk([], usage_object(usage))

    def _chunk(self, choices: list[Any], usage: shapes.UsageObject | UnsetType | None) -> shapes.Answer:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._answer(kind, choices, usage)

    def _chat_chunk(self, update: Update, finish: str | None) -> shapes.ChunkChoice:
        delta = shapes.Delta() if finish else shapes.Delta(content=update.text)
        logprobs = self._chat_logprobs(update.entries)
        return shapes.ChunkChoice(update.choice, delta, logprobs, finish, self._ids(update))

    # -- whole answers -----------------------------------------------------------------------------------------------

    def whole(self, updates: Iterable[Update], usage: Usage) -> shapes.Answer:
        """`updates`: one per choice, each complete."""
        ordered = sorted(updates, key=lambda u: u.choice)
        if not self._chat:
            choices: list[Any] = [self._completion_choice(u, u.finish, whole=True) for u in ordered]
            return self._answer("text_completion", choices, usage_object(usage))
        prompt = self._prompt_ids(0)
        choices = [self._chat_choice(u) for u in ordered]
        return self._answer("chat.completion", choices, usage_object(usage), prompt)

    def _chat_choice(self, update: Update) -> shapes.ChatChoice:
        message = shapes.AssistantMessage(update.text)
        logprobs = self._chat_logprobs(update.entries)
        return shapes.ChatChoice(update.choice, message, logprobs, update.finish or "stop", self._ids(update))

    # -- both --------------------------------------------------------------------------------------------------------

    def _completion_choice(
        self, update: Update, finish: str | None, whole: bool = False
    ) -> shapes.CompletionChoice:
        logprobs = self._completion_logprobs(update.entries)
        prompt = self._prompt_ids(update.choice) if whole else UNSET
        return shapes.CompletionChoice(
            update.choice, update.text, logprobs, finish, self._ids(update), prompt
        )

    def _ids(self, update: Update) -> list[int] | UnsetType:
        return update.ids if self._request.wants_ids else UNSET

    def _prompt_ids(self, choice: int) -> list[int] | UnsetType:
        prompt = self._request.prompts[choice // self._request.n]
        return unpack_tokens(prompt.tokens) if self._request.wants_ids else UNSET

    def _answer(
        self,
        kind: str,
        choices: list[Any],
        usage: shapes.UsageObject | UnsetType | None,
        prompt: list[int] | UnsetType = UNSET,
    ) -> shapes.Answer:
        r = self._request
        return shapes.Answer(
            self._id, kind, r.created, r.spec.name, self._fingerprint, choices, usage, prompt
        )

    # -- logprobs ----------------------------------------------------------------------------------------------------

    def _chat_logprobs(self, entries: list[TokenEntry]) -> shapes.ChatLogprobs | None:
        return shapes.ChatLogprobs([self._chat_logprob(e) for e in entries]) if entries else None

    def _chat_logprob(self, entry: TokenEntry) -> shapes.ChatLogprob:
        top = [shapes.TopLogprob(t.text, lp, t.bytes) for t, lp in self._top(entry)]
        token = self._text.token_text(entry.token)
        return shapes.ChatLogprob(token.text, entry.logprob.logprob, token.bytes, top)

    def _completion_logprobs(self, entries: list[TokenEntry]) -> shapes.CompletionLogprobs | None:
        if not entries:
            return None
        wants_top = bool(self._request.sampling.top_logprobs)
        return shapes.CompletionLogprobs(
            tokens=[self._text.token_text(e.token).text for e in entries],
            token_logprobs=[e.logprob.logprob for e in entries],
            top_logprobs=[self._top_by_text(e) for e in entries] if wants_top else None,
            text_offset=[e.text_offset for e in entries],
        )

    def _top_by_text(self, entry: TokenEntry) -> dict[str, float]:
        """The likeliest tokens, and the sampled one even if it is not among them."""
        top = {
            token.text: logprob for token, logprob in reversed(self._top(entry))
        }  # of two equal texts, the likelier
        return top | {self._text.token_text(entry.token).text: entry.logprob.logprob}

    def _top(self, entry: TokenEntry) -> list[tuple[Any, float]]:
        return [(self._text.token_text(token), logprob) for token, logprob in entry.logprob.top]


def usage_object(usage: Usage) -> shapes.UsageObject:
    return shapes.UsageObject(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        shapes.PromptDetails(usage.cached_tokens),
    )


def merge(updates: Iterable[Update], into: dict[int, Update]) -> None:
    """Merge the updates of a stream into one for each choice."""
    for update in updates:
        known = into.setdefault(update.choice, Update(update.choice))
        known.text += update.text
        known.entries += update.entries
        known.ids += update.ids
        known.finish = update.finish or known.finish
