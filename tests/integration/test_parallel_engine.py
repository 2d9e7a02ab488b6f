"""Several processes train what one process trains: on every axis of parallelism, and on axes together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_programs import RankPrograms
from small_models import latent_attention
from transformers import AutoModelForCausalLM, LlamaConfig, SmolLM3Config

from sluice.cli.init_model import ModelShape, init_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1000.0
"""Real seconds for all layouts that a group of processes trains; ten times what two quiet cores need."""

TOLERANCE = 1e-5
"""Relative to the norm of what is compared, in float32."""

SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=512)
TWO = {
    "dp_shard=2": ("grpo qwen3", "adapter qwen3", "one sequence"),
    "dp_replicate=2": ("gspo llama",),
    "tp=2": ("grpo tied", "grpo smollm3"),  # the second is an architecture known by transformers' plan alone
    "cp=2": ("values qwen3", "grpo latent"),  # the latter's values have heads of another size than its keys
    "pp=2": ("critic llama", "gspo llama by eager"),
}
THREE = {"pp=3": ("grpo smollm3",)}
FOUR = {"tp=2,cp=2": ("grpo qwen3",), "dp_replicate=2,dp_shard=2": ("one sequence",), "pp=2,dp_shard=2": ("grpo tied",)}
"""Each axis, alone and with another one, and each case on one of them."""

SOME = ("grpo qwen3", "gspo llama", "one sequence")
OTHERS_OF_TWO = {
    "dp_shard=2": ("gspo llama", "grpo tied", "values qwen3", "critic llama"),
    "dp_replicate=2": ("grpo qwen3", "grpo tied", "values qwen3", "critic llama", "one sequence"),
    "tp=2": ("grpo qwen3", "gspo llama", "values qwen3", "critic llama", "one sequence"),
    "cp=2": (
        *("grpo qwen3", "gspo llama", "grpo tied", "critic llama", "adapter qwen3", "one sequence"),
        "grpo tied by aot_eager",  # its weights are sharded as well, and activations computed again: compiled for a minute
    ),
    "pp=2": ("grpo qwen3", "gspo llama", "grpo tied", "values qwen3", "one sequence"),
}
OTHERS_OF_FOUR = {
    "dp_shard=2,tp=2": SOME,
    "dp_shard=2,cp=2": SOME,
    "tp=2,cp=2": ("gspo llama", "one sequence"),
    "dp_replicate=2,dp_shard=2": ("grpo qwen3", "gspo llama"),
    "pp=2,dp_shard=2": ("one sequence",),
    "pp=2,tp=2": ("grpo tied",),
    "pp=2,cp=2": ("gspo llama",),
    "cp=4": ("gspo llama",),  # more processes than key-value heads
}
"""The other cases of the matrix, which `make test-soak` runs."""

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    init_model(root / "qwen3", SHAPE, seed=3)
    init_model(root / "tied", replace(SHAPE, tie=True), seed=4)
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=129,  # no multiple of the processes
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    # Several files in half precision, as large models have.
    AutoModelForCausalLM.from_config(llama).bfloat16().save_pretrained(root / "llama", max_shard_size="20KB")
    smollm3 = SmolLM3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,  # the last one without rotary positions
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(smollm3).save_pretrained(root / "smollm3")
    AutoModelForCausalLM.from_config(latent_attention(layers=2)).save_pretrained(root / "latent")
    return root


def run_ranks(programs: RankPrograms, count: int, models: Path, results: Path, *layouts: str) -> Found:
    """Start the ranks, wait for all, and read what rank 0 found."""
    logs = [results.with_suffix(f".{rank}.log") for rank in range(count)]
    with programs.group(count, "parallel_rank", str(models), str(results), *layouts, outputs=logs) as ranks:
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)
    found: Found = json.loads(results.read_text())
    return found


def named(layouts: dict[str, tuple[str, ...]]) -> list[str]:
    return [f"{layout}/{','.join(cases)}" for layout, cases in layouts.items()]


@pytest.fixture(scope="module")
def two(rank_programs: RankPrograms, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(rank_programs, 2, models, tmp_path_factory.mktemp("two") / "found.json", *named(TWO), "checks")


@pytest.fixture(scope="module")
def three(rank_programs: RankPrograms, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(rank_programs, 3, models, tmp_path_factory.mktemp("three") / "found.json", *named(THREE), "groups")


@pytest.fixture(scope="module")
def four(rank_programs: RankPrograms, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(rank_programs, 4, models, tmp_path_factory.mktemp("four") / "found.json", *named(FOUR))


@pytest.fixture(scope="module")
def others_of_two(rank_programs: RankPrograms, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(rank_programs, 2, models, tmp_path_factory.mktemp("two") / "found.json", *named(OTHERS_OF_TWO))


@pytest.fixture(scope="module")
def others_of_four(rank_programs: RankPrograms, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(rank_programs, 4, models, tmp_path_factory.mktemp("four") / "found.json", *named(OTHERS_OF_FOUR))


def assert_exact(differences: dict[str, float]) -> None:
    assert {"loss", "grad_norm", "gradients", "weights", "forward", "evaluated"} <= differences.keys()
    assert {name: each for name, each in differences.items() if not each <= TOLERANCE} == {}


def each_case(layouts: dict[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("layout", "case"), [(one, case) for one, cases in layouts.items() for case in cases]
    )


@each_case(TWO)
def test_two_processes_train_what_one_trains(two: Found, layout: str, case: str) -> None:
    assert_exact(two[layout][case])


@each_case(THREE)
def test_three_stages_train_what_one_process_trains(three: Found, layout: str, case: str) -> None:
    assert_exact(three[layout][case])


def test_a_group_is_connected_before_two_of_its_processes_exchange_anything(three: Found) -> None:
    """NCCL connects a group in its first operation; a transfer between two of three stages must not be that."""
    everyone = [0, 1, 2]
    once = {key: [everyone] for key in ("pp", "dp_replicate", "dp_shard", "tp")}
    assert three["groups"] == once | {"cp": [everyone, everyone]}, "weights are sharded over `cp` too"


@each_case(FOUR)
def test_four_processes_train_what_one_trains(four: Found, layout: str, case: str) -> None:
    assert_exact(four[layout][case])


@pytest.mark.soak
@each_case(OTHERS_OF_TWO)
def test_two_processes_train_what_one_trains_in_the_other_cases(others_of_two: Found, layout: str, case: str) -> None:
    assert_exact(others_of_two[layout][case])


@pytest.mark.soak
@each_case(OTHERS_OF_FOUR)
def test_four_processes_train_what_one_trains_in_the_other_cases(others_of_four: Found, layout: str, case: str) -> None:
    assert_exact(others_of_four[layout][case])


def test_the_example_learns_on_two_ranks_and_exports(rank_programs: RankPrograms, models: Path, tmp_path: Path) -> None:
    program = (str(ROOT / "examples" / "parallel" / "train.py"), str(models / "qwen3"), str(tmp_path / "out"))
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    with rank_programs.group(2, "script_rank", *program, "--tp", "2", outputs=logs) as ranks:
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    losses = [float(line.split()[3]) for line in logs[0].read_text().splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_gradients_are_summed_once_per_step_however_many_micro_batches_it_has(two: Found) -> None:
    groups = SHAPE.layers + 1
    default, kept, sharded = (two["checks"]["exchanges"][name] for name in ("default", "kept", "sharded"))
    each_rank = default["micro_batches"] // 2
    assert each_rank >= 4
    assert default["reduce_scatter_single"] == kept["reduce_scatter_single"] == groups
    assert sharded["reduce_scatter_single"] == groups * each_rank
    assert kept["all_gather_single"] == groups
    assert default["all_gather_single"] > groups


def test_a_batch_that_one_rank_refuses_is_refused_by_all(two: Found) -> None:
    other, own = two["checks"]["refused"]
    assert "raised ValueError" in other
    assert "outside of the vocabulary" in own


def test_an_update_that_one_rank_refuses_is_refused_by_all(two: Found) -> None:
    other, own = two["checks"]["update refused"]
    assert "raised ValueError" in other
    assert "has no reward" in own


def test_ranks_that_share_rows_must_have_the_same(two: Found) -> None:
    assert all("ranks 0, 1 share their rows" in said for said in two["checks"]["other rows"])


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(two: Found) -> None:
    assert two["checks"]["not finite"] == [[True, True], [True, True]]


def test_ranks_hold_pieces_under_the_same_names_that_make_up_the_model(two: Found) -> None:
    found = two["checks"]["pieces"]
    assert found["names"][0] == found["names"][1]
    assert "lm_head.weight" not in found["names"][0]
    assert found["elements"] == found["whole"]


def test_an_export_of_a_cut_model_is_whole_and_tied(two: Found) -> None:
    assert two["checks"]["export"] == {"same weights": True, "tied": True}


def test_a_process_reads_its_own_share_of_the_weights(two: Found) -> None:
    found = two["checks"]["memory"]
    assert min(found["whole"]) > 0.9 * found["float32"]
    assert max(found["own share"]) < 0.7 * found["float32"]


def test_bfloat16_has_masters_in_float32_and_the_results_of_one_process(two: Found) -> None:
    found = two["checks"]["bfloat16"]
    assert found["same"]
    assert found["masters"] == ["torch.float32"]
    assert found["loss"] == pytest.approx(found["of one"], rel=2e-3)
