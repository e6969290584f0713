"""The rules of the house, kept by reading the imports.

protocol <- core <- io <- dataplane <- engine <- services          tsukimi: protocol, core, io only
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.imports import REPOSITORY, environment_reads, imports, imports_package, sources

LAYERS = ("shared.protocol", "shared.core", "shared.io", "shared.dataplane", "shared.engine", "services")
SERVICES = ("gateway", "conductor", "prefill", "decode", "cache_node")
PRODUCT = sources("shared", "services", "tsukimi")
IMPURE = (
    "aiofiles", "asyncio", "concurrent", "datetime", "logging", "multiprocessing", "os", "pathlib", "random", "secrets",
    "select", "shutil", "signal", "socket", "structlog", "subprocess", "tempfile", "threading", "time", "uuid",
)  # fmt: skip
MOST_LINES = 400


def under(source: Path, *folders: str) -> bool:
    return any(source.is_relative_to(folder) for folder in folders)


def offenders(package: str, allowed: set[str]) -> list[str]:
    """Files that import the package and may not. `allowed` are globs."""
    using = [source for source in PRODUCT if imports_package(source, package)]
    return [str(source) for source in using if not any(source.match(pattern) for pattern in allowed)]


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_imports_only_from_those_before_it(layer: str) -> None:
    later = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = [
        f"{source} imports {name}"
        for source in sources(layer.replace(".", "/"))
        for name in imports(source)
        for other in (*later, "tsukimi", "tests")
        if name == other or name.startswith(f"{other}.")
    ]
    assert not wrong


@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_services(service: str) -> None:
    others = [f"services.{name}" for name in SERVICES if name != service]
    wrong = [
        f"{source} imports {other}"
        for source in sources(f"services/{service}")
        for other in others
        if imports_package(source, other)
    ]
    assert not wrong


def test_the_toolbox_starts_services_only_as_processes() -> None:
    allowed = ("shared.protocol", "shared.core", "shared.io")
    wrong = [
        f"{source} imports {name}"
        for source in sources("tsukimi")
        for name in imports(source)
        if name.split(".")[0] in ("shared", "services", "tests") and name != "shared"
        if not name.startswith(allowed)
    ]
    assert not wrong


def test_torch_only_in_the_engine() -> None:
    assert not offenders("torch", {"shared/engine/*.py", "shared/engine/*/*.py"})
    names = ("api", "draw", "grammar", "toy", "toy_choice", "toy_text")
    torch_free = [f"shared/engine/{name}.py" for name in names]
    assert not [source for source in torch_free if imports_package(Path(source), "torch")]


def test_transformers_only_in_the_engine_and_the_gateway_s_text() -> None:
    allowed = {"shared/engine/*.py", "shared/engine/*/*.py", "services/gateway/*text*.py"}
    assert not offenders("transformers", allowed) + offenders("tokenizers", allowed)


def test_nats_only_in_the_nats_bus() -> None:
    assert not offenders("nats", {"shared/io/nats_bus.py", "shared/io/nats_errors.py"})


def test_core_and_protocol_are_pure() -> None:
    wrong = [
        f"{source} imports {name}"
        for source in sources("shared/core", "shared/protocol")
        for name in imports(source)
        if name.split(".")[0] in IMPURE
    ]
    assert wrong in (
        [],
        ["shared/protocol/ids.py imports uuid"],
    )  # ids are minted there, for the layers above core


def test_only_config_reads_the_environment() -> None:
    wrong = [f"{source}:{line}" for source in PRODUCT for line in environment_reads(source)]
    assert not [where for where in wrong if not where.startswith("shared/io/config.py:")]


def test_every_folder_is_a_package() -> None:
    packages = {source.parent for source in PRODUCT}
    assert not [str(package) for package in packages if not (REPOSITORY / package / "__init__.py").exists()]


@pytest.mark.parametrize("folder", ["shared", "services", "tsukimi", "tests"])
def test_no_file_is_longer_than_one_thought(folder: str) -> None:
    lengths = {source: len((REPOSITORY / source).read_text().splitlines()) for source in sources(folder)}
    assert not {str(source): length for source, length in lengths.items() if length > MOST_LINES}


@pytest.mark.parametrize("service", ["gateway", "conductor", "cache_node"])
def test_it_starts_without_torch(service: str) -> None:
    """An import of torch fails as if it were not installed."""
    code = f"import sys; sys.modules['torch'] = None; import services.{service}.app"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
