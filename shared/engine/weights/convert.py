"""Converts a GGUF file of llama architecture to a bfloat16 folder in Hugging Face format: config, tokenizer, chat
template and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader, ReaderField, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shared.protocol.errors import Invalid

hf: Any = transformers
"""Typed as Any, since the annotations of transformers differ from version to version."""

_CONTROL_TOKEN = 3
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""What the model's card recommends. The GGUF file does not contain it."""


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` into `folder`, which must exist. Raises Invalid for another architecture."""
    reader = GGUFReader(gguf)
    architecture = _text(reader.fields["general.architecture"])
    if architecture != "llama":
        raise Invalid(f"{gguf.name} holds a {architecture} model; only llama can be converted")
    config = _config(reader.fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _tokenizer(reader.fields, config).save_pretrained(folder)
    with torch.device("meta"):  # the weights are assigned below: do not allocate or initialize them here
        model = hf.LlamaForCausalLM(config)
    model.load_state_dict(_weights(reader, config), strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    model.generation_config = hf.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id,
        do_sample=True, **SAMPLING,
    )  # fmt: skip
    hf.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def _config(fields: dict[str, ReaderField], *, tied: bool) -> Any:
    def number(name: str) -> Any:
        return fields[f"llama.{name}"].parts[-1][0].item()

    def token(name: str) -> int:
        return int(fields[f"tokenizer.ggml.{name}_token_id"].parts[-1][0])

    hidden, heads = number("embedding_length"), number("attention.head_count")
    return hf.LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"].data),
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": number("rope.freq_base")},
        bos_token_id=token("bos"),
        eos_token_id=token("eos"),
        pad_token_id=token("padding"),
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def _weights(reader: GGUFReader, config: Any) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in reader.tensors:
        layer, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        name = f"model.layers.{layer[len('blk.') :]}.{_TENSORS[kind]}" if layer else _TENSORS[kind]
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind == "attn_q":
            values = _half_split_rope(values, config.num_attention_heads)
        if kind == "attn_k":
            values = _half_split_rope(values, config.num_key_value_heads)
        weights[f"{name}.weight"] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    return weights


def _half_split_rope(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder a weight's rows for RoPE: GGUF interleaves the rotated pairs of each head, transformers expects halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, ReaderField], config: Any) -> Any:
    tokens = _texts(fields["tokenizer.ggml.tokens"])
    kinds = [
        int(fields["tokenizer.ggml.token_type"].parts[i][0]) for i in fields["tokenizer.ggml.token_type"].data
    ]
    merges = [
        (pair[0], pair[2])
        for pair in (text.partition(" ") for text in _texts(fields["tokenizer.ggml.merges"]))
    ]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # The GGUF file only names its pre-tokenizer. This is the one it means: it gives the same ids as the original.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    unknown = int(fields["tokenizer.ggml.unknown_token_id"].parts[-1][0])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[config.bos_token_id],
        eos_token=tokens[config.eos_token_id],
        pad_token=tokens[config.pad_token_id],
        unk_token=tokens[unknown],
        chat_template=_text(fields["tokenizer.chat_template"]),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def _text(field: ReaderField) -> str:
    return _texts(field)[0]


def _texts(field: ReaderField) -> list[str]:
    return [bytes(field.parts[i]).decode() for i in field.data]
