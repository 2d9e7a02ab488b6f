"""What the tests of the chart share: Helm, rendered manifests, and the settings and commands inside of them."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/sluice"
TOOLS = Path(os.environ.get("SLUICE_KUBERNETES_TOOLS", ROOT / ".venv-ecosystem-kubernetes")) / "bin"
NODE = ROOT / ".node-ecosystem"

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
"""What Chart.yaml admits and there are schemas for."""

EXAMPLES = ("cpu", "gpu", "multinode")

CUSTOM = ("monitoring.coreos.com", "keda.sh", "cert-manager.io")
"""Groups of custom resources, whose schemas others publish."""

Manifest = dict[str, Any]


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TOOLS / "helm"), *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@functools.cache
def rendered(*words: str, release: str = "sluice", version: str = VERSIONS[-1]) -> tuple[Manifest, ...]:
    """Render the chart; the words are further ones of `helm template`."""
    done = helm("template", release, str(CHART), "--namespace", "rl", "--kube-version", version, *words)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


def example(name: str) -> tuple[str, ...]:
    """Return the words that choose one of the values files, with the settings that it needs."""
    words = ("--values", str(CHART / f"values-{name}.yaml"))
    return (*words, "--set-file", f"run.settings={ROOT}/examples/reverse_text/rl.toml") if name == "cpu" else words


def pod_specs(manifests: tuple[Manifest, ...]) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each manifest that makes pods, and the spec of its pods."""
    for each in manifests:
        if "template" in each.get("spec", {}):
            yield each, each["spec"]["template"]["spec"]


def services(manifests: tuple[Manifest, ...]) -> Iterator[tuple[Manifest, Manifest, list[str]]]:
    """Yield each manifest whose pods run a service of ours, the container, and the words after `sluice`."""
    for each, spec in pod_specs(manifests):
        (container,) = spec["containers"]
        if container["command"] == ["sluice"]:
            yield each, container, container["args"]


def settings(manifests: tuple[Manifest, ...], directory: Path) -> None:
    """Write the settings of the ConfigMap into a directory."""
    (config,) = (each for each in manifests if each["metadata"]["name"].endswith("-settings"))
    for name, text in config["data"].items():
        (directory / name).write_text(text)
