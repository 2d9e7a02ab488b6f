"""`sluice export RUN DIRECTORY`: the weights of a run as a Hugging Face directory, with a model card that says how they were made."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator_svc.commands.runs import find_run, weight_versions
from sluice.config import Command, ConfigError, Options, whole_number
from sluice.host_files import whole_directory
from sluice.progress import doing

_LEFT_OUT = {"manifest.json"}
"""Files of a version that only a run needs."""


def run(argv: list[str]) -> int:
    """Write the directory, and push it if that is asked for; return 0.

    Raises:
        ConfigError: if the run or the step is not there, the directory exists, or the hub refuses it.
    """
    parser = Options(prog="sluice export", description=__doc__)
    parser.add_argument("run", help="name of the run, or its directory")
    parser.add_argument("directory", type=Path, help="directory to write; must not exist")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="holds the runs (default: outputs)")
    parser.add_argument("--step", type=whole_number(0), help="step of the weights (default: the last)")
    parser.add_argument("--license", default="", help="license of the model, for its card, such as apache-2.0")
    parser.add_argument(
        "--push", default="", help="hub repository to push it to, such as owner/name; $HF_TOKEN has the token"
    )
    parser.add_argument("--private", action="store_true", help="make a repository that is new private")
    arguments = parser.parse_args(argv)
    run_directory = find_run(arguments.run, arguments.output_dir)
    steps = [] if arguments.step is None else [arguments.step]
    weights = weight_versions(run_directory / "weights", steps)[-1]
    card = model_card(run_directory, weights.name, arguments.license)
    try:
        with doing(f"copy {weights.name}"), whole_directory(arguments.directory) as staging:
            for file in weights.iterdir():
                if file.is_file() and file.name not in _LEFT_OUT:
                    shutil.copyfile(file, staging / file.name)
            (staging / "README.md").write_text(card, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {arguments.directory}: {error}") from error
    sys.stdout.write(f"{arguments.directory}: {weights.name} of run {arguments.run}\n")
    if arguments.push:
        with doing(f"push to {arguments.push}"):
            address = _pushed(arguments.directory, arguments.push, private=arguments.private)
        sys.stdout.write(f"{address}\n")
    return 0


def model_card(run_directory: Path, version: str, license_name: str) -> str:
    """Return a model card in the hub's format: a header for machines, then text for people.

    Raises:
        ConfigError: if the files of the run cannot be read.
    """
    try:
        settings = tomllib.loads((run_directory / "config.toml").read_text(encoding="utf-8"))
        report: Mapping[str, Any] = {}
        if (run_directory / "report.json").exists():
            report = json.loads((run_directory / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the files of {run_directory} cannot be read: {error}") from error
    orchestrator, trainer = settings.get("orchestrator", {}), settings.get("trainer", {})
    base = str(settings.get("model", ""))
    public = base if base.count("/") == 1 and not Path(base).exists() else ""
    header = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [reinforcement-learning, sluice]"]
    header += [f"base_model: {public}"] * bool(public) + [f"license: {license_name}"] * bool(license_name)
    named = [each.get("name", each.get("environment", "")) for each in orchestrator.get("environments", [])]
    facts = {
        "trained from": base if public else Path(base).name,
        "environment": ", ".join(named) or orchestrator.get("environment", ""),
        "objective": trainer.get("objective", {}).get("preset", ""),
        "advantages": orchestrator.get("advantage", ""),
        "learning rate": trainer.get("lr", ""),
        "tasks x attempts a step": f"{orchestrator.get('batch_size', '')} x {orchestrator.get('group_size', '')}",
        "version": version,
        "tokens trained": f"{report['tokens_trained']:,}" if "tokens_trained" in report else "",
        "trajectories trained": f"{report['trajectories_trained']:,}" if "trajectories_trained" in report else "",
        "seconds": f"{report['wall_s']:.0f}" if "wall_s" in report else "",
        "seed": settings.get("seed", ""),
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value not in {"", " x "}]
    title = f"# {settings.get('run', run_directory.name)}"
    told = [
        title,
        "",
        "Trained by reinforcement learning with Sluice.",
        "",
        "| | |",
        "|---|---|",
        *rows,
        "",
        *_evaluated(run_directory, version),
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
        "```",
    ]
    return "\n".join(["---", *header, "---", "", *told]) + "\n"


def _evaluated(run_directory: Path, version: str) -> list[str]:
    """Return a table of the run's own evaluations of a version, if it has any."""
    step = int(version.rpartition(".")[2])
    found: dict[str, float] = {}
    file = run_directory / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line)
        if row.get("step") == step:
            found |= {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}
    shown = {name: value for name, value in found.items() if name.endswith(("reward_mean", "exact_share"))}
    if not shown:
        return []
    rows = [f"| {name} | {value:.4f} |" for name, value in sorted(shown.items())]
    return ["| held-out tasks | |", "|---|---|", *rows, ""]


def _pushed(directory: Path, repository: str, *, private: bool) -> str:
    """Push a directory to the hub; return its address.

    Raises:
        ConfigError: if the hub refuses it, or cannot be reached.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    hub = HfApi()
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repository, folder_path=str(directory))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(
            f"{directory} is written, but cannot be pushed to {repository}: {error}; set HF_TOKEN to a token that may write there"
        ) from error
    return str(commit.repo_url)


COMMAND = Command("export", "write the weights of a run as a Hugging Face directory with a model card", run)
