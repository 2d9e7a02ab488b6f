"""The estimate of what a training step holds: against measured peaks, in the documentation, and at the start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rank_programs import RankPrograms

from sluice.cli.main import run_service
from sluice.config import CommonConfig, ConfigError
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.config import TrainerConfig
from trainer_svc.memory import Decoder, estimate

ROOT = Path(__file__).parents[2]
DEADLINE_S = 280.0

CHARACTERS = "".join(chr(0x4E00 + number) for number in range(4000))
SHAPES = {
    "5 M": {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_dim": 32, "mlp": 768},
    "16 M": {"hidden": 384, "layers": 6, "heads": 6, "kv_heads": 2, "head_dim": 64, "mlp": 1152},
}

PUBLISHED = {
    "Qwen3-0.6B": Decoder(28, 1024, 3072, 16, 8, 128, 151_936, tied=True),
    "Qwen3-4B": Decoder(36, 2560, 9728, 32, 8, 128, 151_936, tied=True),
    "Qwen3-8B": Decoder(36, 4096, 12_288, 32, 8, 128, 151_936),
    "Qwen3-32B": Decoder(64, 5120, 25_600, 64, 8, 128, 151_936),
}
"""Sizes of the models in the table of docs/memory.md, from the config.json that their makers publish."""

CAPACITIES = (80e9, 141e9)
"""Bytes of an H100 and of an H200."""

RESERVED = 0.08
"""Share of a device's memory that is left for what is not counted."""


def markdown_table() -> str:
    """Return the table of docs/memory.md: what a device needs, on how many devices, and whether it fits."""
    lines = [
        "| model | training | devices | weights, gradients, moments | copies | activations | logits | together | 80 GB | 141 GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    trainings: dict[str, dict] = {
        "full": {},
        "full, offload": {"optimizer_offload": True},
        "LoRA, rank 32": {"lora": {"rank": 32}},
    }
    for name, model in PUBLISHED.items():
        for training, settings in trainings.items():
            for devices in (1, 8):
                held = estimate(model, table_config(settings), processes=devices)
                fits = ["yes" if held.total <= size * (1 - RESERVED) else "no" for size in CAPACITIES]
                sizes = [
                    held.weights + held.gradients + held.moments,
                    held.copies,
                    held.activations,
                    held.logits,
                    held.total,
                ]
                cells = [f"{size / 1e9:.1f}" for size in sizes]
                lines.append("| " + " | ".join([name, training, str(devices), *cells, *fits]) + " |")
    return "\n".join(lines)


def table_config(settings: dict) -> ComputeConfig:
    return ComputeConfig(token_budget=16_384, parallel={"accumulate": "sharded"}, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recompute", "tokens"),
    [
        ("5 M", True, 2048),
        ("5 M", False, 2048),
        ("16 M", True, 1024),
        pytest.param("16 M", True, 2048, marks=pytest.mark.soak),
        pytest.param("16 M", False, 2048, marks=pytest.mark.soak),
    ],
)
def test_the_estimate_is_within_15_percent_of_the_allocators_peak(
    rank_programs: RankPrograms, tmp_path: Path, name: str, recompute: bool, tokens: int
) -> None:
    shape = {**SHAPES[name], "vocabulary_characters": CHARACTERS, "max_positions": 1024}
    settings = {"token_budget": tokens, "logit_cells": 1 << 21, "gradient_checkpointing": recompute, "dtype": "float32"}
    told = json.dumps({"shape": shape, "settings": settings})
    log, results = tmp_path / "log", tmp_path / "measured.json"
    program = rank_programs.start(
        "memory_peak", str(tmp_path / "model"), told, str(results), environment={}, output=log
    )
    try:
        assert program.wait(DEADLINE_S) == 0, log.read_text()[-2000:]
    finally:
        program.kill()
    measured = json.loads(results.read_text())
    sizes = Decoder.of(measured["model"])
    assert sizes is not None
    held = estimate(sizes, ComputeConfig(**settings), device="cpu")
    assert held.total == pytest.approx(measured["peak_bytes"], rel=0.15)


def test_the_table_in_the_documentation_is_what_the_formula_prints():
    assert markdown_table() in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_published_sizes_have_the_parameters_that_the_models_are_named_after():
    parameters = {name: sizes.parameters / 1e9 for name, sizes in PUBLISHED.items()}
    assert parameters == pytest.approx(
        {"Qwen3-0.6B": 0.596, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19, "Qwen3-32B": 32.76}, rel=0.005
    )


@pytest.mark.parametrize(
    ("change", "use"),
    [
        ({"optimizer_offload": True}, "moments"),
        ({"token_budget": 4096}, "activations"),
        ({"logit_cells": 1 << 20}, "logits"),
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


def test_a_dry_run_prints_the_estimate_and_refuses_what_cannot_fit(model, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["--model", str(model), "--dtype", "bfloat16", "--dry-run"]
    with pytest.raises(SystemExit) as stopped:
        run_service("trainer", words)
    assert stopped.value.code == 0
    assert "# memory of one trainer device, estimated: 1" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"estimated to need 1\d\d\.\d GiB .*moments.*which has 131\.3 GiB: lower token_budget"
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


def test_experts_have_no_estimate():
    assert Decoder.of(LLAMA) is not None
    assert Decoder.of(LLAMA | {"num_experts": 8}) is None
    assert Decoder.of({"model_type": "gpt2"}) is None
