"""`sluice sft` learns what the answers say, from the command line to a model directory."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from tiny_policy import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sluice.config import ConfigError
from sluice.render import ChatRenderer, Rendered
from trainer_svc.offline.commands import SFT, load_offline
from trainer_svc.offline.config import SftConfig
from trainer_svc.offline.data import Examples, batches, load_examples, render_demonstration
from trainer_svc.offline.runs import with_steps


def chat(question: str, answer: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sft"))


@pytest.mark.slow
def test_a_run_teaches_the_demonstrated_answers(model_dir, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "yes"), chat("b", "no")] * 8)
    config = tmp_path / "sft.toml"
    config.write_text(
        f'model = "{model_dir}"\ndata = "{rows}"\noutput = "{tmp_path / "out"}"\nlr = 1e-3\nmax_steps = 80\nbatch_size = 16\n',
        encoding="utf-8",
    )
    assert SFT.run(["@", str(config), "--lr", "1e-2", "--log-every", "40", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["step", "40/80"], ["step", "80/80"]]
    assert "lr 1.00e-02" in lines[0]
    assert "80 steps on 16 demonstrations" in lines[-1]
    model, tokenizer = (cls.from_pretrained(tmp_path / "out") for cls in (AutoModelForCausalLM, AutoTokenizer))
    for question, answer in (("a", "yes"), ("b", "no")):
        ids = torch.tensor([ChatRenderer(tokenizer).render([{"role": "user", "content": question}])])
        sampled = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert tokenizer.decode(sampled[0, ids.shape[1] :]) == f"{answer}<|end|>"


def test_a_role_to_learn_that_no_message_has_is_named_with_those_that_there_are(model_dir, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "yes")])
    words = ["--model", str(model_dir), "--data", str(rows), "--output", str(tmp_path / "out"), "--device", "cpu"]
    with pytest.raises(
        ConfigError, match="learn_roles names tol, and no message has that role: the data has assistant, user"
    ):
        SFT.run([*words, "--learn-roles", '["assistant", "tol"]'])
    assert SFT.run([*words, "--learn-roles", '["assistant", "user"]', "--max-steps", "1"]) == 0


def test_held_out_demonstrations_are_evaluated_every_so_many_steps(model_dir, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [chat(question, "yes") for question in "abcdefghij"])
    words = ["--model", str(model_dir), "--data", str(rows), "--output", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--lr", "1e-2", "--max-steps", "25", "--batch-size", "4", "--eval-share", "0.2", "--eval-every", "10"]
    assert SFT.run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    held_out = [line.replace(":", "").split() for line in lines if line.startswith("held out")]
    assert [int(line[3]) for line in held_out] == [0, 10, 20, 25]
    assert float(held_out[-1][-1]) < float(held_out[0][-1])
    assert "25 steps on 8 demonstrations" in lines[-1]


def test_an_existing_output_is_refused_before_anything_is_trained(model_dir, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    with pytest.raises(ConfigError, match="set output to another directory, or remove it"):
        SFT.run(["--model", str(model_dir), "--data", str(rows), "--output", str(tmp_path)])


def demonstrations(path: Path, renderer: ChatRenderer, split: str = "train", *, drop_long: bool = False) -> Examples:
    return load_examples(str(path), split, partial(render_demonstration, renderer), max_length=50, drop_long=drop_long)


@pytest.mark.parametrize(
    "row",
    [
        chat("2+2=", "4"),
        {"prompt": [{"role": "user", "content": "2+2="}], "completion": [{"role": "assistant", "content": "4"}]},
        {"prompt": "<|user|>2+2=<|end|><|assistant|>", "completion": "4"},
    ],
)
def test_every_kind_of_row_gives_the_same_ids_and_mask(model_dir, tmp_path, row):
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    data = demonstrations(write_rows(tmp_path / "r.jsonl", [row]), renderer)
    (sequence,) = next(batches(data, 1, seed=0))
    assert renderer.tokenizer.decode(sequence.input_ids) == "<|user|>2+2=<|end|><|assistant|>4<|end|>"
    assert renderer.tokenizer.decode(sequence.input_ids[sequence.loss_mask]) == "4<|end|>"


def test_each_pass_shows_every_demonstration_once_in_another_order(model_dir, tmp_path):
    rows = write_rows(tmp_path / "r.jsonl", [chat(str(i), "x") for i in range(10)])
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    data = demonstrations(rows, renderer)
    drawn = batches(data, 4, seed=1)
    seen = [sequence.trajectory_id for _ in range(5) for sequence in next(drawn)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == [str(i) for i in range(10)]
    assert seen[:10] != seen[10:]
    again = batches(data, 4, seed=1)
    assert [sequence.trajectory_id for _ in range(5) for sequence in next(again)] == seen


def test_batches_that_are_skipped_cost_no_rows_and_change_none(model_dir, tmp_path):
    rows = write_rows(tmp_path / "r.jsonl", [chat(str(i), "x") for i in range(10)])
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    data = demonstrations(rows, renderer)
    drawn = batches(data, 4, seed=1)
    expected = [[sequence.trajectory_id for sequence in next(drawn)] for _ in range(5)][3:]
    made: list[str] = []

    def counted(index):
        made.append(str(index))
        return data.rows(index)

    later = batches(Examples(len(data), counted), 4, seed=1, first=3)
    assert [[sequence.trajectory_id for sequence in next(later)] for _ in range(2)] == expected
    assert made == [name for batch in expected for name in batch]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([chat("a", "b"), {"text": "x"}], r"line 2 of .*r.jsonl: a row needs `messages`"),
        ([chat("a", "b" * 100)], r"line 1 of .*r.jsonl has \d+ tokens, more than max_length 50"),
        ([[1]], r"line 1 of .*r.jsonl is not a JSON object"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "no turn to learn"),
        (
            [chat("a", "b"), {"messages": [{"content": "x"}]}],
            r"line 2 of .*r.jsonl: messages\[0\] has no role: give objects with role and content",
        ),
        ([{"messages": "x"}], "line 1 of .*r.jsonl: messages is str, not a list"),
        ([{"prompt": [], "completion": [[]]}], r"line 1 of .*r.jsonl: completion\[0\] is list, not an object"),
        (
            [{"messages": [{"role": 7, "content": "x"}]}],
            r"line 1 of .*r.jsonl: messages\[0\] has the role 7, which is no text",
        ),
        ([{"messages": chat("a", "b")["messages"], "tools": [7]}], "line 1 of .*r.jsonl"),
        (
            [{"messages": [{"role": "user", "content": 7}, *chat("a", "b")["messages"]]}],
            "0 of the user has content of type int",
        ),
        ([{"messages": [{"role": "usr", "content": "x"}, *chat("a", "b")["messages"]]}], "unknown role usr"),
        ([], r"r\.jsonl is empty: give a file with one JSON object per line"),
    ],
)
def test_rows_that_cannot_be_used_are_named_by_their_line(model_dir, tmp_path, rows, message):
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    path = str(write_rows(tmp_path / "r.jsonl", rows))
    with pytest.raises(ConfigError, match=message):
        demonstrations(path, renderer)


def test_a_dataset_directory_is_read_by_split(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_rows(folder / "train.jsonl", [chat("a", "b")])
    write_rows(folder / "test.jsonl", [chat("a", "c"), chat("a", "d")])
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    assert len(demonstrations(folder, renderer, split="test")) == 2


def test_a_file_that_is_no_text_is_named(model_dir, tmp_path):
    (tmp_path / "r.jsonl").write_bytes(b"\xff\xfe")
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    with pytest.raises(ConfigError, match=r"line 1 of .*r\.jsonl is not JSON: 'utf-8' codec"):
        demonstrations(tmp_path / "r.jsonl", renderer)


def test_a_model_that_the_hub_does_not_give_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    words = ["--model", "nobody/nothing", "--data", str(rows), "--output", str(tmp_path / "out")]
    with pytest.raises(
        ConfigError, match="nobody/nothing is neither a directory here nor in the cache, and HF_HUB_OFFLINE is set"
    ):
        SFT.run(words)


def test_a_missing_file_is_named(model_dir, tmp_path):
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    with pytest.raises(ConfigError, match=r"cannot read .*none.jsonl: there is no such file"):
        demonstrations(tmp_path / "none.jsonl", renderer)


def test_long_rows_are_counted_when_they_are_dropped(model_dir, tmp_path):
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    path = str(write_rows(tmp_path / "r.jsonl", [chat("a", "b" * 100), chat("a", "b")]))
    data = demonstrations(path, renderer, drop_long=True)
    assert (len(data), data.dropped_long) == (1, 1)


def test_settings_come_in_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("d.jsonl", "x.jsonl"):
        write_rows(tmp_path / name, [])
    config = tmp_path / "sft.toml"
    config.write_text('model = "m"\ndata = "d.jsonl"\nlr = 1e-3\nepochs = 2\n', encoding="utf-8")
    monkeypatch.setenv("SLUICE_SFT__LR", "5e-1")
    monkeypatch.setenv("SLUICE_SFT__BATCH_SIZE", "7")
    monkeypatch.setenv("SLUICE_LOG_LEVEL", "info")
    settings = load_offline(SftConfig, ["@", str(config), "--epochs", "3"], "sft")
    assert (settings.lr, settings.batch_size, settings.epochs) == (1e-3, 7, 3.0)
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        load_offline(SftConfig, ["@", str(config), "--epoch", "3"], "sft")
    with pytest.raises(ConfigError, match="model is not set"):
        load_offline(SftConfig, ["--data", "x.jsonl"], "sft")
    with pytest.raises(ConfigError, match="there is no directory /not/there"):
        load_offline(SftConfig, ["--data", "x.jsonl", "--model", "/not/there"], "sft")
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts" / "config.json").write_text('{"num_experts": 8}')
    for flags in (["--parallel.dp-shard", "2"], ["--lora.rank", "4"]):
        with pytest.raises(ConfigError, match=r"model experts: .* 8 experts"):
            load_offline(SftConfig, ["--data", "x.jsonl", "--model", "experts", *flags], "sft")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--split", "test"], r"split: .*r\.jsonl is a file, which has no splits"),
        (["--eval-split", "dev"], "eval_split selects a split of eval_data"),
        (["--eval-data", "r.jsonl", "--eval-split", "dev"], r"eval_split: .*r\.jsonl is a file, which has no splits"),
        (["--schedule", "wsd", "--decay-steps", "9", "--max-steps", "8"], r"together exceed max_steps \(8\)"),
        (["--data", "none.jsonl"], r"there is no file .*none\.jsonl"),
        (["--data", "./none"], r"there is no file .*none, and '\./none' is not a hub dataset id"),
        (["--lr", "nan"], "lr: must be a finite number"),
        (["--threads", "100000"], "threads: must be less than or equal to 1024"),
        (["--batch-size", "10000000000000"], "batch_size: must be less than or equal to"),
        (["--model", "."], "it has no config"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "r.jsonl", [chat("a", "b")])
    with pytest.raises(ConfigError, match=message) as refused:
        load_offline(SftConfig, ["--model", "m", "--data", "r.jsonl", *words, "--dry-run"], "sft")
    assert "\n" not in str(refused.value)


def test_a_decay_that_the_data_leaves_no_steps_for_is_refused_with_the_steps_that_there_are():
    config = SftConfig(model="m", data="d", schedule="linear", warmup_steps=10, epochs=2, batch_size=3)
    assert with_steps(config, 30).max_steps == 20
    with pytest.raises(
        ConfigError, match=r"12 examples, 2 times over in batches of 3, make 8 steps: .*warmup_steps \(10\)"
    ):
        with_steps(config, 12)


def test_a_run_with_nothing_to_resume_says_so(model_dir, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    words = ["--model", str(model_dir), "--data", str(rows), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert SFT.run([*words, "--max-steps", "1", "--resume"]) == 0
    assert "no checkpoint in " in capsys.readouterr().out.splitlines()[0]


def test_a_model_of_other_shapes_than_it_says_is_told_in_one_line(model_dir, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [chat("a", "b")])
    other = shutil.copytree(model_dir, tmp_path / "other")
    written = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(written | {"intermediate_size": 2 * written["intermediate_size"]}))
    words = ["--model", str(other), "--data", str(rows), "--output", str(tmp_path / "out"), "--device", "cpu"]
    with pytest.raises(ConfigError, match=r"^cannot load the model .*/other: .*shape"):
        SFT.run(words)
    whole = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(whole[:100])
    with pytest.raises(ConfigError, match=r"^model: the weights in .*/other are incomplete \(.*header"):
        SFT.run(words)


@pytest.mark.parametrize("name", ["r.parquet", "r.json", "r.csv", "r.arrow"])
def test_files_of_every_kind_teach_the_same(model_dir, tmp_path, name):
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model_dir))
    rows = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(5)]
    table = pa.Table.from_pylist(rows)
    match name:
        case "r.parquet":
            pq.write_table(table, tmp_path / name)
        case "r.json":
            (tmp_path / name).write_text(json.dumps(rows))
        case "r.csv":
            pa.csv.write_csv(table, tmp_path / name)
        case "r.arrow":
            with pa.ipc.new_stream(tmp_path / name, table.schema) as writer:
                writer.write_table(table)
    found, wanted = (
        demonstrations(path, renderer) for path in (tmp_path / name, write_rows(tmp_path / "r.jsonl", rows))
    )
    assert [ids(found, index) for index in range(5)] == [ids(wanted, index) for index in range(5)]


def ids(data: Examples, index: int) -> list[tuple[list[int], list[bool]]]:
    return [(row.input_ids.tolist(), row.loss_mask.tolist()) for row in data.rows(index)]


def test_a_mixture_is_named_in_a_flag_or_a_file(model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", [chat("a", "b")] * 6)
    write_rows(tmp_path / "b.jsonl", [chat("c", "d")] * 50)
    (tmp_path / "sft.toml").write_text('data = ["a.jsonl=0.75", "b.jsonl=0.25"]\n')
    words = ["--model", str(model_dir), "--device", "cpu", "--max-steps", "1", "--batch-size", "1"]
    assert SFT.run(["@", "sft.toml", *words, "--output", "one"]) == 0
    assert SFT.run(["--data", "a.jsonl=3,b.jsonl=1", *words, "--output", "two"]) == 0
    assert SFT.run(["--data", "a.jsonl,b.jsonl", *words, "--output", "three"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "demonstrations" in line]
    assert [line.partition(" steps on ")[2].split()[0] for line in lines] == ["8", "8", "56"]
    assert load_offline(SftConfig, ["--data", "a.jsonl", "--model", str(model_dir)], "sft").data == "a.jsonl"
    for data, told in (
        ("a.jsonl=0.5,b.jsonl", "data: .*b.jsonl has no share"),
        ("a.jsonl=0.5,c.jsonl=1", "there is no file .*c.jsonl"),
        ("a.jsonl,sft.toml", "sft.toml is a file of an unknown kind"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_offline(SftConfig, ["--data", data, "--model", str(model_dir)], "sft")


def test_more_examples_than_memory_holds_are_read(tmp_path):
    path = write_rows(tmp_path / "r.jsonl", [{"n": number} for number in range(2000)])

    def render(row):
        return [(Rendered([row["n"]] * 1000, [False] * 999 + [True]),)]

    tracemalloc.start()
    try:
        data = load_examples(str(path), "train", render, max_length=1000, drop_long=False, directory=tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000, "the tokens are 8 MB of numbers and 2 MB of masks"
    (row,) = data.rows(1234)
    assert row.input_ids.tolist() == [1234] * 1000
    assert row.loss_mask.tolist() == [False] * 999 + [True]
    assert [*tmp_path.iterdir()] == [path], "the file of the tokens has no name"
