"""English text of any length, as token ids of the small model."""

from __future__ import annotations

from functools import cache

from tests.support.engine.model import model_folder

TEXT = """
The harvest moon rose late over the valley, and the people of the village carried lanterns to the hill behind the
temple. An old carpenter told the children how the first clock had come to the town: a merchant brought it on a cart,
wrapped in straw, and nobody knew how to wind it. In the archive of the library there is a letter of 1847 that describes
the evening. "We waited," it says, "until the second bell, and then the whole square was silent." Rivers carry sand and
clay to the sea; over thousands of years the sediment becomes stone, and the stone is lifted into mountains. A train that
leaves at nine with a speed of 80 kilometres an hour meets another that left at ten. Bread needs flour, water, salt and
time. Engineers measure twice and cut once; economists estimate, argue, and estimate again. The committee decided, by a
vote of seven to four, to keep the bridge open during the winter. Photosynthesis turns light into sugar, and nearly all
that lives depends on it. She wrote the program in an afternoon and spent the week after removing what it did not need.
"""


@cache
def _ids() -> tuple[int, ...]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    sentences = [s.strip() for s in TEXT.replace("\n", " ").split(".") if s.strip()]
    count = len(sentences)
    order = [sentences[(i * 7 + i // count) % count] for i in range(count * 40)]
    return tuple(tokenizer(". ".join(order), add_special_tokens=False)["input_ids"])


def english_ids(tokens: int, skip: int = 0) -> list[int]:
    """`tokens` ids of English text, starting `skip` tokens into a long text. Prompts with different `skip` share no first
    block."""
    ids = _ids()
    assert skip + tokens <= len(ids), f"only {len(ids)} tokens of text"
    return list(ids[skip : skip + tokens])
