"""The estimate of what a training step holds: against measured peaks, in the documentation, and at the start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_programs import RankPrograms
from transformers import AutoConfig, AutoModelForCausalLM

from sluice.cli.main import run_service
from sluice.config import CommonConfig, ConfigError, decide, load_run
from sluice.config.decide import assume_devices
from sluice.config.footprint import USABLE
from sluice.decoder import Decoder
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.config import TrainerConfig
from trainer_svc.memory import BFLOAT16, estimate, fit, host_bytes

ROOT = Path(__file__).parents[2]
DEADLINE_S = 280.0

BASE = {"model_type": "qwen3", "hidden_size": 256, "vocab_size": 4096, "max_position_embeddings": 4096}
SHAPES = {
    "wide": {
        **BASE,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "tie_word_embeddings": False,
    },
    "deep": {
        **BASE,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 896,
        "tie_word_embeddings": True,
    },
    "experts": {
        **BASE,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 768,
        "moe_intermediate_size": 96,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "tie_word_embeddings": False,
    },
}
"""Configurations of the models whose steps are measured."""

FULL, KEPT = {"gradient_checkpointing": True}, {"gradient_checkpointing": False}
HALF = {"dtype": "bfloat16"}
ROWS = [512] * 2
CASES: dict[tuple[str, int], list[tuple[dict[str, Any], list[int]]]] = {
    ("wide", 1): [(FULL, ROWS), (KEPT, ROWS), (FULL | HALF, ROWS), (KEPT | HALF, ROWS), (FULL, [1024] * 2)],
    ("deep", 1): [(FULL | HALF, ROWS), (KEPT | HALF, ROWS), (FULL | {"lora": {"rank": 8}}, ROWS)],
    ("experts", 1): [(FULL, ROWS), (KEPT, ROWS)],
    ("wide", 2): [
        (FULL | {"parallel": {"accumulate": "whole"}}, ROWS),
        (FULL | {"parallel": {"accumulate": "sharded"}}, ROWS),
    ],
}
"""Settings beside the common ones, and the lengths of each rank's rows, by shape and number of ranks."""

PUBLISHED = {
    "Qwen3-0.6B": Decoder(28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
    "Qwen3-4B": Decoder(36, 2560, 9728, 32, 8, 128, 151_936, tied=True),
    "Qwen3-8B": Decoder(36, 4096, 12_288, 32, 8, 128, 151_936),
    "Qwen3-32B": Decoder(64, 5120, 25_600, 64, 8, 128, 151_936),
    "Qwen3-30B-A3B": Decoder(48, 2048, 768, 32, 4, 128, 151_936, experts=128, chosen=8),
}
"""Sizes of the models in the table of docs/memory.md, from the config.json that their makers publish."""

CAPACITIES = (80e9, 141e9)
"""Bytes of an H100 and of an H200."""


def markdown_table() -> str:
    """Return the table of docs/memory.md: what a device needs, on how many devices, and whether it fits."""
    lines = [
        "| model | training | devices | weights, gradients, moments | copies | activations | work | together | 80 GB | 141 GB | host |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    trainings: dict[str, dict] = {
        "full": {},
        "full, offload": {"optimizer_offload": True},
        "LoRA, rank 32": {"lora": {"rank": 32}},
    }
    for name, model in PUBLISHED.items():
        for training, settings in trainings.items():
            for devices in (1, 8):
                config = table_config(settings)
                held = estimate(model, config, processes=devices)
                fits = ["yes" if held.total <= size * USABLE else "no" for size in CAPACITIES]
                host = devices * host_bytes(model, config, processes=devices, published=BFLOAT16)
                sizes = [
                    held.weights + held.gradients + held.moments,
                    held.copies,
                    held.activations,
                    held.work,
                    held.total,
                ]
                cells = [f"{size / 1e9:.1f}" for size in sizes]
                lines.append(
                    "| " + " | ".join([name, training, str(devices), *cells, *fits, f"{host / 1e9:.0f}"]) + " |"
                )
    return "\n".join(lines)


def table_config(settings: dict) -> ComputeConfig:
    return ComputeConfig(token_budget=16_384, parallel={"accumulate": "sharded"}, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "ranks"), CASES, ids=[f"{shape}-{ranks}" for shape, ranks in CASES])
