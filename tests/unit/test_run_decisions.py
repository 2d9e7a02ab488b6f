"""The engine samples from the weights that the trainer computes with, unless the settings say otherwise."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch
from small_learner import batch, learner, train
from small_models import save_model
from structlog.testing import capture_logs
from tiny_policy import ragged_batch, tiny_model

from rollout_svc.engines.slots import build
from sluice.cli import report
from sluice.cli.report import metrics_digest, weight_digests
from sluice.config import ConfigError, check_tables_fit, load_run
from sluice.config.decide import decided
from trainer_svc.objectives.objective import mismatch_warning


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("cuda", "flags", "precision"),
    [
        (False, (), ("float32", "float32", "float32")),
        (True, (), ("bfloat16", "bfloat16", "bfloat16")),
        (True, ("--trainer.device", "cpu"), ("float32", "float32", "float32")),
        (True, ("--trainer.dtype", "float32"), ("float32", "float32", "float32")),
        (False, ("--trainer.dtype", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")),
        (False, ("--rollout.dtype", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")),
        (False, ("--rollout.engine-args.dtype", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")),
        (False, ("--rollout.engine-args.dtype", "half"), ("float32", "float16", "float16")),
        (True, ("--rollout.dtype", "float16"), ("bfloat16", "float16", "float16")),
        (False, ("--trainer.dtype", "float32", "--rollout.dtype", "bfloat16"), ("float32", "bfloat16", "bfloat16")),
        (False, ("--trainer.publish-dtype", "bfloat16"), ("float32", "bfloat16", "float32")),
        (False, ("--rollout.follow-weights", "false"), ("auto", "auto", "auto")),
    ],
)
def test_one_precision_is_decided_for_both_sides(cuda, flags, precision, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if cuda else "")
    run = load_run(flags)
    assert (run.trainer.dtype, run.trainer.publish_dtype, run.rollout.dtype) == precision


@pytest.mark.parametrize(
    ("cuda", "flags", "merge"),
    [
        (False, (), True),
        (True, (), False),
        (True, ("--rollout.engine", "transformers", "--rollout.device", "cpu"), True),
        (False, ("--trainer.lora.merge", "false"), False),
        (True, ("--trainer.lora.merge",), True),
    ],
)
def test_adapters_are_merged_for_an_engine_on_a_cpu(cuda, flags, merge, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if cuda else "")
    run = load_run(["--trainer.lora.rank", "8", *flags])
    assert run.trainer.lora.merge is merge
    assert run.trainer.lora.merges is merge


def test_a_run_without_adapters_decides_nothing_about_them():
    _, decisions = decided(load_run([]), cuda=False)
    assert not [line for line in decisions if "lora" in line]


def test_a_dry_run_says_what_was_decided_and_why(capsys):
    with pytest.raises(SystemExit):
        load_run(["--trainer.lora.rank", "8", "--dry-run"])
    printed = capsys.readouterr().out
    settings = tomllib.loads(printed)
    assert settings["rollout"]["dtype"] == "float32"
    assert settings["trainer"]["lora"]["merge"] is True
    said = [line for line in printed.splitlines() if line.startswith("#")]
    assert [line.split(" (auto: ")[0] for line in said] == [
        "# decided: trainer.dtype = float32",
        "# decided: trainer.publish_dtype = float32",
        "# decided: trainer.lora.merge = true",
        "# decided: rollout.dtype = float32",
    ]


def test_an_agent_plays_the_environments_that_leave_it_open_who_plays():
    agent = ("--agents.agent", "a.py:Agent")

    def workflows(*flags: str) -> list[str]:
        return [each.workflow for each in load_run(flags).section("orchestrator").mix]

    assert workflows() == ["auto"]
    assert workflows(*agent) == ["external"]
    mixed = [{"name": "a", "environment": "a.py:A"}, {"name": "b", "environment": "b.py:B", "workflow": "retry"}]
    assert workflows(*agent, "--orchestrator.environments", json.dumps(mixed)) == ["external", "retry"]
    mixed[1]["workflow"] = "external"
    assert workflows(*agent, "--orchestrator.environments", json.dumps(mixed)) == ["auto", "external"]
    with pytest.raises(ConfigError, match="no environment of the run has workflow = 'external'"):
        load_run([*agent, "--orchestrator.workflow", "retry"])
    with pytest.raises(ConfigError, match=r"orchestrator\.workflow"):
        load_run([*agent, "--deterministic"])


def test_an_environment_that_plays_its_episodes_itself_is_the_agent_of_the_run():
    verifiers = {
        "environment": "verifiers",
        "environment_args": {"id": "wordle"},
        "environment_processes": {"python": "p"},
    }
    words = [word for key, value in verifiers.items() for word in (f"--orchestrator.{key}", _flag(value))]
    run = load_run(words)
    agents = run.section("agents")
    assert (agents.agent, agents.args, agents.environment_processes.python) == ("verifiers", {"id": "wordle"}, "p")
    assert [each.workflow for each in run.section("orchestrator").mix] == ["external"]
    assert load_run([*words, "--agents.agent", "a.py:Agent"]).section("agents").agent == "a.py:Agent"
    two = json.dumps([{"name": name, "environment": "verifiers", "args": {"id": name}} for name in "ab"])
    with pytest.raises(ConfigError, match="2 environments of the run play their episodes themselves"):
        load_run(["--orchestrator.environments", two])


def _flag(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_settings_that_were_decided_stay_when_they_are_read_again(monkeypatch, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[trainer]\ndtype = "float32"\n[rollout]\ndtype = "float32"\n')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # a replica's host has a device, the trainer's has none
    run = load_run(["@", str(file)], "rollout")
    assert (run.trainer.dtype, run.rollout.dtype) == ("float32", "float32")


async def test_a_bfloat16_checkpoint_is_sampled_in_float32_beside_a_trainer_on_a_cpu(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", 1, dtype=torch.bfloat16)
    run = load_run(["--model", str(model), "--rollout.engine", "transformers"])
    engine = build(run, run.rollout)
    await engine.start()
    try:
        assert engine.info.dtype == "float32"
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("mismatch", "staleness", "sampled", "computed", "told"),
    [
        (0.0012, 0, "bfloat16", "float32", "set rollout.dtype to float32 or auto"),
        (0.0012, 0, "float32", "float32", "quantises neither weights nor the KV cache"),
        (0.0012, 0, "", "float32", "the precision of the engine's weights is not known"),
        (0.0012, 0, "bfloat16", "bfloat16", None),
        (0.006, 0, "float16", "bfloat16", "set rollout.dtype to bfloat16 or auto"),
        (0.5, 1, "bfloat16", "float32", None),
        (1e-7, 0, "bfloat16", "float32", None),
    ],
)
def test_a_mismatch_at_staleness_0_is_warned_of_with_its_cause(mismatch, staleness, sampled, computed, told):
    warning = mismatch_warning({"mismatch_kl": mismatch}, staleness=staleness, sampled=sampled, computed=computed)
    assert (warning is None) if told is None else (told in warning)


def test_a_trainer_warns_once_of_tokens_that_its_own_weights_did_not_sample(tmp_path: Path) -> None:
    policy = learner(tiny_model(tmp_path), tmp_path)
    policy.restore(1, "")
    with capture_logs() as logs:
        train(policy, 1)  # the batch's log-probabilities are made up
    warnings = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert [text for text in warnings if "at staleness 0: the engine does not sample from the policy" in text]


@pytest.mark.parametrize(("sampled", "differs"), [("float32", 0.0), ("bfloat16", 1.0), ("", None)])
def test_a_step_says_whether_the_sampler_has_the_precision_of_the_trainer(tmp_path: Path, sampled, differs) -> None:
    policy = learner(tiny_model(tmp_path), tmp_path)
    policy.restore(1, "")
    applied = policy.apply(batch(policy, 1, ragged_batch(seed=1, groups=3), sampler_dtype=sampled))
    assert applied.metrics is not None
    assert applied.metrics.measured.get("precision_differs") == differs


def test_an_orchestrator_that_is_less_patient_than_the_trainer_itself_is_refused():
    with pytest.raises(ConfigError, match=r"orchestrator\.deadlines\.step_s = 7200 .* set it to 16800 or more"):
        check_tables_fit(load_run(["--trainer.deadlines.step-s", "7200"]))
    check_tables_fit(load_run(["--trainer.deadlines.step-s", "7200", "--orchestrator.deadlines.step-s", "16800"]))


def test_a_deterministic_run_has_what_it_needs() -> None:
    run = load_run(["--deterministic", "true", "--rollout.engine-args.enforce-eager", "true"])
    assert run.max_staleness == 0
    assert (run.trainer.threads, run.rollout.threads) == (1, 1)
    assert run.rollout.engine_args["enforce_eager"]
    assert run.rollout.engine_args["enable_prefix_caching"] is False
    assert all(each.sampling.seeded for each in run.orchestrator.mix)
    assert not run.orchestrator.concurrency.adapt
    assert (
        "enable_prefix_caching"
        not in load_run(["--deterministic", "true", "--rollout.engine", "transformers"]).rollout.engine_args
    )


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (["--max-staleness", "2"], "max_staleness"),
        (["--trainer.threads", "2"], "trainer.threads"),
        (["--rollout.engine-args.enable-prefix-caching", "true"], "rollout.engine_args.enable_prefix_caching"),
        (["--trainer.parallel.dp-shard", "2"], "trainer.parallel"),
        (["--orchestrator.workflow", "a.module:Class"], "orchestrator.workflow"),
        (["--orchestrator.evaluation.every-steps", "5"], "orchestrator.evaluation.every_steps"),
        (["--orchestrator.groups-per-s", "5"], "groups_per_s of environment environment"),
        (
            ["--orchestrator.pools.enabled", "true", "--orchestrator.filter.drop-degenerate", "true"],
            "filter of environment environment",
        ),
    ],
)
def test_a_setting_that_a_deterministic_run_cannot_have_is_named(flags: list[str], setting: str) -> None:
    with pytest.raises(ConfigError, match=f"deterministic = true needs {setting} = "):
        load_run(["--deterministic", "true", *flags])


def test_digests_leave_out_what_was_measured_and_nothing_else(tmp_path: Path) -> None:
    step = {"step": 1.0, "time": 5.0, "trainer/seconds/forward": 0.5, "reward/mean": 0.25}
    assert metrics_digest([step]) == metrics_digest([step | {"time": 6.0, "trainer/seconds/forward": 0.7}])
    assert metrics_digest([step]) != metrics_digest([step | {"reward/mean": 0.5}])
    weights = tmp_path / "weights" / "v1.1" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"a")
    before = weight_digests(tmp_path)
    weights.write_bytes(b"b")
    assert set(before) == {"v1.1"}
    assert weight_digests(tmp_path) != before


def test_a_report_digests_the_newest_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1.0, "time": 5.0, "reward/mean": 0.25}) + "\n")
    for name in ("v1.9", "v1.10"):
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "model.safetensors").write_bytes(name.encode())
    assert report.run([str(tmp_path), "--digest"]) == 0
    assert re.fullmatch(r"metrics [0-9a-f]{32}\nweights v1\.10 [0-9a-f]{32}\n", capsys.readouterr().out)
