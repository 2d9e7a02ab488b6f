"""How replicas and trainer use the GPUs of a run that names no allocation: divided, or shared by memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.cli.plan import run as plan_command
from sluice.config import ConfigError, RunConfig, decide, load_run
from sluice.config.decide import assume_devices
from sluice.config.footprint import STEP
from sluice.plan import Machine, Machines, Plan, make_plan
from sluice.plan.devices import Arranged, arrange
from sluice.plan.local import child_specs
from sluice.plan.machines import GB, machines_of

ROOT = Path(__file__).parents[2]
COMMON = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
MODELS = {
    "Qwen3-0.6B": COMMON
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": COMMON
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12_288},
    "Qwen3-32B": COMMON
    | {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25_600},
    "Qwen3-30B-A3B": COMMON
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
"""Sizes that the makers publish."""

REFUSED = {
    "share each GPU": "too large for one GPU",
    "trains in one process only": "experts are trained in one process only, and are too large for it",
}
"""Words of a refusal, and the text for it in the table."""

ONE, EIGHT = machines_of("1xH100-80"), machines_of("8xH100-80")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories with nothing but a configuration."""
    root = tmp_path_factory.mktemp("models")
    for name, sizes in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(sizes))
    return {name: str(root / name) for name in MODELS}


@pytest.fixture(autouse=True)
def machines_stay_assumed_for_one_test_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield
    decide._assumed.clear()


