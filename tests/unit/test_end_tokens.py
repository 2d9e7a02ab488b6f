"""A model that was trained on demonstrations stops, whatever its end and padding tokens are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rollout_svc.engines.base import ServedTemplate
from rollout_svc.engines.slots.model import SlotModel
from sluice.end_tokens import read_end_tokens
from sluice.render import ChatRenderer
from trainer_svc.offline.commands import SFT

PAD, END, ASSISTANT, RESERVED = 0, 1, 4, 103
"""Ids of `sluice init-model`: padding, the token that its template writes after a turn, a role, and an unused one."""


NO_END = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


def with_ends(
    directory: Path,
    *,
    eos: str | None = "<|end|>",
    pad: str | None = "<|pad|>",
    named: int | list[int] | None = END,
    template: str | None = None,
) -> Path:
    """The tiny model with other end tokens: of the tokenizer, and of both configurations."""
    model = tiny_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token, tokenizer.pad_token = eos, pad
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    for name in ("config.json", "generation_config.json"):
        written: dict[str, Any] = json.loads((model / name).read_text())
        written["eos_token_id"] = named
        (model / name).write_text(json.dumps(written))
    return model


CASES: dict[str, Callable[[Path], Path]] = {
    "padding is the end": lambda path: with_ends(path, pad="<|end|>"),
    "several ends": lambda path: with_ends(path, named=[ASSISTANT, END]),
    "the template's end alone": lambda path: with_ends(path, eos=None, named=None),
    "another end in the configurations": lambda path: with_ends(path, named=RESERVED),
    "another end in the tokenizer": lambda path: with_ends(path, eos="<|reserved_0|>"),
    "other ends everywhere": lambda path: with_ends(path, eos="<|reserved_0|>", named=PAD),
    "no end in the template": lambda path: with_ends(path, template=NO_END),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_trained_model_stops(tmp_path: Path, case: str) -> None:
    model_dir = CASES[case](tmp_path)
    rows = tmp_path / "rows.jsonl"
    pairs = (("a", "yes"), ("b", "no"))
    rows.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]})
            + "\n"
            for asked, said in pairs
        )
    )
    words = ["--model", str(model_dir), "--data", str(rows), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert SFT.run([*words, "--lr", "1e-2", "--max-steps", "40", "--batch-size", "8"]) == 0
    model, tokenizer = (cls.from_pretrained(tmp_path / "out") for cls in (AutoModelForCausalLM, AutoTokenizer))
    renderer = ChatRenderer(tokenizer, ends=read_end_tokens(str(tmp_path / "out"), tokenizer))
    for asked, said in pairs:
        ids = torch.tensor([renderer.render([{"role": "user", "content": asked}])])
        sampled = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        *answer, end = sampled[0, ids.shape[1] :].tolist()
        assert tokenizer.decode(answer) == said
        assert end in renderer.ends.ids


@pytest.mark.parametrize("case", CASES)
def test_sampling_stops_at_what_training_teaches(tmp_path: Path, case: str) -> None:
    model_dir = CASES[case](tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    served = SlotModel(str(model_dir), "cpu", "auto", None).info
    assert served.eos_token_ids == read_end_tokens(str(model_dir), tokenizer).ids


def test_a_template_from_a_file_names_its_own_end(tmp_path: Path) -> None:
    model_dir = with_ends(tmp_path, eos=None, named=None)
    other = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|reserved_0|>' }}{% endfor %}"
    assert SlotModel(str(model_dir), "cpu", "auto", None).info.eos_token_ids == (END,)
    assert SlotModel(str(model_dir), "cpu", "auto", None, ServedTemplate(other)).info.eos_token_ids == (RESERVED,)


def test_a_template_that_needs_arguments_names_its_end_with_them(tmp_path: Path) -> None:
    dated = "{{ '<|system|>' + date }}{% for m in messages %}{{ m.content + '<|reserved_0|>' }}{% endfor %}"
    model_dir = with_ends(tmp_path, eos=None, named=None, template=dated)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert read_end_tokens(str(model_dir), tokenizer).ids == ()
    assert read_end_tokens(str(model_dir), tokenizer, {"date": "May"}).ids == (RESERVED,)
    served = SlotModel(str(model_dir), "cpu", "auto", None, ServedTemplate(None, {"date": "May"})).info
    assert served.eos_token_ids == (RESERVED,)


def test_a_piece_of_text_that_a_configuration_names_by_default_is_no_end(tmp_path: Path) -> None:
    model_dir = with_ends(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    piece = tokenizer.convert_tokens_to_ids("a")
    assert piece not in tokenizer.all_special_ids
    written = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**written, "eos_token_id": piece}))
    assert read_end_tokens(str(model_dir), tokenizer).ids == (END,)


def test_each_end_comes_with_the_places_that_name_it(tmp_path: Path) -> None:
    model_dir = with_ends(tmp_path, eos="<|reserved_0|>", named=[END, PAD])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.eos_token_id == RESERVED
    ends = read_end_tokens(str(model_dir), tokenizer)
    configurations = ("config.json", "generation_config.json")
    assert dict(ends.sources) == {
        END: (*configurations, "chat template"),
        PAD: configurations,
        RESERVED: ("tokenizer",),
    }
    assert ends.appended == RESERVED


def test_a_model_without_a_generation_configuration_has_the_other_ends(tmp_path: Path) -> None:
    model_dir = with_ends(tmp_path, named=ASSISTANT)
    (model_dir / "generation_config.json").unlink()
    ends = read_end_tokens(str(model_dir), AutoTokenizer.from_pretrained(model_dir))
    assert dict(ends.sources) == {ASSISTANT: ("config.json",), END: ("tokenizer", "chat template")}


def test_the_written_model_names_all_ends(tmp_path: Path) -> None:
    model_dir = with_ends(tmp_path, eos="<|reserved_0|>", named=PAD)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    words = ["--model", str(model_dir), "--data", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out")]
    assert SFT.run([*words, "--max-steps", "1", "--device", "cpu"]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [PAD, END, RESERVED]
