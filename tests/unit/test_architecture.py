"""The rules of the house that a reader cannot be trusted to keep by eye."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout_svc.config import RolloutConfig
from sluice.config import markdown_reference, run_config_class
from sluice.engines import ENGINES

ROOT = Path(__file__).parents[2]
SERVICES = (
    "rollout_svc",
    "trainer_svc",
    "orchestrator_svc",
    "weightsync",
    "gateway_svc",
    "agents_svc",
    "envserver_svc",
)
PACKAGES = ("sluice", *SERVICES, "sluice_convert", "benchmarks")
CLIENT_HALVES = {"weightsync.publisher", "weightsync.receiver", "weightsync.staged", "weightsync.vllm_plugin"}
"""What trainers and engines use of weight sync; the plugin is the part of the receiver that lives in vLLM's processes."""

HEAVY = ("torch", "vllm", "transformers")


def sources(package: str) -> list[Path]:
    return [path for path in sorted((ROOT / package).rglob("*.py")) if "v1" not in path.relative_to(ROOT).parts]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = parsed(path)
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ["sluice", *SERVICES])
def test_a_service_imports_only_itself_and_the_shared_library(package: str) -> None:
    others = set(SERVICES) - {package}
    wrong = []
    for path in sources(package):
        for name in imports(path):
            foreign = name.split(".")[0] in others
            client_half = any(name == half or name.startswith(half + ".") for half in CLIENT_HALVES)
            packages_themselves = name == "weightsync"
            if foreign and not client_half and not packages_themselves:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


TRAINER_LAYERS = ("batch", "parallel", "engine", "objectives", "checkpoint", "update", "service", "offline")
"""Packages of the trainer, the lowest first; service and offline are two ends beside each other."""


@pytest.mark.parametrize("layer", TRAINER_LAYERS)
def test_a_package_of_the_trainer_imports_only_the_packages_below_it(layer: str) -> None:
    below = TRAINER_LAYERS[: TRAINER_LAYERS.index(layer)] if layer != "offline" else TRAINER_LAYERS[:-2]
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(f"trainer_svc/{layer}")
        for name in imports(path)
        if name.startswith("trainer_svc.") and name.split(".")[1] in set(TRAINER_LAYERS) - {layer, *below}
    ]
    assert not wrong


ORCHESTRATOR_LAYERS = ("journal", "sessions", "run", "commands")
"""Packages of the orchestrator, the lowest first."""


@pytest.mark.parametrize("layer", ORCHESTRATOR_LAYERS)
def test_a_package_of_the_orchestrator_imports_only_the_packages_below_it(layer: str) -> None:
    above = ("app", *ORCHESTRATOR_LAYERS[ORCHESTRATOR_LAYERS.index(layer) + 1 :])
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(f"orchestrator_svc/{layer}")
        for name in imports(path)
        if name.startswith(tuple(f"orchestrator_svc.{each}" for each in above))
    ]
    assert not wrong


def test_nothing_reads_or_writes_pickles() -> None:
    wrong = []
    for package in PACKAGES:
        for path in sources(package):
            text = path.read_text()
            names = set(imports(path))
            if names & {"pickle", "cloudpickle", "dill", "joblib"} or "torch.load(" in text or "torch.save(" in text:
                wrong.append(str(path.relative_to(ROOT)))
    assert not wrong


@pytest.mark.parametrize("service", SERVICES)
def test_configuration_modules_stay_light(service: str) -> None:
    path = ROOT / service / "config.py"
    heavy = [name for name in imports(path) if name.split(".")[0] in HEAVY]
    assert not heavy, f"every command loads {service}/config.py"


def test_the_openai_dialect_needs_no_model() -> None:
    heavy = (*HEAVY, "tokenizers", "jinja2", "sluice.render")
    wrong = [
        f"{path.name} imports {name}"
        for path in sources("sluice/openai")
        for name in imports(path)
        if name.startswith(heavy)
    ]
    assert not wrong, "a gateway serves it without a tokenizer"


def test_sampling_through_replicas_loads_no_model_library() -> None:
    modules = ", ".join(
        f"sluice.sampling.{path.stem}" for path in sources("sluice/sampling") if path.stem != "__init__"
    )
    code = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {*HEAVY, "tokenizers", "numpy", "orchestrator_svc"} & set(loaded.stdout.split())
    assert not heavy, "a gateway samples through replicas, and starts in a second"


def test_every_engine_that_can_be_set_is_a_package() -> None:
    for name, engine in ENGINES.items():
        assert RolloutConfig(engine=name).engine == name
        package = importlib.import_module(engine.package)
        assert callable(package.build), name
        assert callable(package.check), name
    with pytest.raises(ValidationError):
        RolloutConfig(engine="another")


def test_the_page_of_all_settings_is_fresh() -> None:
    page = markdown_reference(run_config_class())
    same = (ROOT / "docs/configuration.md").read_text() == page
    assert same, "run `.venv/bin/sluice config docs --output docs/configuration.md` and commit it"


LIBRARIES_OF_MODELS = ("trainer_svc", "rollout_svc", "weightsync")
"""Packages whose private names of other libraries docs/architecture.md lists."""


def test_the_private_names_of_other_libraries_are_listed() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## Private names of other libraries")[2]
    listed: dict[str, list[str]] = defaultdict(list)
    for row in page.splitlines():
        if row.startswith("| ") and not row.startswith("| library"):
            _, _, names, files, *_ = row.split("|")
            for path in re.findall(r"\[`([^`]+)`\]", files):
                listed[path] += re.findall("`([^`]+)`", names)
    for path, names in listed.items():
        code = (ROOT / path).read_text()
        assert [name for name in names if name not in code] == [], path
    uses = [path for package in LIBRARIES_OF_MODELS for path in sources(package) if "noqa: SLF001" in path.read_text()]
    assert {str(path.relative_to(ROOT)) for path in uses} <= set(listed)


def test_every_test_module_has_a_name_of_its_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_the_interpreter_is_supported() -> None:
    assert (3, 11) <= sys.version_info[:2] < (3, 15)


@pytest.mark.parametrize("service", SERVICES)
def test_no_table_is_called_as_a_setting_of_a_service(service: str) -> None:
    """`sluice orchestrator --environment X` could otherwise mean either."""
    config = importlib.import_module(f"{service}.config").CONFIG
    assert not set(config.model_fields) & set(run_config_class().model_fields) - {"server"}