def loaded(machines: Machines, *flags: str, replicas: int | None = None) -> tuple[RunConfig, Arranged]:
    """Return the settings as a command that starts a run on these machines gets them, and the decisions about devices."""
    assume_devices(max(machines.devices), machines.device_bytes)
    found: list[Arranged] = []

    def arranged(run: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
        found.append(arrange(run, machines, replicas=replicas))
        return found[-1].run, found[-1].notes

    return load_run(flags, arrange=arranged), found[-1]


def markdown_table(models: dict[str, str]) -> str:
    """The table of docs/plan.md."""
    lines = [
        "| model | GPUs | allocation | trainer, GB | a replica, GB | longest sample | decided for the trainer |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, directory in models.items():
        for text in ("1xH100-80", "8xH100-80", "4x8xH100-80", "8x8xH100-80"):
            machines = machines_of(text)
            count = sum(machines.devices)
            try:
                run, _ = loaded(machines, "--model", directory)
            except ConfigError as error:
                reason = next(reason for words, reason in REFUSED.items() if words in str(error))
                lines.append(f"| {name} | {count} | refused: {reason} | | | | |")
                continue
            plan = make_plan(run, machines)
            trainer = run.section("trainer")
            longest = run.section("rollout").max_model_len or COMMON["max_position_embeddings"]
            bounded = run.section("rollout").model_copy(update={"max_model_len": longest})
            step = trainer.footprint(run.model_copy(update={"rollout": bounded}), cuda=True)
            share = run.section("rollout").engine_args.get("gpu_memory_utilization")
            engine = f"{plan.part('rollout').device_gb:g}"
            decisions = [] if trainer.parallel.accumulate == "auto" else [f"gradients {trainer.parallel.accumulate}"]
            decisions += ["optimizer offloaded"] if trainer.optimizer_offload is True else []
            cells = [
                name,
                str(count),
                run.allocation_mode or "shared",
                f"{step.device / GB:.1f}",
                engine if share is None else f"{engine}, and may use {share * 80:.1f}",
                f"{longest:,}",
                ", ".join(decisions) or "-",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_table_in_the_documentation_is_what_the_plan_decides(models: dict[str, str]) -> None:
    assert markdown_table(models) in (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B"])
def test_eight_gpus_all_have_work_and_the_plan_accepts_it(models: dict[str, str], name: str) -> None:
    run, _ = loaded(EIGHT, "--model", models[name])
    plan = make_plan(run, EIGHT)
    assert plan.idle == ""
    assert not plan.shares_devices


@pytest.mark.parametrize("flags", [("--trainer.parallel.dp_shard", "8"), ("--peers.rollout", ",".join(["a:1"] * 8))])
def test_sizes_that_need_more_gpus_than_there_are_are_refused(models: dict[str, str], flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"need 9 GPUs, and there are 8: start fewer replicas"):
        loaded(EIGHT, "--model", models["Qwen3-0.6B"], *flags)


def test_each_side_is_held_to_the_gpus_that_it_gets(models: dict[str, str]) -> None:
    differ = Machines((Machine(4, 8, device_gb=48), Machine(8, 8, device_gb=80)))
    flags = ("--trainer.parallel.dp_shard", "8", "--rollout.engine_args.tensor_parallel_size", "2")
    run, _ = loaded(differ, "--model", models["Qwen3-32B"], *flags)
    assert str(run.allocation_mode) == "vllm:d2t2+fsdp:d8"


def test_experts_are_trained_on_one_gpu_and_sampled_on_the_others(tmp_path: Path) -> None:
    few = MODELS["Qwen3-30B-A3B"] | {"num_hidden_layers": 4, "vocab_size": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(few))
    run, _ = loaded(EIGHT, "--model", str(tmp_path))
    assert str(run.allocation_mode) == "vllm:d7+fsdp:d1"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4).filter(lambda each: sum(each) > 1))
def test_no_machine_with_several_gpus_keeps_one_idle_without_a_word(devices: list[int]) -> None:
    machines = Machines(tuple(Machine(each, 8, device_gb=80) for each in devices))
    run = arrange(_unset(), machines).run
    assert run.allocation_mode is not None
    assert make_plan(decide.allocated(run), machines).idle == ""


_CACHED: list[RunConfig] = []


def _unset() -> RunConfig:
    _CACHED[:] = _CACHED or [load_run([])]
    return _CACHED[0]


@pytest.mark.parametrize(
    ("flags", "replicas", "expected"),
    [
        ((), None, "vllm:d4+fsdp:d4"),
        ((), 2, "vllm:d2+fsdp:d6"),
        (("--trainer.parallel.dp-shard", "2"), None, "vllm:d6+fsdp:d2"),
        (("--trainer.parallel.tp", "4"), None, "vllm:d4+fsdp:d1t4"),
        (("--rollout.engine-args.tensor-parallel-size", "4"), None, "vllm:d1t4+fsdp:d4"),
        (("--rollout.engine", "transformers"), None, "transformers:d4+fsdp:d4"),
    ],
)
def test_numbers_that_are_set_stay_and_the_others_follow(
    models: dict[str, str], flags: tuple[str, ...], replicas: int | None, expected: str
) -> None:
    run, done = loaded(EIGHT, "--model", models["Qwen3-0.6B"], *flags, replicas=replicas)
    assert run.allocation_mode == expected
    assert done.notes[0].startswith(f"allocation_mode = {expected} (auto: 8 GPUs")
    assert make_plan(run, EIGHT, replicas=replicas).idle == ""


@pytest.mark.parametrize(
    "flags",
    [
        ("--trainer.parallel.dp-shard", "2", "--peers.rollout", "a:1,b:2"),
        ("--allocation-mode", "d1+d1"),
        ("--deterministic",),
        ("--trainer.device", "cpu"),
    ],
)
def test_gpus_that_the_settings_leave_over_are_named(models: dict[str, str], flags: tuple[str, ...]) -> None:
    run, done = loaded(EIGHT, "--model", models["Qwen3-0.6B"], *flags)
    assert done == Arranged(done.run)
    assert "of 8 GPUs stay idle: raise the numbers" in make_plan(run, EIGHT).idle


def test_a_model_that_fits_in_no_division_is_refused_with_an_allocation_and_its_numbers(models: dict[str, str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"2 GPUs cannot be divided .* With allocation_mode = vllm:d1\+fsdp:d1: a training step is estimated to need \d+",
    ):
        loaded(machines_of("2xH100-80"), "--model", models["Qwen3-32B"])


def test_one_gpu_is_divided_by_memory_and_the_trainer_starts_first(models: dict[str, str], tmp_path: Path) -> None:
    run, done = loaded(ONE, "--model", models["Qwen3-0.6B"])
    share, limit = run.section("rollout").engine_args["gpu_memory_utilization"], run.section("trainer").device_memory_gb
    plan = make_plan(run, ONE)
    assert (plan.part("trainer").device_gb or 0) <= limit
    assert share * 80 + limit == pytest.approx(0.92 * 80, abs=0.01)
    assert [note.split(" = ")[0] for note in done.notes] == [
        "rollout.engine_args.gpu_memory_utilization",
        "trainer.device_memory_gb",
    ]
    assert plan.part("rollout").waits_for == ("weightsync", "trainer")
    specs = {each.name: each for each in child_specs(plan, run, tmp_path / "run.toml", tmp_path, devices=["0"])}
    assert specs["rollout"].after == ("trainer",)
    assert specs["trainer"].after == ()


def test_the_trainer_offloads_before_the_engine_goes_without_room(models: dict[str, str]) -> None:
    machines = machines_of("1xH200-141")
    run, _ = loaded(machines, "--model", models["Qwen3-8B"])
    assert run.section("trainer").optimizer_offload is True
    assert run.section("rollout").engine_args["gpu_memory_utilization"] > 0.2
    make_plan(run, machines)


def _long(tmp_path: Path, name: str, positions: int) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name] | {"max_position_embeddings": positions}))
    return str(tmp_path)


