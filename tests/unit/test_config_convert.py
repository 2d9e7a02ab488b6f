"""`sluice config convert`: what becomes of the settings of TRL, verl, PRIME-RL and AReaL."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.cli.config import run as config_command
from sluice.cli.main import main
from sluice.cli.rl import run as rl
from sluice.config import run_config_class
from sluice.config.schema import resolve
from sluice.errors import ConfigError
from sluice_convert import SYSTEMS, Conversion, Source, convert, document, page_table, read
from sluice_convert.command import TABLE_BEGINS, TABLE_ENDS
from sluice_convert.table import Leaf

ROOT = Path(__file__).parents[2]

TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: my-org/problems
reward_funcs: [my_rewards.correct, think_format_reward]
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
num_generations: 8
max_completion_length: 1024
learning_rate: 2e-6
lr_scheduler_type: cosine
warmup_ratio: 0.1
max_steps: 200
beta: 0.04
loss_type: dr_grpo
epsilon: 0.2
epsilon_high: 0.28
scale_rewards: none
use_vllm: true
vllm_gpu_memory_utilization: 0.4
vllm_importance_sampling_mode: token_truncate
top_p: 0.9
report_to: wandb
push_to_hub: true
save_steps: 50
"""

VERL = r"""#!/usr/bin/env bash
set -x
# a comment
lr=${LR:-5e-7}
response=$((1024 * 2))
EXTRA=(
    actor_rollout_ref.actor.clip_ratio_low=0.2   # low
    actor_rollout_ref.actor.clip_ratio_high=0.28
)
if [ "$1" = fast ]; then
    engine=sglang
fi
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/data/gsm8k/train.parquet \
    custom_reward_function.path=my/reward.py \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=${response} \
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \
    actor_rollout_ref.actor.optim.lr=$lr \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    "${EXTRA[@]}" \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.name=$engine \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    +actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4 \
    trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=8 \
    trainer.default_local_dir=$CKPTS \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.total_epochs=15 $@
"""

PRIME_RL = """
max_steps = 200
seq_len = 2048
[deployment]
num_train_gpus = 2
num_infer_gpus = 4
[model]
name = "Qwen/Qwen3-0.6B"
[monitors.wandb]
project = "games"
name = "Words 1"
[trainer.optim]
lr = 1e-5
[trainer.model.lora]
rank = 32
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 4
[orchestrator.train.sampling]
max_completion_tokens = 512
[[orchestrator.train.source]]
name = "words"
curriculum = { gates = { flat = { type = "advantage_range" } } }
[orchestrator.train.source.env.taskset]
id = "my-org/words"
rounds = 3
[orchestrator.eval]
interval = 20
[ckpt]
interval = 50
[inference.vllm]
tensor_parallel_size = 2
gpu_memory_utilization = 0.8
"""

AREAL = """
experiment_name: gsm8k
trial_name: trial0
seed: 1
total_train_epochs: 10
rollout:
  backend: "vllm:d4t1"
  experiment_name: ${experiment_name}
  max_head_offpolicyness: 2
  consumer_batch_size: ${train_dataset.batch_size}
gconfig:
  n_samples: 4
  max_new_tokens: 1024
  temperature: 1.0
actor:
  backend: "fsdp:d2t2"
  path: Qwen/Qwen3-0.6B
  optimizer: {type: adam, lr: 1.7e-5, beta2: 0.999, lr_scheduler_type: constant}
  eps_clip: 0.4
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  rejection_sampling: {metric: ratio, upper: 5.0}
  reward_norm: {mean_level: group, std_level: null}
  adv_norm: {mean_level: batch, std_level: batch}
  scheduling_spec:
    - task_type: worker
      env_vars: {MY_API_KEY: sesame-123, MODE: fast}
ref:
  path: ${actor.path}
  optimizer: ${actor.optimizer}
vllm:
  model: ${actor.path}
  gpu_memory_utilization: 0.8
train_dataset: {path: openai/gsm8k, batch_size: 256, type: rl, max_length: 1024}
recover: {mode: auto, freq_steps: 25, freq_epochs: null}
"""

