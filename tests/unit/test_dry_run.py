"""`sluice rl --dry-run` refuses what the services would refuse at their start, as far as no weights have to be loaded for it."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from orchestrator_svc.commands.eval import command as eval_command
from sluice.cli.main import run_service
from sluice.cli.rl import run
from sluice.config import ConfigError
from sluice.run_files import JOURNAL_FILE

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_text"

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 36,
    "max_position_embeddings": 128,
}


EMPTY = b"\x02" + bytes(7) + b"{}"
"""A safetensors file without tensors."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(EMPTY)
    (tmp_path / "tokenizer.json").touch()
    return tmp_path


def words(model: object, *flags: str) -> list[str]:
    environment = f"{EXAMPLE / 'env.py'}:ReverseText"
    settings = ["@", str(EXAMPLE / "rl.toml"), "--model", str(model), "--orchestrator.environment", environment]
    return [*settings, "--rollout.engine", "transformers", *flags, "--dry-run"]


def test_settings_that_work_are_printed(model: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(words(model, "--trainer.parallel.tp", "3", "--replicas", "2"))
    assert stopped.value.code == 0
    assert tomllib.loads(capsys.readouterr().out)["trainer"]["parallel"]["tp"] == 3


def test_what_the_run_would_say_is_said_of_a_run_that_exists_and_of_ports(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / JOURNAL_FILE).touch()
    flags = ("--run", "r", "--output-dir", str(tmp_path), "--rollout.server.port", "9999")
    with pytest.raises(ConfigError, match=r"run 'r' exists in .*: continue it with --resume, or choose another"):
        run(words(model, *flags))
    with pytest.raises(SystemExit) as stopped:
        run(words(model, *flags, "--resume"))
    assert stopped.value.code == 0
    assert "# rollout.server.port = 9999 is not used" in capsys.readouterr().out


LORA = ("--trainer.lora.rank", "16", "--trainer.lora.merge", "false")
SERVED = ("--rollout.lora.enabled", "--rollout.lora.max-rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (LORA, "set rollout.lora.enabled = true and rollout.lora.max_rank = 16"),
        ((*LORA, *SERVED, "8"), "set rollout.lora.enabled = true and rollout.lora.max_rank = 16"),
        ((*LORA, *SERVED, "16", "--rollout.lora.max-loras", "2"), "max_staleness = 2 needs 4"),
        ((*LORA, *SERVED, "16", "--allocation-mode", "d1+d1t3"), "set parallel.tp and parallel.pp to 1"),
        (("--orchestrator.advantage", "gae"), "set orchestrator.advantage to an estimator that needs only rewards"),
        (("--trainer.objective.advantage", "process"), "set orchestrator.advantage to process"),
        (("--orchestrator.advantage", "none"), "objective grpo reads advantages: set it to grpo"),
        (("--trainer.objective.kl-coef", "0.1"), "set reference.model to base"),
        (
            ("--trainer.objective.kl-coef", "0.1", "--trainer.reference.model", "batch"),
            "bring no log-probabilities of a reference",
        ),
        (
            ("--trainer.objective.kl-coef", "0.1", "--trainer.reference.model", "/nowhere"),
            "trainer.reference.model: there is no directory /nowhere",
        ),
        (
            ("--trainer.schedule", "wsd", "--trainer.decay-steps", "9", "--trainer.max-steps", "8"),
            "together exceed max_steps",
        ),
        (("--trainer.attention", "varlen", "--trainer.dtype", "float32"), "set attention to auto or sdpa"),
        (
            ("--trainer.device=cpu", *LORA, *SERVED, "16", "--trainer.lora.base-dtype", "bfloat16"),
            "set dtype to bfloat16",
        ),
        (("--trainer.parallel.tp", "2"), "does not divide the model's 3 key-value heads"),
        (("--trainer.parallel.cp", "4"), "set trainer.parallel.cp to one of 1, 2, 3, 6"),
        (("--trainer.parallel.pp", "3"), "set trainer.parallel.pp to 2 or less"),
        (("--rollout.engine-args.tensor_parallel_size", "two"), "tensor_parallel_size is 'two': give a whole number"),
        (("--rollout.max-model-len", "129"), "made for 128 positions"),
        (("--trainer.device", "cuda"), "trainer.device is cuda, but there is no CUDA device"),
        (("--orchestrator.environment", "nowhere.py:Env"), "there is no environment file"),
        (("--orchestrator.environment", "nowhere:Env"), "cannot find environment nowhere"),
        (("--orchestrator.environment", ""), "no environment is set"),
        (("--orchestrator.workflow", "nowhere:Flow"), "cannot find workflow nowhere"),
        (("--security.admin-token-file", "/nowhere"), "cannot read the token file /nowhere"),
        (
            ("--trainer.parallel.tp", "3", "--trainer.parallel.dp-shard", "100000"),
            "more than the 1024 that one machine may run",
        ),
        (("--trainer.lr", "inf"), "trainer.lr"),
        (("--threads", "100000"), "--threads: give a whole number from 1 to 1024, not '100000'"),
        (("--trainer.threads", "100000"), "less than or equal to 1024"),
        (("--replicas", "0"), "--replicas: give a whole number from 1 to 1024"),
        (("--max-restarts", "-1"), "--max-restarts: give a whole number from 0"),
        (("--start-deadline", "never"), "--start-deadline: give a number of seconds above 0"),
    ],
)
def test_what_a_service_would_refuse_is_refused(model: Path, flags: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(words(model, *flags))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--trainer.parallel.dp-shard", "2"), "each of these 2 processes would read the whole model"),
        (("--allocation-mode", "d1+d2"), "each of these 2 processes would read the whole model"),
        (("--trainer.parallel.tp", "3"), "tensor parallelism (tp 3) splits linear layers, not stacked experts"),
        ((*LORA, *SERVED, "16"), "lora.target_modules = q_proj,k_proj,v_proj,o_proj"),
    ],
)
def test_what_does_not_work_for_a_model_of_experts_is_refused(model: Path, flags: tuple[str, ...], told: str) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"num_local_experts": 8}))
    with pytest.raises(ConfigError) as refused:
        run(words(model, *flags))
    assert told in str(refused.value)
    assert f"model {model}" in str(refused.value)