def test_the_estimate_is_within_15_percent_of_what_the_allocator_holds_beside_weights_and_moments(
    rank_programs: RankPrograms, tmp_path: Path, shape: str, ranks: int
) -> None:
    model, results = tmp_path / "model", tmp_path / "measured.json"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape])).save_pretrained(model)
    common = {"token_budget": 512, "logit_cells": 1 << 20, "dtype": "float32"}
    cases = [{"settings": common | settings, "lengths": lengths} for settings, lengths in CASES[shape, ranks]]
    logs = [tmp_path / f"log-{rank}" for rank in range(ranks)]
    words = ("memory_peak", str(model), json.dumps(cases), str(results))
    with rank_programs.group(ranks, *words, outputs=logs) as programs:
        for program, log in zip(programs, logs, strict=True):
            assert program.wait(DEADLINE_S) == 0, log.read_text()[-2000:]
    sizes = Decoder.of(SHAPES[shape])
    assert sizes is not None
    for case, measured in zip(cases, json.loads(results.read_text()), strict=True):
        config = ComputeConfig(**case["settings"])
        held = estimate(sizes, config, device="cpu", processes=ranks, longest=max(case["lengths"]))
        lasting = held.weights + held.moments
        assert lasting == pytest.approx(measured["weights"] + measured["moments"], rel=0.02), case
        beside = measured["peak"] - measured["weights"] - measured["moments"]
        assert held.total - lasting == pytest.approx(beside, rel=0.15), (case, held)
        assert held.total == pytest.approx(measured["peak"], rel=0.15), (case, held)


def test_the_table_in_the_documentation_is_what_the_formula_prints():
    assert markdown_table() in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_published_sizes_have_the_parameters_that_the_models_are_named_after():
    parameters = {name: sizes.parameters / 1e9 for name, sizes in PUBLISHED.items()}
    assert parameters == pytest.approx(
        {"Qwen3-0.6B": 0.596, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-32B": 32.76, "Qwen3-30B-A3B": 30.53}, rel=0.005
    )


@pytest.mark.parametrize(
    ("change", "use"),
    [
        ({"optimizer_offload": True}, "moments"),
        ({"token_budget": 4096}, "activations"),
        ({"logit_cells": 1 << 20}, "work"),
        ({"parallel": {"dp_shard": 8}}, "weights"),
        ({"parallel": {"tp": 8}}, "gradients"),
        ({"parallel": {"pp": 4}}, "weights"),
        ({"parallel": {"cp": 8}}, "activations"),
        ({"lora": {"rank": 16}}, "gradients"),
    ],
)
def test_each_setting_lowers_the_use_that_it_is_for(change, use):
    model = PUBLISHED["Qwen3-8B"]
    axes = change.get("parallel", {})
    processes = axes.get("dp_shard", 1) * axes.get("tp", 1) * axes.get("cp", 1) * axes.get("pp", 1)
    before = estimate(model, ComputeConfig(parallel={"accumulate": "sharded"}))
    changed = ComputeConfig(**change | {"parallel": {"accumulate": "sharded", **axes}})
    assert getattr(estimate(model, changed, processes=processes), use) < getattr(before, use)


def test_recomputed_activations_are_most_of_what_long_rows_cost():
    model, row = PUBLISHED["Qwen3-0.6B"], {"token_budget": 65_536}
    kept = estimate(model, ComputeConfig(gradient_checkpointing=False, **row)).activations
    assert kept > 100e9  # more than an H100 has
    assert estimate(model, ComputeConfig(**row)).activations < kept / 5


@pytest.fixture(autouse=True)
def machines_stay_assumed_for_one_test_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield
    decide._assumed.clear()


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (tmp_path / "tokenizer.json").touch()
    return tmp_path


def test_the_copy_of_the_last_version_has_the_precision_that_is_published_on_the_device(model):
    def held(publish_dtype: str, *, cuda: bool) -> int:
        footprint = TrainerConfig(publish_dtype=publish_dtype).footprint(CommonConfig(model=str(model)), cuda=cuda)
        assert footprint is not None
        return footprint.host_of_process

    assert held("auto", cuda=False) == held("float32", cuda=False) > held("bfloat16", cuda=False)
    assert held("auto", cuda=True) == held("bfloat16", cuda=True) < held("float32", cuda=True)


def test_a_dry_run_prints_the_estimate_and_refuses_what_cannot_fit(model, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--model", str(model), "--dtype", "bfloat16", "--dry-run"]
    with pytest.raises(SystemExit) as stopped:
        run_service("trainer", words)
    assert stopped.value.code == 0
    assert "# memory of one trainer device, estimated: 2" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"estimated to need 2\d\d\.\d GiB .*moments.*which has 131\.3 GiB: lower token_budget"
    ):
        run_service("trainer", [*words, "--device-memory-gb", "141"])
    with pytest.raises(SystemExit):
        run_service(
            "trainer", [*words, "--device-memory-gb", "141", "--lora.rank", "16", "--gradient-checkpointing", "true"]
        )


def test_a_reference_counts_with_the_width_that_it_has_on_the_device(model, monkeypatch):
    config = TrainerConfig(dtype="bfloat16", objective={"preset": "grpo", "kl_coef": 0.1}, reference={"model": "base"})
    sizes = []
    for devices in ("", "0"):  # a CPU keeps it in float32, CUDA in bfloat16
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        (line,) = config.check_start(CommonConfig(run="test", model=str(model)))
        sizes.append(float(re.findall(r"other models (\d+\.\d)", line)[0]))
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.01)


