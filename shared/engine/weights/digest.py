"""The digest of a model's weights. It is part of the model's namespace, so that KV is shared only between nodes with the
same weights."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.io.models import models_folder
from shared.protocol.errors import Invalid


class DigestFile(Struct, frozen=True):
    """A digest remembered in the cache folder, valid while the files keep their sizes and times."""

    files: tuple[tuple[str, int, int], ...]
    """(name, size, mtime in ns) of every weights file."""
    sha256: str


def weights_files(folder: Path) -> list[Path]:
    """The folder's safetensors files in order of name. Raises Invalid if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Invalid(f"{folder} holds no *.safetensors weights", param="model")
    return files


def weights_digest(folder: Path) -> bytes:
    """SHA-256 over names and contents of the weights files. The first call reads them all; the digest is then cached for
    the folder."""
    files = weights_files(folder)
    stamps = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    remembered = _remembered(folder)
    if remembered is not None and remembered.files == stamps:
        return bytes.fromhex(remembered.sha256)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").digest()
        digest.update(len(file.name).to_bytes(4, "little") + file.name.encode() + content)
    _remember(folder, DigestFile(stamps, digest.hexdigest()))
    return digest.digest()


def digest_path(folder: Path) -> Path:
    name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
    return models_folder() / ".digests" / f"{name}.json"


def _remembered(folder: Path) -> DigestFile | None:
    try:
        return msgspec.json.decode(digest_path(folder).read_bytes(), type=DigestFile)
    except (OSError, msgspec.MsgspecError):
        return None


def _remember(folder: Path, digest: DigestFile) -> None:
    path = digest_path(folder)
    with contextlib.suppress(OSError):  # without the cache, the next call reads the weights again
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(msgspec.json.encode(digest))
        partial.replace(path)