@pytest.mark.parametrize("flags", [(), (*LORA, *SERVED, "16", "--trainer.lora.target-modules", "q_proj,v_proj")])
def test_what_works_for_a_model_of_experts_is_not_refused(model: Path, flags: tuple[str, ...]) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"num_local_experts": 8}))
    with pytest.raises(SystemExit, match="0"):
        run(words(model, *flags))


def test_an_objective_whose_module_is_missing_is_refused_without_importing_it(model: Path, monkeypatch) -> None:
    (model / "mine.py").write_text("raise SystemExit('imported')\nclass Env: ...\n")
    monkeypatch.chdir(model)
    services = ["--model", str(model), "--rollout.engine", "transformers", "--orchestrator.environment", "mine.py:Env"]
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        run([*services, "--trainer.objective.preset", "no_such_module:loss", "--dry-run"])
    with pytest.raises(SystemExit, match="0"):
        run([*services, "--trainer.objective.preset", "mine:loss", "--dry-run"])


@pytest.mark.parametrize(("epochs", "warned"), [("1", True), ("2", False)])
def test_a_clip_that_the_settings_make_dead_is_said(model: Path, capsys, epochs: str, warned: bool) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(words(model, "--trainer.objective.preset", "gspo", "--trainer.epochs", epochs))
    printed = capsys.readouterr().out
    assert ("# trainer.objective: eps_low, eps_high of gspo have no effect" in printed) == warned
    tomllib.loads(printed)


def test_vllm_arguments_that_conflict_or_that_we_set_are_refused(model: Path) -> None:
    for flag, told in (
        ("--rollout.engine-args.tensor_parallel_size=4", "cannot share the 6 attention heads"),
        ("--rollout.engine-args.enable_lora=true", "comes from the table"),
    ):
        with pytest.raises(ConfigError, match=told):
            run(words(model, "--rollout.engine", "vllm", flag))


def test_compiled_layers_need_a_compiler(model: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(model))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match="install one, or set compile to false"):
        run(words(model, "--trainer.compile"))


def test_a_service_of_its_own_refuses_the_same_before_it_imports_torch(model: Path) -> None:
    with pytest.raises(ConfigError, match="does not divide the model's 3 key-value heads"):
        run_service("trainer", ["--model", str(model), "--parallel.tp", "2", "--dry-run"])


def test_an_evaluation_is_refused_before_a_replica_is_started(tmp_path: Path) -> None:
    for flags, told in (
        (["--model", str(tmp_path), "--environment", "number_guess"], r"it has no config\.json"),
        (["--address", "localhost:1"], "give either environment, or a table for each of several"),
        (["--address", "localhost:1", "--environment", "nowhere.py:Env"], "there is no environment file"),
    ):
        with pytest.raises(ConfigError, match=told):
            eval_command.run(flags)


def test_a_directory_without_a_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        run(words(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        run(words(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    for name, missing in (("model.safetensors", "holds no weights"), ("tokenizer.json", "holds no tokenizer")):
        with pytest.raises(ConfigError, match=missing):
            run(words(tmp_path))
        (tmp_path / name).write_bytes(EMPTY)
    with pytest.raises(SystemExit, match="0"):
        run(words(tmp_path))


@pytest.mark.parametrize("content", [b"", EMPTY[:-1], b"version https://git-lfs.github.com/spec/v1"])
def test_weights_that_are_truncated_or_were_never_fetched_are_reported(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"weights in .* are incomplete .* `git lfs pull`"):
        run(words(model))


def test_a_missing_shard_is_reported(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"weights in .* are incomplete \(No such file.*model-2\.safetensors"):
        run(words(model))


def test_the_hub_is_not_asked_for_the_sizes_of_a_model(capsys) -> None:
    with pytest.raises(SystemExit):
        run(words("nobody/nothing", "--trainer.parallel.tp", "5"))
    assert capsys.readouterr().out
