"""`sluice dpo` and `sluice reward-model`: what they learn, from the command line to a directory that transformers loads."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from test_sft import write_rows
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from sluice.config import ConfigError
from sluice.render import ChatRenderer
from trainer_svc.batch.rows import Outputs, empty_batch
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.commands import DPO, REWARD_MODEL
from trainer_svc.offline.config import DpoConfig
from trainer_svc.offline.data import (
    Examples,
    batches,
    every_row,
    hold_out,
    load_examples,
    precompute_logprobs,
    render_pair,
)
from trainer_svc.offline.losses import PreferenceLoss, ScoreLoss, count_pairs, preference_figures

QUESTION = {"role": "user", "content": "ab"}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair(chosen: str, rejected: str) -> dict[str, object]:
    return {"prompt": [QUESTION], "chosen": [answer(chosen)], "rejected": [answer(rejected)]}


def vowels_preferred(count: int, seed: int) -> list[dict[str, object]]:
    """Answers of vowels are preferred to answers of consonants."""
    draw = random.Random(seed)
    kinds = ("aeiou", "bcdfg")
    return [pair(*("".join(draw.choices(kind, k=draw.randint(1, 6))) for kind in kinds)) for _ in range(count)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def renderer(model_dir) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(model_dir))


def load(path: Path, renderer: ChatRenderer, **limits) -> Examples:
    return load_examples(
        str(path), "train", partial(render_pair, renderer), **({"max_length": 64, "drop_long": False} | limits)
    )


def engine(model_dir: Path, **settings) -> TrainEngine:
    return TrainEngine(ComputeConfig(device="cpu", **({"lr": 1e-3} | settings)), model_dir)


@pytest.mark.parametrize(
    "row",
    [
        pair("yes", "no"),
        {"chosen": [QUESTION, answer("yes")], "rejected": [QUESTION, answer("no")]},
        {"prompt": "<|user|>ab<|end|><|assistant|>", "chosen": "yes", "rejected": "no"},
        {"prompt": "ab", "chosen": [answer("yes")], "rejected": [answer("no")]},
        {"prompt": [QUESTION], "chosen": "yes", "rejected": "no"},
    ],
)
def test_every_kind_of_row_gives_the_same_pair(renderer, tmp_path, row):
    chosen, rejected = load(write_rows(tmp_path / "r.jsonl", [row]), renderer).rows(0)
    for each, text in ((chosen, "yes<|end|>"), (rejected, "no<|end|>")):
        assert renderer.tokenizer.decode(each.input_ids) == f"<|user|>ab<|end|><|assistant|>{text}"
        assert renderer.tokenizer.decode(each.input_ids[each.loss_mask]) == text
    assert (chosen.group_id, chosen.reward, rejected.reward) == (rejected.group_id, 1.0, 0.0)


def test_the_assistant_turns_of_a_prompt_are_not_learned(renderer, tmp_path):
    row = {"prompt": [QUESTION, answer("old"), QUESTION], "chosen": [answer("yes")], "rejected": [answer("no")]}
    chosen, _ = load(write_rows(tmp_path / "r.jsonl", [row]), renderer).rows(0)
    assert renderer.tokenizer.decode(chosen.input_ids[chosen.loss_mask]) == "yes<|end|>"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [pair("a", "b"), {"prompt": "x", "chosen": "y"}],
            r"line 2 of .*r.jsonl: a row needs `prompt`, `chosen` and `rejected`",
        ),
        ([pair("a", "a")], "chosen and rejected are the same"),
        ([{side: [QUESTION, answer("a")] for side in ("chosen", "rejected")}], "chosen and rejected are the same"),
        ([pair("a", "b" * 100)], r"line 1 of .*r.jsonl has \d+ tokens, more than max_length 64"),
    ],
)
def test_pairs_that_cannot_be_used_are_named_by_their_line(renderer, tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        load(write_rows(tmp_path / "r.jsonl", rows), renderer)


def test_held_out_pairs_are_none_that_are_trained_on(renderer, tmp_path):
    data = load(write_rows(tmp_path / "r.jsonl", vowels_preferred(20, 0)), renderer)
    parts = hold_out(data, 0.25, seed=3)
    names = [{row.trajectory_id for row in every_row(part)} for part in (parts.train, parts.held_out)]
    assert (len(parts.train), len(parts.held_out)) == (15, 5)
    assert not names[0] & names[1]
    with pytest.raises(ConfigError, match="holds out 0"):
        hold_out(data, 0.001, seed=3)


@pytest.mark.parametrize(
    "settings", [{"objective": "dpo", "label_smoothing": 0.1, "sft_weight": 0.5}, {"objective": "ipo", "beta": 0.5}]
)
def test_loss_and_gradient_of_pairs_do_not_depend_on_packing(model_dir, renderer, tmp_path, settings):
    config = DpoConfig(model="m", data="d", **settings)
    data = load(write_rows(tmp_path / "r.jsonl", vowels_preferred(7, 1)), renderer)
    found = []
    for budget, fold in ((10_000, True), (40, True), (1, False)):
        trainer = engine(model_dir, token_budget=budget, fold_prompts=fold, grad_clip=0.0)
        trainer.network.model.double()
        taken: list[torch.Tensor] = []

        def keep(_: object, *__: object, trainer=trainer, taken=taken) -> None:
            taken.append(torch.cat([each.grad.flatten() for each in trainer.network.model.parameters()]))

        rows = next(batches(precompute_logprobs(trainer, data, "reference_logprobs"), 9, seed=0))
        for row in rows:
            row.reference_logprobs.sub_(0.05 * row.input_ids)  # a reference apart from the policy
        trainer.optimizer.parts[0].register_step_pre_hook(keep)
        metrics = trainer.train_batch(rows, PreferenceLoss(config), count_pairs, whole_groups=True)
        found.append((metrics.loss, taken[0], preference_figures(metrics.sums), metrics.micro_batches))
    assert found[0][3] < found[1][3] < found[2][3] == 9
    for loss, gradient, figures, _ in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert float((gradient - found[0][1]).norm() / found[0][1].norm()) < 1e-6
        assert figures == pytest.approx(found[0][2], rel=1e-5)


@pytest.mark.parametrize(
    "loss", [PreferenceLoss(DpoConfig(model="m", data="d", sft_weight=0.5)), ScoreLoss()], ids=["pairs", "scores"]
)
def test_a_rank_without_pairs_keeps_the_others_company(loss):
    nothing = torch.zeros(0, requires_grad=True)
    total, sums = loss(Outputs(logprobs=nothing, values=nothing), empty_batch())
    assert (float(total.detach()), float(sums["pairs"])) == (0.0, 0.0)


def test_at_the_start_policy_and_reference_are_one(model_dir, renderer, tmp_path):
    data = load(write_rows(tmp_path / "r.jsonl", vowels_preferred(5, 1)), renderer)
    trainer = engine(model_dir)
    rows = every_row(precompute_logprobs(trainer, data, "reference_logprobs"))
    loss = PreferenceLoss(DpoConfig(model="m", data="d"))
    metrics = trainer.eval_batch(rows, loss, count_pairs, whole_groups=True)
    assert metrics.loss == pytest.approx(0.693147, abs=1e-6)
    assert preference_figures(metrics.sums)["kl"] == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(ValueError, match="pack whole groups"):
        trainer.eval_batch([replace(row, group_id="") for row in rows], loss, count_pairs, whole_groups=True)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "ipo"])
def test_a_run_learns_what_is_preferred(model_dir, tmp_path, capsys, objective):
    rows = write_rows(tmp_path / "rows.jsonl", vowels_preferred(80, 0))
    words = ["--model", str(model_dir), "--data", str(rows), "--output", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--lr", "3e-3", "--max-steps", "20", "--batch-size", "16", "--eval-share", "0.2", "--log-every", "10"]
    assert DPO.run([*words, "--objective", objective]) == 0
    lines = capsys.readouterr().out.splitlines()
    before, after = (line for line in lines if line.startswith("held out"))
    assert before.startswith(
        f"held out after 0 steps: loss {0.6931 if objective == 'dpo' else 25:.4f}  accuracy 0.0000"
    )
    assert "accuracy 1.0000" in after
    assert "20 steps on 64 pairs" in lines[-1]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_a_reward_model_scores_in_transformers_as_it_was_trained(model_dir, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", vowels_preferred(80, 0))
    words = ["--model", str(model_dir), "--data", str(rows), "--output", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--lr", "3e-3", "--max-steps", "20", "--batch-size", "16", "--centering", "0.01"]
    held_out = write_rows(tmp_path / "held_out.jsonl", vowels_preferred(30, 1))
    assert REWARD_MODEL.run([*words, "--eval-data", str(held_out)]) == 0
    evaluated = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held out")]
    assert "accuracy 1.0000" in evaluated[-1]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    pairs = [json.loads(line) for line in held_out.read_text().splitlines()]
    texts = [
        tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
        for row in pairs
        for side in ("chosen", "rejected")
    ]
    inputs = tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        scores = scorer(**inputs).logits.squeeze(-1).unflatten(0, (-1, 2))
    margin = float((scores[:, 0] - scores[:, 1]).mean())
    assert f"margin {margin:.4f}  score {float(scores.mean()):.4f}" in evaluated[-1]


def test_settings_that_do_not_go_together_are_refused(tmp_path):
    rows = write_rows(tmp_path / "d.jsonl", [])
    for words, message in (
        (["--objective", "ipo", "--label-smoothing", "0.1"], "objective ipo has no label_smoothing"),
        (["--eval-share", "0.1", "--eval-data", "x.jsonl"], "are both set"),
    ):
        with pytest.raises(ConfigError, match=message):
            DPO.run(["--model", "m", "--data", str(rows), *words])
