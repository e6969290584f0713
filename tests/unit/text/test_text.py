"""The languages: prompts to ids and back, for the toy and for a small tokenizer made here (and the real one)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shared.io.models import DEFAULT_MODEL, resolve_model
from shared.protocol.errors import Invalid
from shared.text.chat_template import ChatTemplate
from shared.text.text import SamplingDefaults
from shared.text.tokenizer_text import TokenizerText
from shared.text.toy_text import ROLE, ToyText

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m['role'] == 'clown' %}{{ raise_exception('no clowns') }}{% endif %}
[{{ m['role'] }}]{{ m['content'] + '' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model folder whose tokenizer adds a BOS by itself."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(["the moon over the sea, 漢字 and 😀"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def text(folder: Path) -> TokenizerText:
    return TokenizerText(folder)


def test_a_chat_prompt_has_one_bos(text: TokenizerText) -> None:
    bos = text.encode("")[0]
    assert text.encode("hello").count(bos) == 1
    ids = text.render([{"role": "user", "content": "hello"}], {})
    assert ids.count(bos) == 1


def test_what_the_template_refuses_is_the_clients_error(text: TokenizerText) -> None:
    with pytest.raises(Invalid, match="no clowns") as e:
        text.render([{"role": "clown", "content": "x"}], {})
    assert e.value.param == "messages"
    with pytest.raises(Invalid, match="chat template"):
        text.render([{"role": "user"}], {"bos_token": None})


def test_any_tokens_decode_in_pieces_as_at_once(text: TokenizerText, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(12))]
        d = text.detokenizer()
        assert "".join([*map(d.push, ids), d.finish()]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_tokens_on_their_own(text: TokenizerText) -> None:
    mark = text.encode("")[0]
    assert text.token_text(mark).text == "<s>"
    assert text.token_text(mark).bytes is None
    first = text.encode("😀")[1]
    assert text.token_text(first).bytes is not None


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"tokenizer\.json"):
        TokenizerText(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Invalid, match="no tokenizer"):
        TokenizerText(tmp_path)


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(Invalid, match="chat template can't be used"):
        ChatTemplate("{% for %}", {})


def test_the_toy_speaks_bytes() -> None:
    toy = ToyText()
    ids = toy.render([{"role": "user", "content": "hé"}], {})
    assert ids == [ROLE, *"user\nhé".encode(), ROLE, *b"assistant\n"]
    d = toy.detokenizer()
    assert "".join(d.push(i) for i in toy.encode("hé")) == "hé"
    assert toy.token_text(257).text == "<eos>"


@pytest.mark.real
def test_the_real_model_decodes_in_pieces_as_at_once() -> None:
    try:
        folder = Path(resolve_model(DEFAULT_MODEL).path)
    except Invalid as e:
        pytest.skip(f"the real model is not here: {e}")
    text, tokenizer = TokenizerText(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(2)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(12)]
        d = text.detokenizer()
        assert "".join([*map(d.push, ids), d.finish()]) == tokenizer.decode(ids, skip_special_tokens=True)
    rendered = text.render([{"role": "user", "content": "The capital of France?"}], {})
    assert tokenizer.decode(rendered, skip_special_tokens=False).startswith("<|im_start|>system\n")


def test_the_models_own_sampling_defaults_are_known(
    folder: Path, tmp_path: Path, text: TokenizerText
) -> None:
    assert text.sampling == SamplingDefaults()
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_k": null, "eos_token_id": 2}')
    assert TokenizerText(tmp_path).sampling == SamplingDefaults(temperature=0.2)
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(Invalid, match="top_p"):
        TokenizerText(tmp_path)
