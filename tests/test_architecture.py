"""The layout's rules, kept by reading the imports (the rules themselves: tests/support/layout_rules.py).

protocol <- core <- {io, dataplane} <- text <- engine <- worker_node <- services; tsukimi: protocol, core, text, io
In core: conductor, worker, cache and request stand side by side over costs, kv and machine.
In the gateway: fronts -> generation -> api.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.support.imports import (
    REPOSITORY,
    environment_reads,
    imports,
    imports_package,
    module_name,
    sources,
)
from tests.support.layout_rules import breaches

PRODUCT = sources("shared", "services", "tsukimi")
MOST_LINES = 400
MOST_FILES = 20


def offenders(package: str, *allowed: str) -> list[str]:
    """Files that import the package and stand in none of the allowed folders and files."""
    using = [source for source in PRODUCT if imports_package(source, package)]
    return [str(source) for source in using if not any(source.is_relative_to(place) for place in allowed)]


def test_every_import_keeps_the_rules() -> None:
    assert not list(breaches({module_name(source): imports(source) for source in PRODUCT}))


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("shared.protocol.ids", "shared.core.machine"),
        ("shared.core.machine", "shared.io.bus"),
        ("shared.io.bus", "shared.dataplane.api"),
        ("shared.dataplane.api", "shared.io.bus"),
        ("shared.dataplane.api", "shared.text.text"),
        ("shared.text.text", "shared.engine.api"),
        ("shared.engine.api", "shared.worker_node.node"),
        ("shared.worker_node.node", "services.decode.app"),
        ("shared.io.bus", "tsukimi.cli"),
        ("shared.io.bus", "tests.support.until"),
        ("shared.core.conductor.machine", "shared.core.worker.events"),
        ("shared.core.worker.machine", "shared.core.conductor.events"),
        ("shared.core.cache.machine", "shared.core.request.events"),
        ("shared.core.request.machine", "shared.core.cache.events"),
        ("shared.core.kv.pool", "shared.core.worker.events"),
        ("shared.core.kv.pool", "shared.core.costs.model"),
        ("shared.core.costs.model", "shared.core.kv.pool"),
        ("shared.core.machine", "shared.core.kv.pool"),
        ("services.gateway.api.body", "services.gateway.generation.gateway"),
        ("services.gateway.api.body", "services.gateway.fronts.http"),
        ("services.gateway.generation.gateway", "services.gateway.fronts.http"),
        ("services.gateway.app", "shared.engine.load"),
        ("services.gateway.app", "shared.worker_node.node"),
        ("services.decode.app", "services.prefill.app"),
        ("services.decode.app", "tsukimi.cli"),
        ("tsukimi.cli", "services.gateway.app"),
        ("tsukimi.cli", "shared.engine.load"),
        ("tsukimi.cli", "shared.dataplane.api"),
        ("shared.core.kv.pool", "time"),
        ("shared.core.conductor.placement_policies", "importlib"),
        ("shared.protocol.wire", "os.path"),
    ],
)
def test_a_breach_of_each_rule_is_found(module: str, imported: str) -> None:
    """One import more in the repository as it is."""
    real = {module_name(source): imports(source) for source in PRODUCT}
    real[module] = real.get(module, frozenset()) | {imported}
    assert [found.partition(":")[0] for found in breaches(real)] == [f"{module} imports {imported}"]


def test_torch_only_in_the_engine() -> None:
    assert not offenders("torch", "shared/engine", "shared/worker_node")
    torch_free = (
        "shared/engine/api.py",
        "shared/engine/sampling/draw.py",
        "shared/engine/toy",
        "shared/text",
    )
    assert not [
        str(s) for s in PRODUCT if any(map(s.is_relative_to, torch_free)) and imports_package(s, "torch")
    ]


def test_transformers_and_tokenizers_only_where_models_and_texts_are() -> None:
    assert not offenders("transformers", "shared/engine", "shared/text")
    assert not offenders("tokenizers", "shared/engine", "shared/text")


def test_nats_only_in_the_nats_bus() -> None:
    assert not offenders("nats", "shared/io/nats_bus.py", "shared/io/nats_errors.py")
    assert "shared/io/nats_bus.py" in offenders("nats")  # the test sees what it looks for


def test_only_config_reads_the_environment() -> None:
    wrong = [f"{source}:{line}" for source in PRODUCT for line in environment_reads(source)]
    assert [where for where in wrong if where.startswith("shared/io/config.py:")]
    assert not [where for where in wrong if not where.startswith("shared/io/config.py:")]


def test_every_folder_is_a_package() -> None:
    packages = {source.parent for source in PRODUCT}
    assert not [str(package) for package in packages if not (REPOSITORY / package / "__init__.py").exists()]


@pytest.mark.parametrize("folder", ["shared", "services", "tsukimi", "tests"])
def test_no_file_is_longer_than_one_thought(folder: str) -> None:
    lengths = {source: len((REPOSITORY / source).read_text().splitlines()) for source in sources(folder)}
    assert not {str(source): length for source, length in lengths.items() if length > MOST_LINES}


def test_no_folder_holds_more_files_than_a_reader_can_take_in() -> None:
    found = Counter(source.parent for source in sources("shared", "services", "tsukimi", "tests"))
    assert not {str(folder): count for folder, count in found.items() if count > MOST_FILES}


@pytest.mark.parametrize("service", ["gateway", "conductor", "cache_node"])
def test_it_starts_without_torch(service: str) -> None:
    """An import of torch fails as if it were not installed."""
    code = f"import sys; sys.modules['torch'] = None; import services.{service}.app"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