def test_only_models_whose_layers_are_alike_have_an_estimate():
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    assert Decoder.of(LLAMA) is not None
    found = Decoder.of(LLAMA | experts)
    assert found is not None
    assert (found.inner, found.experts, found.chosen) == (1024, 8, 2)
    assert Decoder.of(LLAMA | experts | {"shared_expert_intermediate_size": 512}) is None
    assert Decoder.of(LLAMA | experts | {"model_type": "jamba"}) is None
    dense = Decoder.of(LLAMA | experts | {"model_type": "doge", "is_moe": False, "moe_intermediate_size": None})
    assert dense is not None
    assert dense.experts == 0
    assert Decoder.of(LLAMA | {"kv_lora_rank": 512}) is None
    assert Decoder.of({"model_type": "gpt2"}) is None


def test_a_row_longer_than_the_budget_counts_as_a_micro_batch_of_its_own():
    model, config = PUBLISHED["Qwen3-8B"], ComputeConfig(token_budget=8192)
    usual, long = (estimate(model, config, longest=tokens) for tokens in (4096, 32_768))
    assert usual == estimate(model, config)
    assert long.activations == 4 * usual.activations
    assert long == estimate(model, ComputeConfig(token_budget=32_768))


def test_a_critic_of_its_own_counts_with_its_state_and_the_larger_of_both_steps():
    policy, small, large = PUBLISHED["Qwen3-4B"], PUBLISHED["Qwen3-0.6B"], PUBLISHED["Qwen3-8B"]
    alone = estimate(policy, ComputeConfig())
    beside = {
        name: estimate(policy, ComputeConfig(), critic=(critic, ComputeConfig()))
        for name, critic in (("small", small), ("large", large))
    }
    assert beside["small"].work == alone.work
    assert beside["small"].other_models == 16 * small.parameters
    by_muon = estimate(policy, ComputeConfig(), critic=(small, ComputeConfig(optimizer="muon")))
    assert by_muon.other_models < 14 * small.parameters
    step = estimate(large, ComputeConfig())
    held = beside["large"]
    assert held.copies + held.activations + held.work == step.copies + step.activations + step.work


