"""One request being generated: all its choices, behind one outbox, for whichever front asked."""

from __future__ import annotations

import asyncio
from hashlib import blake2b

import msgspec
from msgspec import Struct

from services.gateway.api.answer import Update, Usage
from services.gateway.api.request import GenerateRequest, Prompt
from services.gateway.generation.answer_text import AnswerText
from services.gateway.generation.choice import CancelAttempt, Choice
from services.gateway.generation.node_client import NodeClient
from services.gateway.generation.outbox import Outbox
from services.gateway.generation.stop import StopFinder
from shared.core.kv.block_keys import block_keys
from shared.core.machine import Event
from shared.core.request import events as ev
from shared.core.request.machine import RequestMachine
from shared.io.recorder import Recorder
from shared.protocol.errors import Cancelled, TsukimiError
from shared.protocol.ids import Incarnation, NodeId
from shared.text.text import TextModel


class Owner(Struct, frozen=True):
    """The gateway's life that nodes send this request's tokens to."""

    node: NodeId
    incarnation: Incarnation


class Generation:
    """Owned by one front. `take` gives the news until `ended`; whatever happens, call close (or use Gateway.generate)."""

    def __init__(
        self,
        request: GenerateRequest,
        text: TextModel,
        owner: Owner,
        lifecycle: ev.LifecycleConfig,
        node_client: NodeClient,
        cancel: CancelAttempt,
        buffer_bytes: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.request = request
        self.text = text
        self._outbox = Outbox(request.choices)
        self._buffer_bytes = buffer_bytes
        self._left = ""
        self.choices = [
            Choice(
                i,
                RequestMachine(choice_spec(request, i, owner), lifecycle),
                AnswerText(text.detokenizer(), StopFinder(request.stop), request.stop_token_ids),
                node_client,
                cancel=cancel,
                told=self._told,
                failed=self._failed,
                wants_ids=request.wants_ids,
                recorder=recorder,
            )
            for i in range(request.choices)
        ]

    @property
    def ended(self) -> bool:
        return self._outbox.ended

    @property
    def usage(self) -> Usage:
        """Each prompt counts once. Its cached tokens are those that its first choice found."""
        return Usage(
            sum(p.count for p in self.request.prompts),
            sum(c.completion_tokens for c in self.choices),
            sum(c.cached_tokens for c in self.choices[:: self.request.n]),
        )

    def start(self) -> None:
        self.feed_all(ev.Started())

    def feed_all(self, event: Event) -> None:
        for choice in self.choices:
            if choice.machine.phase != "ended":
                choice.feed(event)

    async def take(self, timeout_s: float) -> list[Update]:
        """What is new, at most one update for each choice; empty at the time-out. Raises TsukimiError if the generation
        failed or was cancelled."""
        return await self._outbox.take(timeout_s)

    def leave(self, reason: str, error: TsukimiError | None = None) -> None:
        """Nobody wants the rest of the answer: free the nodes. `take` raises `error` (default: Cancelled)."""
        if not self._left and not self.ended:
            self._left = reason
            self.feed_all(ev.ClientGone(reason))
            self._outbox.fail(error or Cancelled(reason))

    async def close(self) -> None:
        """Idempotent. Afterwards no node that messages reach works for the request."""
        self.leave("the front ended")
        self._outbox.close()
        await asyncio.gather(*(choice.close() for choice in self.choices))

    def _told(self, update: Update) -> None:
        self._outbox.put(update)
        if self._outbox.size_bytes > self._buffer_bytes:
            self.leave("slow_client", Cancelled("the client reads too slowly"))

    def _failed(self, error: TsukimiError) -> None:
        """A choice that cannot be completed fails the whole request."""
        if error.param == "grammar":
            error = type(error)(
                f"{self.request.grammar_field}: {error.message}", param=self.request.grammar_field
            )
        self._outbox.fail(error)
        self.leave(error.message or error.code, error)


def choice_spec(request: GenerateRequest, index: int, owner: Owner) -> ev.ChoiceSpec:
    prompt: Prompt = request.prompts[index // request.n]
    spec = request.spec
    seed = choice_seed(request.sampling.seed, index % request.n)
    return ev.ChoiceSpec(
        request=request.id,
        choice=index,
        model=spec.name,
        namespace=spec.namespace,
        block_tokens=spec.layout.block_tokens,
        prompt_tokens=prompt.count,
        prompt=prompt.tokens,
        block_keys=tuple(block_keys(spec.namespace, prompt.tokens, spec.layout.block_tokens)),
        max_new_tokens=prompt.max_new_tokens,
        sampling=msgspec.structs.replace(request.sampling, seed=seed),
        gateway=owner.node,
        gateway_incarnation=owner.incarnation,
    )


def choice_seed(seed: int, choice: int) -> int:
    """The first choice of a seeded request equals the answer to the same request with n = 1."""
    if choice == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest(), "little")