def test_samples_are_no_longer_than_the_memory_of_both_sides_allows(tmp_path: Path) -> None:
    run, _ = loaded(EIGHT, "--model", _long(tmp_path, "Qwen3-8B", 1_000_000), "--allocation-mode", "vllm:d4+fsdp:d4")
    longest, memory = run.section("rollout").max_model_len, EIGHT.device_bytes
    assert longest % STEP == 0
    assert 8192 < longest < 1_000_000
    make_plan(run, EIGHT)

    def fits(tokens: int) -> bool:
        rollout = run.section("rollout").model_copy(update={"max_model_len": tokens})
        longer = run.model_copy(update={"rollout": rollout})
        needs = [longer.section(name).footprint(longer, cuda=True) for name in ("trainer", "rollout")]
        return all(each.device <= memory * each.share for each in needs)

    assert fits(longest)
    assert not fits(longest + STEP)


@pytest.mark.parametrize(
    "flags", [("--rollout.max_model_len", "32768"), ("--rollout.engine-args.max_model_len", "32768")]
)
def test_a_length_that_is_set_stays(tmp_path: Path, flags: tuple[str, str]) -> None:
    model = _long(tmp_path, "Qwen3-0.6B", 10_000_000)
    run, _ = loaded(EIGHT, "--model", model, "--allocation-mode", "vllm:d4+fsdp:d4", *flags)
    rollout = run.section("rollout")
    assert {rollout.engine_args.get("max_model_len"), rollout.max_model_len} == {None, 32_768}


def test_a_response_that_fits_nowhere_is_refused_and_does_not_shorten_samples(tmp_path: Path) -> None:
    model = _long(tmp_path, "Qwen3-8B", 10_000_000)
    flags = ("--allocation-mode=vllm:d4+fsdp:d4", "--orchestrator.sampling.max_tokens=9000000")
    run, _ = loaded(EIGHT, "--model", model, *flags)
    assert run.section("rollout").max_model_len is None
    with pytest.raises(ConfigError, match=r"is estimated to need .*lower token_budget or rollout\.max_model_len"):
        make_plan(run, EIGHT)


def test_an_engine_has_room_for_many_samples_before_more_engines_have_room_for_few(models: dict[str, str]) -> None:
    run, _ = loaded(EIGHT, "--model", models["Qwen3-32B"])
    assert str(run.allocation_mode) == "vllm:d1t2+fsdp:d6", "one GPU would hold the weights and 22,000 tokens"


def test_a_model_of_many_positions_takes_no_further_gpus_for_samples_that_cannot_be_trained(tmp_path: Path) -> None:
    run, _ = loaded(EIGHT, "--model", _long(tmp_path, "Qwen3-0.6B", 700_000))
    assert str(run.allocation_mode) == "vllm:d4+fsdp:d4"
    assert run.section("rollout").max_model_len < 700_000


def test_an_engine_alone_is_not_bounded_by_a_trainer_that_is_not_there(models: dict[str, str]) -> None:
    assume_devices(1, 40 * GB)
    run = load_run(["--model", models["Qwen3-8B"], "--rollout.follow_weights", "false"], "rollout")
    assert run.section("rollout").max_model_len is None


def test_each_side_of_different_machines_is_bounded_by_its_own_gpus(tmp_path: Path) -> None:
    differ = Machines((Machine(4, 8, device_gb=24), Machine(4, 8, device_gb=80)))
    run, done = loaded(
        differ, "--model", _long(tmp_path, "Qwen3-0.6B", 400_000), "--allocation-mode", "vllm:d4+fsdp:d4"
    )
    longest = run.section("rollout").max_model_len
    assert longest == run.section("rollout").model_copy(update={"max_model_len": None}).longest_sample(
        run, cuda=True, memory=24 * GB
    ), "the trainer's 80 GB would allow more"
    assert done.flags[-2:] == ("--rollout.max-model-len", str(longest))


def test_a_trainer_on_the_cpu_is_not_bounded_by_a_gpu(tmp_path: Path) -> None:
    run = load_run(["--model", _long(tmp_path, "Qwen3-0.6B", 131_072), "--trainer.device", "cpu"])
    assert run.section("trainer").longest_sample(run, cuda=True, memory=24 * GB) is None


def test_on_a_shared_gpu_samples_are_shortened_before_the_run_is_refused(models: dict[str, str]) -> None:
    small = machines_of("1xL4-16")
    run, _ = loaded(small, "--model", models["Qwen3-0.6B"])
    assert 256 < run.section("rollout").max_model_len < 40_960
    make_plan(run, small)