def test_main_memory_holds_what_checkpoints_versions_and_offloaded_moments_need():
    model = PUBLISHED["Qwen3-8B"]
    usual = host_bytes(model, ComputeConfig(), published=BFLOAT16)
    assert usual == 15 * model.parameters, "12 bytes for a checkpoint, 2 for the last version and 1 for a difference"
    offloaded = host_bytes(model, ComputeConfig(optimizer_offload=True), published=BFLOAT16)
    assert usual < offloaded < usual + 2e9, "moments that are there anyway are not copied"
    assert host_bytes(model, ComputeConfig(), processes=8, published=BFLOAT16) == usual // 8
    assert host_bytes(model, ComputeConfig(lora={"rank": 16}), published=BFLOAT16) == 4 * model.parameters, "to load it"


@pytest.mark.parametrize(
    ("name", "ranks", "capacity", "given", "expected"),
    [
        ("Qwen3-8B", 4, 80e9, {"token_budget": 16_384}, {"parallel.accumulate": "sharded"}),
        ("Qwen3-8B", 4, 80e9, {}, {"parallel.accumulate": "whole"}),
        ("Qwen3-8B", 4, 80e9, {"parallel": {"accumulate": "whole"}, "optimizer_offload": False}, {}),
        ("Qwen3-8B", 4, None, {}, {}),
        ("Qwen3-0.6B", 1, 80e9, {}, {}),
        ("Qwen3-8B", 1, 141e9, {}, {"optimizer_offload": True}),
        ("Qwen3-8B", 1, 141e9, {"optimizer": "muon"}, {}),
        ("Qwen3-32B", 8, 80e9, {}, {"parallel.accumulate": "sharded", "optimizer_offload": True}),
        ("Qwen3-8B", 1, 80e9, {}, {"optimizer_offload": True}),
    ],
)
def test_what_saves_memory_is_chosen_only_where_the_faster_way_does_not_fit(name, ranks, capacity, given, expected):
    config, model = ComputeConfig(**given), PUBLISHED[name]
    usable = None if capacity is None else capacity * USABLE
    needed = partial(estimate, model, processes=ranks)
    decided = fit(config, needed, usable, device="cuda", shards=ranks)
    assert {setting: value for setting, (value, _) in decided.items()} == expected


def test_a_run_with_eight_billion_parameters_fits_eight_devices_by_defaults(model, monkeypatch, capsys):
    assume_devices(8, int(80e9))
    words = ["--model", str(model), "--allocation-mode", "vllm:d4+fsdp:d4", "--rollout.max-model-len", "8192"]
    run = load_run(words)
    assert run.trainer.parallel.accumulate == "whole"
    assert run.trainer.optimizer_offload == "auto"
    run.trainer.check_start(run)
    words += ["--trainer.token-budget", "32768"]
    larger = load_run(words)
    larger.trainer.check_start(larger)
    with pytest.raises(SystemExit):
        load_run([*words, "--dry-run"])
    assert (
        "# decided: trainer.parallel.accumulate = sharded (auto: whole gradients would need" in capsys.readouterr().out
    )
    words += ["--trainer.parallel.accumulate", "whole"]
    assert load_run(words).trainer.optimizer_offload is True
    explicit = load_run([*words, "--trainer.optimizer-offload", "false"])
    with pytest.raises(ConfigError, match="of which it may use"):
        explicit.trainer.check_start(explicit)


def test_samples_are_no_longer_than_the_rows_that_fit(model, monkeypatch):
    assume_devices(8, int(80e9))
    (model / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 131_072}))
    words = ["--model", str(model), "--allocation-mode", "vllm:d4+fsdp:d4"]
    run = load_run(words)
    assert 8192 < run.trainer.longest_sample(run, cuda=True, memory=int(80e9)) < 131_072
    run.trainer.check_start(run)
    answers = [*words, "--orchestrator.sampling.max-tokens", "100000"]
    with pytest.raises(ConfigError, match=r"lower token_budget or rollout\.max_model_len"):
        load_run(answers).trainer.check_start(load_run(answers))
    bounded = load_run([*words, "--rollout.max-model-len", "131072"])
    with pytest.raises(ConfigError, match=r"lower token_budget or rollout\.max_model_len"):
        bounded.trainer.check_start(bounded)
