"""The examples of training on files: their settings load, and the data that they make renders."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tiny_policy import tiny_model
from transformers import AutoTokenizer

from sluice.render import ChatRenderer
from trainer_svc.offline.commands import load_offline
from trainer_svc.offline.config import DistillConfig, DpoConfig, RewardModelConfig, SftConfig
from trainer_svc.offline.data import load_examples, render_demonstration, render_pair

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "config_class"),
    [("sft", SftConfig), ("dpo", DpoConfig), ("reward_model", RewardModelConfig), ("distill", DistillConfig)],
)
def test_the_settings_of_each_example_are_valid(name, config_class):
    words = ["@", str(EXAMPLES / name / f"{name}.toml"), "--model", "someone/model", "--data", "someone/rows"]
    words += ["--teacher", "someone/teacher"] if config_class is DistillConfig else []
    config = load_offline(config_class, words, name)
    assert config.eval_share == 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "render"),
    [("sft/demonstrations.py", [], render_demonstration), ("dpo/pairs.py", ["--slips", "0.5"], render_pair)],
)
def test_the_data_of_each_example_renders_within_its_length(tmp_path, script, words, render):
    path = tmp_path / "rows.jsonl"
    subprocess.run([sys.executable, EXAMPLES / script, path, *words], check=True, timeout=60)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny_model(tmp_path)))
    assert len(load_examples(str(path), "train", partial(render, renderer), max_length=32, drop_long=False)) > 2000
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if render is render_pair:
        texts = [[row[side][0]["content"] for side in ("prompt", "chosen", "rejected")] for row in rows]
        assert all(chosen == word[::-1] for word, chosen, _ in texts)
        copies = [rejected == word for word, _, rejected in texts]
        assert 0.4 < sum(copies) / len(copies) < 0.6
        assert all(sorted(rejected) == sorted(word) for word, _, rejected in texts)