def test_vllm_takes_a_gpu_whatever_the_device_of_the_other_engine_is(models: dict[str, str]) -> None:
    run, _ = loaded(EIGHT, "--model", models["Qwen3-0.6B"], "--rollout.device", "cpu")
    assert run.allocation_mode == "vllm:d4+fsdp:d4"
    assert make_plan(run, EIGHT).part("rollout").devices == 1


def test_several_replicas_on_one_gpu_divide_the_engine_s_share(models: dict[str, str]) -> None:
    shares = [
        loaded(ONE, "--model", models["Qwen3-0.6B"], replicas=count)[0].section("rollout").engine_args
        for count in (1, 2)
    ]
    one, two = (each["gpu_memory_utilization"] for each in shares)
    assert two == pytest.approx(one / 2, abs=0.002)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("Qwen3-8B", (), r"share each GPU of 74\.5 GiB.*needs? .*the engine at least 17\.\d GiB"),
        ("Qwen3-0.6B", ("--rollout.engine-args.gpu_memory_utilization", "0.9"), r"= 0\.9 gives it 67\.1 GiB"),
        ("Qwen3-0.6B", ("--rollout.engine-args.gpu_memory_utilization", "0.01"), r"= 0\.01 gives it 0\.7 GiB"),
        ("Qwen3-0.6B", ("--trainer.device-memory-gb", "5"), r"a training step is estimated to need"),
    ],
)
def test_what_does_not_fit_on_one_gpu_is_refused_with_numbers(
    models: dict[str, str], name: str, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(ONE, "--model", models[name], *flags)


def test_a_share_that_is_set_stays_and_the_trainer_gets_the_rest(models: dict[str, str]) -> None:
    run, _ = loaded(ONE, "--model", models["Qwen3-0.6B"], "--rollout.engine-args.gpu_memory_utilization", "0.5")
    assert run.section("rollout").engine_args["gpu_memory_utilization"] == 0.5
    assert run.section("trainer").device_memory_gb == pytest.approx(0.42 * 80)


def test_the_transformers_engine_takes_what_it_needs_and_the_trainer_is_held_to_the_rest(
    models: dict[str, str],
) -> None:
    run, _ = loaded(ONE, "--model", models["Qwen3-0.6B"], "--rollout.engine", "transformers")
    assert "gpu_memory_utilization" not in run.section("rollout").engine_args
    assert 60 < run.section("trainer").device_memory_gb < 72


def test_a_model_on_the_hub_gets_half_of_the_gpu() -> None:
    run, done = loaded(ONE, "--model", "Qwen/Qwen3-0.6B")
    assert run.section("rollout").engine_args["gpu_memory_utilization"] == pytest.approx(0.46)
    assert "not known here" in done.notes[0]


def test_each_gpu_of_an_allocation_for_both_sides_is_divided(models: dict[str, str]) -> None:
    run, _ = loaded(EIGHT, "--model", models["Qwen3-8B"], "--allocation-mode", "d8")
    plan = make_plan(run, EIGHT)
    assert plan.shares_devices
    assert run.section("rollout").engine_args["gpu_memory_utilization"] * 80 > 22
    assert (plan.part("trainer").device_gb or 0) <= run.section("trainer").device_memory_gb


def test_machines_without_gpus_are_left_as_they_are() -> None:
    run = _unset()
    assert arrange(run, Machines.alike(cores=2)) == Arranged(run)


def test_commands_of_a_plan_carry_what_was_decided(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    plan_command(["--machines", "8xH100-80", "--as", "json", "--model", models["Qwen3-0.6B"]])
    command = partial(_command, json.loads(capsys.readouterr().out))
    assert command("trainer")[-2:] == ["--allocation-mode", "vllm:d4+fsdp:d4"]
    plan_command(["--machines", "1xH100-80", "--as", "json", "--model", models["Qwen3-0.6B"]])
    flags = _command(json.loads(capsys.readouterr().out), "rollout")
    words = flags[flags.index("rollout") + 1 :]
    read = load_run(words, "rollout")  # where the replica runs, the flags say the same
    assert 0.6 < read.section("rollout").engine_args["gpu_memory_utilization"] < 0.92
    assert (read.section("trainer").device_memory_gb or 0) * GB > 10 * GB


def _command(plan: dict, part: str) -> list[str]:
    return next(each["command"] for each in plan["parts"] if each["name"] == part)


def test_a_plan_s_own_word_about_idle_gpus_counts_each_once() -> None:
    plan: Plan = make_plan(decide.allocated(_unset().model_copy(update={"allocation_mode": "d2"})), EIGHT)
    assert plan.idle.startswith("6 of 8 GPUs stay idle")