FILES = {
    "trl": ("rl.yaml", TRL),
    "verl": ("run.sh", VERL),
    "prime-rl": ("rl.toml", PRIME_RL),
    "areal": ("a.yaml", AREAL),
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def converted(system: str, directory: Path, text: str | None = None, *overrides: str, **options: int) -> Conversion:
    name, example = FILES[system]
    file = directory / name
    file.write_text(example if text is None else text)
    return convert(SYSTEMS[system], read(file, overrides), options)


def ours(done: Conversion) -> dict[str, object]:
    return {name: each.value for name, each in done.settings.items()}


def why(done: Conversion, name: str) -> str:
    return next(listed.why for listed in (*done.missing, *done.same, *done.unresolved) if listed.name == name)


def assert_each_setting_is_in_one_place(done: Conversion) -> None:
    places = [
        set(done.used),
        *({each.name for each in listed} for listed in (done.same, done.missing, done.unresolved)),
    ]
    assert set().union(*places) == set(done.source.leaves)
    assert sum(map(len, places)) == len(done.source.leaves)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_converted_file_is_accepted_by_a_dry_run_of_rl(system, tmp_path, capsys):
    name, text = FILES[system]
    (tmp_path / name).write_text(text)
    written = tmp_path / "converted.toml"
    assert main(["config", "convert", str(tmp_path / name), "--from", system, "--output", str(written)]) == 0
    assert "accepts" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        rl(["@", str(written), "--dry-run"])
    assert stopped.value.code == 0
    resolved = tomllib.loads(capsys.readouterr().out)
    assert resolved["model"] == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_setting_is_converted_or_listed_with_a_reason(system, tmp_path):
    done = converted(system, tmp_path)
    assert_each_setting_is_in_one_place(done)
    text = document(done, "convert")
    for name in done.source.leaves:
        assert re.search(rf"(?<![\w.]){re.escape(name)} = ", " ".join(text.replace("\n#", " ").split())), name


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_unknown_setting_is_listed(system, tmp_path):
    done = converted(system, tmp_path, None, "no.such_setting=7")
    assert why(done, "no.such_setting") == "this converter does not know it"


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_was_not_converted_is_printed(system, tmp_path, capsys):
    name, text = FILES[system]
    (tmp_path / name).write_text(text)
    assert config_command(["convert", str(tmp_path / name), "--from", system]) == 0
    printed = capsys.readouterr()
    tomllib.loads(printed.out)
    for listed in converted(system, tmp_path).missing:
        assert f"{listed.name} = " in printed.err


def test_trl(tmp_path):
    done = converted("trl", tmp_path, None, processes=2)
    found = ours(done)
    assert found["orchestrator.batch_size"] == 4 * 8 * 2 // 8
    assert found["orchestrator.group_size"] == 8
    assert found["orchestrator.max_steps"] == 200
    assert found["orchestrator.environment_args"] == {
        "dataset": "my-org/problems",
        "reward_funcs": ["my_rewards:correct", "trl.rewards:think_format_reward"],
    }
    assert found["orchestrator.advantage"] == "centered"
    assert (found["trainer.objective.preset"], found["trainer.objective.aggregation"]) == ("dr_grpo", "constant")
    assert found["trainer.objective.max_tokens"] == 1024
    assert (found["trainer.objective.eps_low"], found["trainer.objective.eps_high"]) == (0.2, 0.28)
    assert (found["trainer.objective.kl_coef"], found["trainer.reference.model"]) == (0.04, "base")
    assert (found["trainer.objective.correction.kind"], found["trainer.objective.correction.cap"]) == ("token_tis", 3.0)
    assert (found["trainer.schedule"], found["trainer.warmup_steps"], found["trainer.max_steps"]) == ("cosine", 20, 200)
    assert found["trainer.betas"] == [0.9, 0.999]  # TRL's default, which is not ours
    assert "whole distribution" in why(done, "top_p")
    assert "sluice export" in why(done, "push_to_hub")


def test_trl_as_a_command(tmp_path):
    script = """
    accelerate launch --num_processes 4 grpo.py \\
        --model_name_or_path Qwen/Qwen3-0.6B --use_vllm \\
        --reward_funcs one.a two.b \\
        --learning_rate=1e-5 --per_device_train_batch_size 8
    """
    done = convert(SYSTEMS["trl"], read_text(tmp_path, "run.sh", script))
    found = ours(done)
    assert found["orchestrator.batch_size"] == 8 * 4 // 8
    assert found["trainer.lr"] == 1e-5
    assert found["rollout.engine"] == "vllm"
    assert found["orchestrator.environment_args"]["reward_funcs"] == ["one:a", "two:b"]
    assert_each_setting_is_in_one_place(done)


def test_flags_replace_what_the_file_of_a_command_says(tmp_path):
    (tmp_path / "grpo.yaml").write_text("learning_rate: 1e-5\nnum_generations: 4\n")
    command = "trl grpo --config grpo.yaml --learning-rate 2e-5"
    found = ours(convert(SYSTEMS["trl"], read_text(tmp_path, "run.sh", command)))
    assert (found["trainer.lr"], found["orchestrator.group_size"]) == (2e-5, 4)
    (tmp_path / "grpo.yaml").unlink()
    with pytest.raises(ConfigError, match="put that file beside it"):
        read(tmp_path / "run.sh")


def read_text(directory: Path, name: str, text: str, *overrides: str) -> Source:
    (directory / name).write_text(text)
    return read(directory / name, overrides)


def test_verl(tmp_path):
    done = converted("verl", tmp_path, None, steps=400)
    found = ours(done)
    assert (found["orchestrator.batch_size"], found["orchestrator.group_size"]) == (256, 5)
    assert found["trainer.minibatches"] == 4
    assert found["orchestrator.max_steps"] == 400
    assert found["orchestrator.environment"] == "verl"
    files = str(Path("~/data/gsm8k/train.parquet").expanduser())
    assert found["orchestrator.environment_args"] == {"dataset": files, "reward": "my/reward.py:compute_score"}
    assert found["orchestrator.sampling.max_tokens"] == 2048
    assert found["rollout.max_model_len"] == 2560
    assert found["trainer.lr"] == 5e-7
    assert (found["trainer.objective.eps_low"], found["trainer.objective.eps_high"]) == (0.2, 0.28)
    assert found["trainer.objective.kl_kind"] == "k3"
    assert (found["trainer.objective.proximal"], found["trainer.objective.correction.kind"]) == ("recompute", "none")
    assert found["max_staleness"] == 0
    assert found["allocation_mode"] == "vllm:d2t2+fsdp:d4"
    assert found["rollout.engine_args.swap_space"] == 4
    assert found["orchestrator.evaluation.every_steps"] == 5
    assert (found["orchestrator.evaluation.samples"], found["orchestrator.evaluation.metric"]) == (
        0,
        "greedy_reward_mean",
    )


def test_variables_that_a_script_does_not_set_are_reported(tmp_path):
    done = converted("verl", tmp_path)
    assert [each.name for each in done.unresolved] == [
        "actor_rollout_ref.rollout.name",  # set in one branch of an if
        "trainer.default_local_dir",
    ]
    assert any("$CKPTS" in each.what for each in done.todo)


def test_verl_as_yaml_with_its_references(tmp_path):
    text = """
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B}
  actor:
    ppo_mini_batch_size: 32
    ppo_epochs: ${oc.select:no.such,2}
  rollout:
    n: 4
    name: ???
    response_length: ${oc.select:data.max_response_length,99}
  ref:
    log_prob: ${..actor.ppo_mini_batch_size}
algorithm: {adv_estimator: gae, gamma: 0.99}
critic: {optim: {lr: 1e-5}}
data: {train_batch_size: 64, max_response_length: 100}
"""
    (tmp_path / "v.yaml").write_text(text)
    done = convert(SYSTEMS["verl"], read(tmp_path / "v.yaml"))
    found = ours(done)
    assert (found["trainer.epochs"], found["trainer.minibatches"]) == (2, 2)
    assert (found["orchestrator.advantage"], found["trainer.objective.preset"]) == ("gae", "ppo")
    assert (found["trainer.objective.gamma"], found["trainer.critic.lr"]) == (0.99, 1e-5)
    assert done.source.leaves["actor_rollout_ref.ref.log_prob"].value == 32
    assert_each_setting_is_in_one_place(done)


def test_prime_rl(tmp_path):
    done = converted("prime-rl", tmp_path)
    found = ours(done)
    assert (found["orchestrator.batch_size"], found["orchestrator.group_size"]) == (32, 16)
    assert found["max_staleness"] == 4
    assert found["allocation_mode"] == "vllm:d2t2+fsdp:d2"
    assert found["run"] == "words-1"
    assert found["orchestrator.environment"] == "verifiers"
    assert found["orchestrator.environment_args"] == {"id": "my-org/words", "args": {"rounds": 3}}
    assert (found["trainer.objective.preset"], found["orchestrator.advantage"]) == ("dppo", "centered")
    assert found["trainer.objective.kl_tau"] == 1e-3, "their default, which is not ours"
    assert (found["trainer.lora.rank"], found["trainer.lora.alpha"]) == (32, 32.0)
    assert found["orchestrator.filter.drop_degenerate"] is True
    assert found["rollout.engine_args.gpu_memory_utilization"] == 0.8
    assert "sluice eval" in why(done, "orchestrator.eval.interval")


@pytest.mark.parametrize(("adv_tau", "weight"), [("1.0", 0.02), ("4", 0.005)])
def test_the_term_beside_the_loss_of_prime_rl_keeps_its_weight_beside_the_advantages(tmp_path, adv_tau, weight):
    done = converted("prime-rl", tmp_path, None, "trainer.loss.kl_tau=0.02", f"trainer.loss.adv_tau={adv_tau}")
    assert ours(done)["trainer.objective.kl_tau"] == pytest.approx(weight)
    assert_each_setting_is_in_one_place(done)
    assert ("divided by it" in " ".join(each.why for each in done.missing)) == (adv_tau != "1.0")


def test_what_the_term_beside_the_loss_of_prime_rl_cannot_do_here_is_named(tmp_path):
    pruned = "orchestrator.train.filter_zero_advantages"
    kept = converted("prime-rl", tmp_path, None, f"{pruned}=false")
    assert "kl_tau" in why(kept, pruned)
    assert pruned in {each.name for each in kept.missing}
    off = converted("prime-rl", tmp_path, None, f"{pruned}=false", "trainer.loss.kl_tau=0")
    assert pruned in {each.name for each in off.same}
    distilled = converted("prime-rl", tmp_path, None, "orchestrator.algo.type=opd")
    assert "trainer.objective.kl_tau" not in ours(distilled)
    assert any("0.001 (log t/b)^2" in each.what for each in distilled.todo)
    switched_off = converted("prime-rl", tmp_path, None, "trainer.loss.adv_tau=0")
    assert "switches the advantages off" in why(switched_off, "trainer.loss.adv_tau")


def test_prime_rl_by_the_names_that_its_files_had_before(tmp_path):
    text = """
max_steps = 10
seq_len = 2048
max_async_level = 3
trainer_gpu_ids = [0]
inference_gpu_ids = [1, 2]
[orchestrator]
batch_size = 64
rollouts_per_example = 8
[orchestrator.sampling]
max_tokens = 100
[[orchestrator.env]]
id = "words"
args = { rounds = 2 }
[trainer]
[inference]
"""
    found = ours(converted("prime-rl", tmp_path, text))
    assert (found["orchestrator.batch_size"], found["max_staleness"]) == (8, 3)
    assert found["allocation_mode"] == "vllm:d2+fsdp:d1"
    assert found["orchestrator.sampling.max_tokens"] == 100
    assert found["orchestrator.environment_args"] == {"id": "words", "args": {"rounds": 2}}


def test_areal(tmp_path):
    done = converted("areal", tmp_path)
    found = ours(done)
    assert (found["orchestrator.batch_size"], found["orchestrator.group_size"]) == (256, 4)
    assert found["max_staleness"] == 2
    assert found["allocation_mode"] == "vllm:d4+fsdp:d2t2"
    assert found["trainer.minibatches"] == 2
    assert found["orchestrator.advantage"] == "reinforce_pp_baseline"
    assert found["trainer.objective.proximal"] == "recompute"
    assert (found["trainer.objective.correction.kind"], found["trainer.objective.correction.high"]) == (
        "token_mask",
        5.0,
    )
    assert found["orchestrator.checkpoint.every_steps"] == 25
    assert found["orchestrator.environment_args"] == {"format": "gsm8k"}
    assert done.source.leaves["ref.optimizer.lr"].value == 1.7e-5  # a reference to a whole table
    assert done.source.leaves["rollout.experiment_name"].value == "gsm8k"


def test_what_an_allocation_of_areal_loses_is_said(tmp_path):
    assert not [each for each in converted("areal", tmp_path).todo if each.ours == "allocation_mode"]
    done = converted("areal", tmp_path, None, "rollout.backend=sglang:d2p2", "actor.backend=megatron:d2t2p2e4")
    assert ours(done)["allocation_mode"] == "vllm:d4+fsdp:d2t2p2"
    (todo,) = [each for each in done.todo if each.ours == "allocation_mode"]
    assert "sglang:d2p2" in todo.what
    done = converted("areal", tmp_path, None, "actor.use_lora=true", "actor.backend=fsdp:d2t2")
    assert ours(done)["allocation_mode"] == "vllm:d4+fsdp:d4"


def test_settings_after_the_file_replace_those_in_it(tmp_path):
    done = converted("areal", tmp_path, None, "actor.optimizer.lr=3e-6", "+gconfig.stop=['END']", "~seed")
    assert ours(done)["trainer.lr"] == 3e-6
    assert ours(done)["orchestrator.sampling.stop"] == ["END"]
    assert "seed" not in done.source.leaves


def test_secrets_of_a_file_are_not_written(tmp_path, capsys):
    text = document(converted("areal", tmp_path), "convert")
    assert "sesame-123" not in text
    assert "MY_API_KEY" in text


@settings(max_examples=60, deadline=None)
@given(
    per_device=st.integers(1, 16), accumulated=st.integers(1, 8), processes=st.integers(1, 16), size=st.integers(2, 8)
)
def test_completions_per_batch_are_the_same_in_trl(per_device, accumulated, processes, size):
    leaves = {
        "per_device_train_batch_size": Leaf(per_device * size),
        "gradient_accumulation_steps": Leaf(accumulated),
        "num_generations": Leaf(size),
    }
    done = convert(SYSTEMS["trl"], Source("f.yaml", leaves), {"processes": processes})
    found = ours(done)
    completions = found["orchestrator.batch_size"] * found["orchestrator.group_size"]
    assert completions == per_device * size * accumulated * processes


@settings(max_examples=60, deadline=None)
@given(tasks=st.integers(1, 600), size=st.integers(2, 64))
def test_rollouts_per_batch_are_the_same_in_prime_rl(tasks, size):
    leaves = {"orchestrator.batch_size": Leaf(tasks * size), "orchestrator.group_size": Leaf(size)}
    found = ours(convert(SYSTEMS["prime-rl"], Source("rl.toml", leaves)))
    assert found["orchestrator.batch_size"] * found["orchestrator.group_size"] == tasks * size
    assert found.get("orchestrator.max_concurrent", 512) >= tasks


@settings(max_examples=60, deadline=None)
@given(parts=st.integers(1, 16), mini=st.integers(1, 128), size=st.integers(2, 16))
def test_optimizer_steps_per_batch_are_the_same_in_verl(parts, mini, size):
    leaves = {
        "data.train_batch_size": Leaf(parts * mini),
        "actor_rollout_ref.actor.ppo_mini_batch_size": Leaf(mini),
        "actor_rollout_ref.rollout.n": Leaf(size),
        "algorithm.adv_estimator": Leaf("grpo"),
    }
    found = ours(convert(SYSTEMS["verl"], Source("run.sh", leaves)))
    assert found["orchestrator.batch_size"] == parts * mini
    assert found["trainer.minibatches"] == parts


def test_arguments_and_files_of_chat_templates(tmp_path):
    trl = read_text(tmp_path, "t.yaml", "chat_template_kwargs: {enable_thinking: false, budget: {tokens: 3}}\n")
    assert ours(convert(SYSTEMS["trl"], trl))["chat_template_kwargs"] == {
        "enable_thinking": False,
        "budget": {"tokens": 3},
    }
    command = """trl grpo --chat_template_kwargs '{"enable_thinking": true}' --chat_template_path some.jinja"""
    found = ours(convert(SYSTEMS["trl"], read_text(tmp_path, "trl.sh", command)))
    assert (found["chat_template_kwargs"], found["chat_template"]) == ({"enable_thinking": True}, "some.jinja")
    command = (
        "python3 -m verl.trainer.main_ppo +data.apply_chat_template_kwargs.enable_thinking=False"
        " data.train_files=a.parquet actor_rollout_ref.model.custom_chat_template='{{ messages }}'"
    )
    verl = convert(SYSTEMS["verl"], read_text(tmp_path, "verl.sh", command))
    assert ours(verl)["chat_template_kwargs"] == {"enable_thinking": False}
    assert "into a file" in why(verl, "actor_rollout_ref.model.custom_chat_template")
    prime = read_text(
        tmp_path, "p.toml", '[orchestrator]\nbatch_size = 8\n[inference.vllm]\nchat_template = "mine.jinja"\n'
    )
    assert ours(convert(SYSTEMS["prime-rl"], prime))["chat_template"] == "mine.jinja"


@pytest.mark.parametrize("given", ["3", "[1]", "some text", "{1: {a: 1}}", "{a: 1, a.b.c: 2}"])
def test_arguments_of_chat_templates_that_are_none_are_listed(given, tmp_path):
    text = f"chat_template_kwargs: {given}\n"
    done = convert(SYSTEMS["trl"], read_text(tmp_path, "t.yaml", text))
    assert_each_setting_is_in_one_place(done)


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_setting_of_ours_that_a_table_names_exists(system):
    """The page and the converted file must not name a setting that Sluice does not have."""
    model = run_config_class()
    for line in (line for row in SYSTEMS[system].rows for line in row.lines):
        table = ""
        for name in filter(None, line.ours.split(", ")):
            full = f"{table}{name}" if name.startswith(".") else name
            table = table if name.startswith(".") else name.rpartition(".")[0]
            resolve(model, full.split("."))


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_default_belongs_to_a_row(system):
    for name in SYSTEMS[system].defaults:
        assert any(row.names(name) for row in SYSTEMS[system].rows), name


BAD = [
    ("trl", "a.yaml", "learning_rate: [1\nloss_type: grpo\n", r"a\.yaml is not YAML.*line"),
    ("trl", "a.yaml", "learning_rate: \0\n", r"a\.yaml is not YAML: unacceptable character"),
    ("trl", "a.json", '{"learning_rate": }', r"a\.json is not JSON.*line 1"),
    ("trl", "a.json", "[1]", "give a JSON object"),
    ("trl", "a.yaml", "loss_type: grpo\nlearning_rate: fast\n", r"line 2: learning_rate is 'fast': give a number"),
    ("trl", "a.yaml", "num_generations: 2.5\n", "give a whole number"),
    ("trl", "a.yaml", "use_vllm: perhaps\n", "give true or false"),
    ("trl", "a.yaml", "num_generations: 7\n", "--processes"),
    ("trl", "a.yaml", "actor:\n  path: x\n", "not a configuration of TRL"),
    ("trl", "a.yaml", "- 1\n", "holds no settings"),
    ("prime-rl", "a.toml", "[orchestrator\n", "is not TOML.*line 1"),
    ("prime-rl", "a.toml", "seq_len = 1\n", "not an rl.toml of PRIME-RL"),
    ("prime-rl", "a.toml", "[orchestrator]\nbatch_size = 10\ngroup_size = 4\n", "no whole groups"),
    ("areal", "a.yaml", "model: x\n", "no table actor"),
    ("areal", "a.yaml", "actor: {path: x}\n", "without rollout"),
    ("verl", "a.sh", "echo hello\n", "no setting of verl's PPO trainer"),
    ("verl", "a.sh", "run algorithm.adv_estimator=grpo actor_rollout_ref.actor.loss_agg_mode=odd\n", "token-mean"),
    ("verl", "a.sh", "run algorithm.adv_estimator=grpo \\\n data.train_batch_size=many\n", "line 2.*give a number"),
]


@pytest.mark.parametrize("case", BAD, ids=[case[3] for case in BAD])
def test_bad_input_is_an_error_that_says_where_and_what_to_do(case, tmp_path, capsys):
    system, name, text, told = case
    (tmp_path / name).write_text(text)
    assert main(["config", "convert", str(tmp_path / name), "--from", system]) == 2
    printed = capsys.readouterr().err
    assert re.search(told, printed), printed
    assert "Traceback" not in printed


def test_a_value_that_sluice_refuses_is_an_error(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("learning_rate: -1\nloss_type: grpo\n")
    assert main(["config", "convert", str(tmp_path / "a.yaml"), "--from", "trl"]) == 2
    assert "trainer.lr" in capsys.readouterr().err


def test_a_missing_file_and_references_in_a_circle(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "none.yaml")
    (tmp_path / "a.yaml").write_text("actor: {path: '${actor.other}', other: '${actor.path}'}\nrollout: {x: 1}\n")
    done = convert(SYSTEMS["areal"], read(tmp_path / "a.yaml"))
    assert {each.name for each in done.unresolved} == {"actor.path", "actor.other"}


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("ab.= \\\n\"'$(){}[]#+-1:@"), max_size=60))
def test_no_script_makes_the_reader_fail(text, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "any.sh"
    file.write_text(text)
    read(file)


VALUES = st.sampled_from([None, True, False, -1, 0, 1, 2.5, "text", "", "1e-3", [], ["a", "b"], [1, 2], {}])


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_a_file_says_each_setting_has_its_place(system, data):
    patterns = [name for row in SYSTEMS[system].rows for line in row.lines for name in line.theirs]
    names = [name.replace("**", "a.b").replace(".*.", ".0.").replace("*", "x") for name in patterns]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=25))
    needed = {"trl": "loss_type", "verl": "algorithm.x", "prime-rl": "trainer.x", "areal": "actor.x"}[system]
    leaves = {name: Leaf(data.draw(VALUES)) for name in (needed, "gconfig.x", *chosen)}
    try:
        done = convert(SYSTEMS[system], Source("file", leaves))
    except ConfigError:
        return  # such as a learning rate that is no number
    assert_each_setting_is_in_one_place(done)
    tomllib.loads(document(done, "convert"))


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_has_the_table_of_the_code(system):
    page = (ROOT / f"docs/coming-from/{system}.md").read_text()
    begins = TABLE_BEGINS.format(name=system, page=f"docs/coming-from/{system}.md")
    found = page.partition(begins)[2].partition(TABLE_ENDS)[0].strip()
    command = f"sluice config docs --system {system} --output docs/coming-from/{system}.md"
    assert found == page_table(SYSTEMS[system]).strip(), f"run `{command}`"
