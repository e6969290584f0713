"""What every streaming front does: pass on chunks until the end, and notice when a sign of life is due."""

from __future__ import annotations

from collections.abc import AsyncIterator

from services.gateway.api.openai_response_objects import Answer
from services.gateway.api.openai_responses import Answers
from services.gateway.generation.generation import Generation
from services.gateway.generation.metrics.request_metrics import Tracked


async def chunks_of(
    generation: Generation, tracked: Tracked, keep_alive_s: float
) -> AsyncIterator[list[Answer]]:
    """Yields lists of chunks as they come, usage last if wanted, and an empty list after `keep_alive_s` of silence.
    Raises TsukimiError if the generation fails or is left."""
    answers = Answers(generation.request, generation.text)
    while not generation.ended:
        updates = await generation.take(keep_alive_s)
        if any(update.text for update in updates):
            tracked.text_sent()
        yield [chunk for update in updates for chunk in answers.chunks(update)]
    if generation.request.include_usage:
        yield [answers.usage_chunk(generation.usage)]
