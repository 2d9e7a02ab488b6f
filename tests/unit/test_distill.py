"""`sluice distill`: a model comes nearer to its teacher, measured over the whole vocabulary by plain transformers."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from test_sft import write_rows
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from sluice.config import ConfigError
from sluice.render import ChatRenderer
from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.commands import DISTILL
from trainer_svc.offline.data import every_row, load_examples, precompute_logprobs, render_demonstration
from trainer_svc.offline.losses import TeacherLoss, teacher_figures

PROMPT = "<|user|>a<|end|><|assistant|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher that has favourite tokens."""
    student = tiny_model(tmp_path_factory.mktemp("student"))
    teacher = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(student, teacher)
    model = AutoModelForCausalLM.from_pretrained(student)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        state = model(torch.arange(7, 39)[None], output_hidden_states=True).hidden_states[-1][0].mean(0)
        model.lm_head.weight.add_(torch.outer(torch.randn(len(model.lm_head.weight)), state / state.square().sum()))
    model.save_pretrained(teacher)
    return student, teacher


@torch.no_grad()
def sampled(directory: Path, count: int, seed: int) -> list[dict[str, str]]:
    """Return rows of the prompt and a model's answers to it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    ids = torch.tensor([tokenizer.encode(PROMPT)] * count)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, min_new_tokens=8, max_new_tokens=8
        )
    return [{"prompt": PROMPT, "completion": text} for text in tokenizer.batch_decode(said[:, ids.shape[1] :])]


@torch.no_grad()
def divergence(mine: Path, other: Path, texts: list[dict[str, str]]) -> float:
    """Exact KL of the two distributions at each token of the completions, in nats per token."""
    tokenizer = AutoTokenizer.from_pretrained(mine)
    ids = torch.tensor([tokenizer.encode(row["prompt"] + row["completion"])[: len(PROMPT)] for row in texts])
    first = len(tokenizer.encode(PROMPT))
    p, q = (
        AutoModelForCausalLM.from_pretrained(each)(ids).logits[:, first - 1 : -1].log_softmax(-1)
        for each in (mine, other)
    )
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_divergence_falls(models, tmp_path, capsys, kind):
    student, teacher = models
    source = teacher if kind == "forward" else student
    rows = write_rows(tmp_path / "rows.jsonl", sampled(source, 512, seed=0))
    words = ["--model", str(student), "--teacher", str(teacher), "--data", str(rows), "--divergence", kind]
    words += ["--output", str(tmp_path / "out"), "--device", "cpu", "--lr", "3e-3", "--max-steps", "30"]
    assert DISTILL.run([*words, "--eval-share", "0.25"]) == 0
    before, after = (line for line in capsys.readouterr().out.splitlines() if line.startswith("held out"))
    fresh = sampled(source, 64, seed=1)

    def measured(model: Path) -> float:
        return divergence(teacher, model, fresh) if kind == "forward" else divergence(model, teacher, fresh)

    assert measured(tmp_path / "out") < 0.8 * measured(student)
    # "... kl X  distance Y"; reverse texts are the student's no more once it has learned, so that only the distance holds.
    place = -3 if kind == "forward" else -1
    assert float(after.split()[place]) < float(before.split()[place])


def test_reverse_distillation_draws_each_log_probability_to_the_teachers(models, tmp_path):
    """Its gradient equals the gradient of half the squared distance, because the weight is the distance itself."""
    student, teacher = models
    rows = write_rows(tmp_path / "rows.jsonl", sampled(student, 8, seed=2))
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(student))
    data = load_examples(str(rows), "train", partial(render_demonstration, renderer), max_length=64, drop_long=False)
    config = ComputeConfig(device="cpu", lr=1e-4, grad_clip=0.0)
    asked = every_row(precompute_logprobs(TrainEngine(config, teacher), data, "teacher_logprobs"))
    gradients, loss = [], TeacherLoss("reverse")

    def squared(outputs, batch):
        return 0.5 * (outputs.logprobs - batch.teacher_logprobs).square().sum(), {}

    for loss_fn in (loss, squared):
        engine = TrainEngine(config, student)
        engine.network.model.double()
        engine.optimizer.parts[0].register_step_pre_hook(
            lambda *_, engine=engine: gradients.append(
                torch.cat([each.grad.flatten() for each in engine.network.model.parameters()])
            )
        )
        metrics = engine.train_batch(asked, loss_fn, loss.objective.weight)
        if loss_fn is loss:
            figures = teacher_figures(metrics.sums)
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-6
    student_says = TrainEngine(config, student).forward(asked)
    gap = torch.cat(
        [(mine - row.teacher_logprobs)[row.loss_mask] for mine, row in zip(student_says, asked, strict=True)]
    )
    assert figures == pytest.approx({"kl": float(gap.mean()), "distance": float(gap.abs().mean())}, rel=1e-4)


def test_a_teacher_of_another_vocabulary_is_refused_before_it_is_loaded(models, tmp_path):
    student, _ = models
    other = tmp_path / "other"
    GPT2Config().save_pretrained(other)
    (other / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(other)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "completion": "x"}])
    words = ["--model", str(student), "--teacher", str(other), "--data", str(rows), "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="another vocabulary"):
        DISTILL.run(words)
    with pytest.raises(ConfigError, match="teacher is not set"):
        DISTILL.run(["--model", str(student), "--data", str(rows)])
    with pytest.raises(ConfigError, match="teacher: there is no directory /nowhere"):
        DISTILL.run([*words, "--teacher", "/nowhere"])
    (other / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"teacher: .*/other holds no tokenizer"):
        DISTILL.run(words)
    words[3] = str(student)
    with pytest.raises(ConfigError, match=r"output: cannot write into .*rows\.jsonl"):
        DISTILL.run([*words, "--output", str(rows / "out")])
