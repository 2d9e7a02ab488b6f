"""LoRA in the training engine: what is trained, what is written, and that PEFT computes the same."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file
from test_preferences import vowels_preferred
from test_sft import chat, write_rows
from tiny_policy import TINY, load_state, policy_step, ragged_batch, row, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, Qwen3MoeConfig

from sluice.cli.init_model import ModelShape, init_model
from sluice.config import ConfigError
from sluice.render import ChatRenderer
from trainer_svc.batch.rows import count_loss_tokens
from trainer_svc.checkpoint.saver import EngineCheckpoints
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.commands import DPO, MERGE_ADAPTER, REWARD_MODEL, SFT
from trainer_svc.offline.config import SftConfig
from trainer_svc.offline.runs import run

LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("lora"))


def engine(model_dir: Path, lora: dict[str, object] | None = None, **settings) -> TrainEngine:
    defaults = {"lr": 1e-2, "device": "cpu", "lora": LORA | (lora or {})}
    return TrainEngine(TrainerConfig(**(defaults | settings)), model_dir)


def trained(model_dir: Path, steps: int = 3, **settings) -> TrainEngine:
    """An engine whose adapter has moved."""
    trainer = engine(model_dir, **settings)
    for seed in range(steps):
        policy_step(trainer, ragged_batch(seed))
    return trainer


def said(model: torch.nn.Module, sequence) -> torch.Tensor:
    """Log-probabilities of the loss tokens by plain transformers."""
    places = torch.where(sequence.loss_mask)[0]
    with torch.no_grad():
        logits = model(input_ids=sequence.input_ids[None]).logits[0, places - 1] / sequence.temperature
    return logits.log_softmax(-1).gather(1, sequence.input_ids[places, None])[:, 0]


def furthest(trainer: TrainEngine, model: torch.nn.Module) -> float:
    """Largest difference between the engine's log-probabilities and a model's."""
    rows = ragged_batch(9)
    ours = trainer.forward(rows)
    return max(
        float((mine[each.loss_mask] - said(model, each)).abs().max()) for each, mine in zip(rows, ours, strict=True)
    )


def test_a_fresh_adapter_changes_nothing_and_only_its_factors_are_trained(model_dir):
    trainer, plain = engine(model_dir), TrainEngine(ComputeConfig(device="cpu"), model_dir)
    rows = ragged_batch(1)
    for adapted, bare in zip(trainer.forward(rows), plain.forward(rows), strict=True):
        assert torch.equal(adapted.nan_to_num(), bare.nan_to_num())
    named = dict(trainer.network.model.named_parameters())
    before = {name: each.detach().clone() for name, each in named.items()}
    gradients: set[str] = set()
    trainer.optimizer.parts[0].register_step_pre_hook(
        lambda *_: gradients.update(name for name, each in named.items() if each.grad is not None)
    )
    for _ in range(2):  # the first factor has a gradient once the second is not 0 any more
        policy_step(trainer, rows)
    assert gradients == {name for name in named if ".lora_" in name}
    assert {name for name, each in named.items() if not torch.equal(each, before[name])} == gradients
    assert len(gradients) == 2 * 2 * 7
    assert sum(each.numel() for name, each in named.items() if name in gradients) == sum(
        tensor.numel() for name, tensor in trainer.state_tensors().items() if name.startswith("model.")
    )


@pytest.mark.slow
def test_what_is_written_is_what_peft_writes_and_computes_the_same(model_dir, tmp_path):
    trainer = trained(model_dir)
    trainer.export_hf(tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours")
    assert furthest(trainer, loaded) < 1e-5
    loaded.save_pretrained(tmp_path / "pefts")
    ours, pefts = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "pefts"))
    assert ours.keys() == pefts.keys()
    assert all(torch.equal(ours[name], pefts[name]) for name in ours)
    published = trainer.adapter.tensors()
    assert ours.keys() == published.keys()
    assert all(torch.equal(ours[name], published[name]) for name in ours)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "pefts")]
    for config in configs:
        config["target_modules"].sort()  # PEFT keeps a set
    assert configs[0] == configs[1]
    assert configs[0]["base_model_name_or_path"] == str(model_dir)
    assert (configs[0]["r"], configs[0]["lora_alpha"]) == (4, 8.0)
    AutoTokenizer.from_pretrained(tmp_path / "ours")


def test_merged_weights_compute_what_base_and_adapter_compute(model_dir, tmp_path):
    trainer = trained(model_dir, lora={"merge": True, "target_modules": ["q_proj", "down_proj"]})
    trainer.export_hf(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert furthest(trainer, merged) < 1e-5
    live = trainer.live_tensors()
    assert live.keys() == merged.state_dict().keys()
    assert all(torch.allclose(live[name], tensor, atol=1e-6) for name, tensor in merged.state_dict().items())
    assert furthest(trainer, AutoModelForCausalLM.from_pretrained(model_dir)) > 1e-3


@pytest.mark.slow
def test_an_adapter_is_merged_on_request(model_dir, tmp_path, capsys):
    trainer = trained(model_dir)
    trainer.export_hf(tmp_path / "adapter")
    words = ["--adapter", str(tmp_path / "adapter"), "--output", str(tmp_path / "merged")]
    assert MERGE_ADAPTER.run(words) == 0
    assert furthest(trainer, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) < 1e-5
    assert f"{model_dir} with {tmp_path / 'adapter'} merged in" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="exists: remove it"):
        MERGE_ADAPTER.run(words)
    other = other_base(tmp_path)
    with pytest.raises(
        ConfigError, match=r"the adapter does not belong to this base \(size mismatch for .*with --model$"
    ):
        MERGE_ADAPTER.run([*words[:2], "--output", str(tmp_path / "wrong"), "--model", str(other)])
    for layers, told in ((TINY.layers + 1, "it lacks"), (TINY.layers - 1, "it has")):
        init_model(tmp_path / str(layers), replace(TINY, layers=layers))
        with pytest.raises(
            ConfigError, match=rf"the adapter does not belong to this base \({told} base_model\.model.*with --model$"
        ):
            MERGE_ADAPTER.run([*words[:2], "--output", str(tmp_path / "wrong"), "--model", str(tmp_path / str(layers))])
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(ConfigError, match="holds no adapter"):
        MERGE_ADAPTER.run(["--adapter", str(other), "--output", str(tmp_path / "wrong")])


def other_base(directory: Path) -> Path:
    init_model(directory / "other", ModelShape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=16))
    return directory / "other"


@pytest.mark.slow
def test_dropout_acts_in_training_steps_alone(model_dir):
    losses = []
    for dropout in (0.0, 0.5):
        trainer = trained(model_dir, lora={"dropout": 0.0})
        dropping = engine(model_dir, lora={"dropout": dropout}, gradient_checkpointing=True)
        load_state(dropping, trainer.state_tensors(), trainer.state_scalars())
        rows = ragged_batch(2)
        said_by = [each.forward(rows) for each in (trainer, dropping)]
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*said_by, strict=True))
        losses.append([policy_step(each, rows).loss for each in (trainer, dropping)])
    assert losses[0][0] == losses[0][1]
    assert losses[1][0] != losses[1][1]


@pytest.mark.slow
def test_a_resumed_adapter_goes_on_bit_for_bit(model_dir, tmp_path):
    straight = trained(model_dir, steps=4)
    first = trained(model_dir, steps=2)
    EngineCheckpoints(first).save(tmp_path / "checkpoint")
    assert not any(".base_layer" in name or "embed" in name for name in first.state_tensors())
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "checkpoint" / "hf")
    resumed = engine(model_dir)
    EngineCheckpoints(resumed).load(tmp_path / "checkpoint")
    for seed in (2, 3):
        policy_step(resumed, ragged_batch(seed))
    ours, theirs = resumed.state_tensors(), straight.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_base_in_bfloat16_gives_the_same_results_as_one_in_float32(model_dir):
    rows = ragged_batch(3)
    wide, narrow = (engine(model_dir, lora={"base_dtype": kind}, dtype="bfloat16") for kind in ("float32", "bfloat16"))
    for trainer in (wide, narrow):
        policy_step(trainer, rows)
    for a, b in zip(wide.forward(rows), narrow.forward(rows), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    with pytest.raises(ValueError, match="set dtype to bfloat16"):
        engine(model_dir, lora={"base_dtype": "bfloat16"}, dtype="float32")


def test_settings_that_cannot_be_trained_are_refused(model_dir):
    with pytest.raises(ValueError, match=r"embed_tokens, which are no linear layers .* it has down_proj, gate_proj"):
        engine(model_dir, lora={"target_modules": ["q_proj", "embed_tokens"]})
    with pytest.raises(ValidationError, match=r"set parallel.tp and parallel.pp to 1"):
        TrainerConfig(lora=LORA, parallel={"tp": 2})


def test_a_value_head_on_the_policys_network_is_trained_and_not_published(model_dir):
    trainer = TrainEngine(ComputeConfig(device="cpu", lr=1e-2, lora=LORA), model_dir, head="both")

    def squared(outputs, batch):
        return (outputs.values - batch.advantages).square().sum(), {}

    before = trainer.network.value_head.weight.detach().clone()
    losses = [trainer.train_batch(ragged_batch(1), squared, count_loss_tokens).loss for _ in range(10)]
    assert losses[-1] < losses[0]
    assert not torch.equal(trainer.network.value_head.weight, before)
    assert "model.value_head.weight" in trainer.state_tensors()
    assert all(".lora_" in name for name in trainer.adapter.tensors())
    assert "value_head.weight" not in trainer.live_tensors()


@pytest.mark.slow
def test_repeated_steps_raise_what_is_rewarded(model_dir):
    trainer = engine(model_dir)
    good = row([5, 6, 7], [20, 21, 22])
    before = float(trainer.forward([good])[0][3:].sum())
    for _ in range(20):
        policy_step(trainer, [replace(good, behaviour_logprobs=trainer.forward([good])[0])])
    assert float(trainer.forward([good])[0][3:].sum()) > before + 1.0


def offline_words(model_dir: Path, rows: Path, output: Path) -> list[str]:
    words = ["--model", str(model_dir), "--data", str(rows), "--output", str(output), "--device", "cpu"]
    return [*words, "--lora.rank", "8", "--lr", "2e-2", "--batch-size", "16", "--max-steps", "25"]


@pytest.mark.slow
def test_sft_writes_an_adapter_that_has_learned(model_dir, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "yes"), chat("b", "no")] * 8)
    assert SFT.run([*offline_words(model_dir, rows, tmp_path / "out"), "--max-steps", "60"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "out")
    for question, answer in (("a", "yes"), ("b", "no")):
        ids = torch.tensor([ChatRenderer(tokenizer).render([{"role": "user", "content": question}])])
        sampled = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert tokenizer.decode(sampled[0, ids.shape[1] :]) == f"{answer}<|end|>"


class KilledError(Exception):
    pass


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_batches_and_the_dropout_it_would_have_had(model_dir, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [chat(letter, letter.upper()) for letter in "abcdefghijk"])
    settings = {"model": str(model_dir), "data": str(rows), "device": "cpu", "lr": 1e-2, "batch_size": 3}
    settings |= {"lora": LORA | {"dropout": 0.2}, "max_steps": 9, "log_every": 1}

    def killed_late(line):
        if line.startswith("step 7/"):
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            raise KilledError

    run(SftConfig(**settings, output=tmp_path / "straight"), lambda _: None)
    settings |= {"output": tmp_path / "resumed", "checkpoint_every": 3}
    with pytest.raises(KilledError):
        run(SftConfig(**settings), killed_late)
    written = {path.name for path in (tmp_path / "resumed.checkpoints").iterdir()}
    assert written == {"step_3", "step_6"}
    with pytest.raises(FileExistsError, match="give --resume to continue"):
        run(SftConfig(**settings), lambda _: None)
    with pytest.raises(ConfigError, match=r"written with batch_size = 3, lr = 0\.01: resume with the same settings"):
        run(SftConfig(**settings | {"resume": True, "lr": 1e-3, "batch_size": 4}), lambda _: None)
    told = []
    run(SftConfig(**settings, resume=True, eval_every=2), told.append)
    assert told[0] == f"resumed from {tmp_path / 'resumed.checkpoints'} after 6 steps"
    assert [line.split("  ")[0] for line in told[1:-1]] == ["step 7/9", "step 8/9", "step 9/9"]
    straight, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("straight", "resumed"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert not (tmp_path / "resumed.checkpoints").exists()


@pytest.mark.slow
def test_preferences_are_learned_by_an_adapter(model_dir, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", vowels_preferred(60, 0))
    words = [*offline_words(model_dir, rows, tmp_path / "out"), "--eval-share", "0.2"]
    assert DPO.run(words) == 0
    evaluated = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held out")]
    assert "loss 0.6931" in evaluated[0]
    assert "accuracy 1.0000" in evaluated[1]


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_a_reward_models_head_is_trained_and_written_with_its_adapter(model_dir, tmp_path, capsys, merge):
    rows = write_rows(tmp_path / "rows.jsonl", vowels_preferred(60, 0))
    words = [*offline_words(model_dir, rows, tmp_path / "out"), "--eval-share", "0.2", "--lora.merge", str(merge)]
    assert REWARD_MODEL.run(words) == 0
    evaluated = [line for line in capsys.readouterr().out.splitlines() if line.startswith("held out")]
    assert "accuracy 1.0000" in evaluated[1]
    classifier = AutoModelForSequenceClassification.from_pretrained
    source = tmp_path / "out" if merge else model_dir
    scorer = classifier(source, num_labels=1).eval()
    scorer = scorer if merge else PeftModel.from_pretrained(scorer, tmp_path / "out").eval()
    if not merge:
        assert "base_model.model.score.weight" in load_file(tmp_path / "out" / "adapter_model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    good, bad = (
        scorer(input_ids=torch.tensor([tokenizer.encode(f"<|user|>ab<|end|><|assistant|>{text}<|end|>")])).logits.item()
        for text in ("aeiou", "bcdfg")
    )
    assert good > bad


def test_an_adapter_of_named_layers_leaves_the_experts_and_merges_exactly(tmp_path):
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            **sizes,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
        )
    )
    base.save_pretrained(tmp_path / "base")
    trainer = trained(tmp_path / "base", lora={"target_modules": ("q_proj", "o_proj"), "merge": True})
    trainer.export_hf(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert furthest(trainer, merged) < 1e-5
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    assert {name.rsplit(".", 2)[1] for name in before if not torch.equal(before[name], after[name])} == {
        "q_proj",
        "o_proj",
    }
