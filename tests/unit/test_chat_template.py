"""A chat template and its arguments are settings: checked at the start, the same for training and sampling, written with the model."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from small_learner import learner
from tiny_policy import tiny_model
from transformers import AutoTokenizer

from rollout_svc.tokenizer import ModelTokenizer, load_tokenizer
from sluice.chat_template import TEMPLATE_FILE, check_chat_template
from sluice.cli.rl import run
from sluice.config import CommonConfig, ConfigError, dump_toml, load_run
from sluice.rpc import SluiceError
from sluice.v1 import tokens_pb2
from trainer_svc.offline import runs
from trainer_svc.offline.commands import MERGE_ADAPTER, SFT
from trainer_svc.offline.config import SftConfig
from trainer_svc.offline.data import load_data

DATED = (
    "{% if date is defined %}{{ date }}\n{% endif %}"
    "{% set mark = '(no)' if enable_thinking is false else '' %}"
    "{% for message in messages %}[{{ message.role }}]{{ mark if message.role == 'assistant' }}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mark }}{% endif %}"
)
ARGUMENTS = {"date": "2026-11-27", "enable_thinking": False}
ASK = [{"role": "user", "content": "1+1"}]


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("template"))


@pytest.fixture
def dated(tmp_path: Path) -> Path:
    file = tmp_path / "dated.jinja"
    file.write_text(DATED, encoding="utf-8")
    return file


def replica(model: Path, file: Path | None = None, arguments: dict[str, Any] | None = None) -> ModelTokenizer:
    """Return the tokenizer of a replica with these settings."""
    run = CommonConfig(model=str(model), chat_template=file, chat_template_kwargs=arguments or {})
    tokenizer = asyncio.run(load_tokenizer(run))
    return ModelTokenizer(tokenizer, arguments=run.chat_template_kwargs)


def prompt(model: Path, file: Path | None = None, arguments: dict[str, Any] | None = None) -> str:
    """Return the prompt that a replica with these settings renders."""
    loaded = AutoTokenizer.from_pretrained(model)
    ids = replica(model, file, arguments).render(tokens_pb2.Conversation(messages=ASK))
    return str(loaded.decode(ids, skip_special_tokens=False))


def sft(model: Path, directory: Path, **settings: Any) -> SftConfig:
    rows = directory / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [*ASK, {"role": "assistant", "content": "2"}]}) + "\n")
    words = {"max_steps": 1, "batch_size": 1, "device": "cpu", "output": directory / "out"}
    return SftConfig(**{**words, "model": str(model), "data": str(rows), **settings})


def written(config: SftConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the text of the row that a run of SFT learns."""
    seen: list[str] = []
    tokenizer = AutoTokenizer.from_pretrained(config.model)

    def kept(settings: SftConfig, render: Any) -> Any:
        data = load_data(settings, render)
        seen.extend(tokenizer.decode(row.input_ids, skip_special_tokens=False) for row in data.train.rows(0))
        raise StopIteration

    with monkeypatch.context() as patched:
        patched.setattr(runs, "load_data", kept)
        with pytest.raises(StopIteration):
            runs.run(config, lambda _: None)
    return seen[0]


@pytest.mark.parametrize("arguments", [{}, {"date": "2026-11-27"}, {"enable_thinking": False}, ARGUMENTS], ids=str)
def test_sft_learns_after_the_prompt_that_a_replica_renders(model, tmp_path, dated, monkeypatch, arguments):
    sampled = prompt(model, dated, arguments)
    assert sampled == (
        ("2026-11-27\n" if "date" in arguments else "")
        + "[user]1+1<|end|>[assistant]"
        + ("(no)" if "enable_thinking" in arguments else "")
    )
    settings = {"chat_template": dated, "chat_template_kwargs": arguments}
    assert written(sft(model, tmp_path, **settings), monkeypatch) == f"{sampled}2<|end|>"


def test_the_model_that_sft_writes_has_the_template_that_it_was_trained_with(model, tmp_path, dated):
    runs.run(sft(model, tmp_path, chat_template=dated, chat_template_kwargs={"date": "May"}), lambda _: None)
    assert (tmp_path / "out" / TEMPLATE_FILE).read_text(encoding="utf-8") == DATED
    assert prompt(tmp_path / "out", None, {"date": "May"}) == prompt(model, dated, {"date": "May"})
    assert replica(tmp_path / "out").digest == replica(model, dated).digest != replica(model).digest


def test_an_adapter_and_the_model_that_it_is_merged_into_have_the_template(model, tmp_path, dated):
    lora = {"rank": 4, "merge": False}
    runs.run(sft(model, tmp_path, chat_template=dated, lora=lora, lr=1e-3), lambda _: None)
    assert (tmp_path / "out" / TEMPLATE_FILE).read_text(encoding="utf-8") == DATED
    merged = tmp_path / "merged"
    assert MERGE_ADAPTER.run(["--adapter", str(tmp_path / "out"), "--output", str(merged)]) == 0
    assert prompt(merged) == prompt(model, dated)
    runs.run(sft(model, tmp_path, chat_template=dated, lora=lora | {"merge": True}, output=tmp_path / "at once"), print)
    assert prompt(tmp_path / "at once") == prompt(model, dated)


def test_a_run_is_resumed_with_the_same_template_wherever_its_file_is(model, tmp_path, dated):
    settings: dict[str, Any] = {"max_steps": 2, "checkpoint_every": 1, "log_every": 1, "chat_template": dated}

    def stop(line: str) -> None:
        if line.startswith("step 2/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(sft(model, tmp_path, **settings), stop)
    moved = dated.rename(tmp_path / "moved.jinja")
    dated.write_text("{# another #}" + DATED, encoding="utf-8")
    with pytest.raises(ConfigError, match="written with chat_template = "):
        runs.run(sft(model, tmp_path, **settings, resume=True), print)
    other = {**settings, "chat_template": moved, "chat_template_kwargs": {"date": "May"}}
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.date = unset"):
        runs.run(sft(model, tmp_path, **other, resume=True), print)
    runs.run(sft(model, tmp_path, **{**settings, "chat_template": moved}, resume=True), print)
    assert (tmp_path / "out" / TEMPLATE_FILE).is_file()


def test_trainer_and_replica_agree_by_the_same_settings_alone(model, tmp_path, dated):
    settings = {"chat_template": dated, "chat_template_kwargs": ARGUMENTS}
    trainer = learner(model, tmp_path, common=settings)
    assert trainer.tokenizer_digest == replica(model, dated, ARGUMENTS).digest
    others = (replica(model), replica(model, dated), replica(model, dated, ARGUMENTS | {"date": "2026-11-28"}))
    for other in others:
        with pytest.raises(SluiceError, match=r"TOKENIZER_MISMATCH.*the same chat_template and chat_template_kwargs"):
            other.check_digest(trainer.tokenizer_digest)
    trainer.restore(1, "")
    directory = tmp_path / "test" / "checkpoints" / trainer.begin_save(0).result().name
    assert (directory / "hf" / TEMPLATE_FILE).read_text(encoding="utf-8") == DATED
    again = learner(model, tmp_path, common={**settings, "chat_template_kwargs": {}})
    with pytest.raises(SluiceError, match="written with another tokenizer, chat template or template arguments"):
        again.restore(2, directory.name)


BAD = {
    "missing": (None, "cannot read {file}: No such file or directory"),
    "a directory": (..., "cannot read {file}: Is a directory"),
    "not UTF-8": (b"{# one #}\n\xff", "{file}, line 2 is not UTF-8"),
    "syntax": (b"{# one #}\n\n{% if %}", "{file}, line 3 is not valid Jinja: Expected an expression"),
    "never closed": (b"{% for m in messages %}\nx", "{file}, line 2 is not valid Jinja: Unexpected end of template"),
    "no filter": (b"a\n{{ messages | shout }}", "{file}, line 2 is not valid Jinja: No filter named 'shout'"),
    "reads no date": (b"{{ messages }}", "chat_template_kwargs: the chat template reads no variable 'date'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_template_is_refused_before_anything_is_loaded(tmp_path, kind):
    content, problem = BAD[kind]
    file = tmp_path / "t.jinja"
    if content is ...:
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_chat_template("owner/model", file, {"date": "May"} if kind == "reads no date" else {})
    assert problem.format(file=file) in str(caught.value)
    assert "\n" not in str(caught.value)


BROKEN = "{{ messages }}\n{% endif %}"


@pytest.mark.parametrize("where", [TEMPLATE_FILE, "tokenizer_config.json", "several", "additional"])
def test_a_template_of_the_model_that_is_not_jinja_is_refused_too(tmp_path, where):
    settings = tmp_path / "tokenizer_config.json"
    match where:
        case "tokenizer_config.json":
            settings.write_text(json.dumps({"chat_template": BROKEN}))
        case "several":
            given = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": BROKEN}]
            settings.write_text(json.dumps({"chat_template": given}))
        case "additional":
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates" / "rag.jinja").write_text(BROKEN)
        case _:
            (tmp_path / where).write_text(BROKEN)
    with pytest.raises(ConfigError, match=r"^model: .*, line 2 is not valid Jinja: .*endif"):
        check_chat_template(str(tmp_path), None, {})
    file = tmp_path / "mine.jinja"
    file.write_text(DATED)
    check_chat_template(str(tmp_path), file, ARGUMENTS)


@pytest.mark.parametrize("template", ["{% generation %}x{% endgeneration %}{% for m in [1] %}{% break %}{% endfor %}"])
def test_what_transformers_adds_to_jinja_is_valid(tmp_path, template):
    (tmp_path / TEMPLATE_FILE).write_text(template)
    check_chat_template(str(tmp_path), None, {})


def test_a_dry_run_names_the_file_and_the_line(model, tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("\n{% if %}")
    example = Path(__file__).parents[2] / "examples" / "reverse_text"
    words = ["@", str(example / "rl.toml"), "--model", str(model), "--rollout.engine", "transformers", "--dry-run"]
    words += ["--orchestrator.environment", f"{example / 'env.py'}:ReverseText"]
    with pytest.raises(ConfigError, match=r"chat_template: .*t\.jinja, line 2 is not valid Jinja"):
        run([*words, "--chat-template", str(file)])
    with pytest.raises(ConfigError, match=r"^chat_template_kwargs: .* reads no variable 'thinking'"):
        run([*words, "--chat-template-kwargs.thinking", "false"])
    with pytest.raises(ConfigError, match=r"environment ReverseText: .* reads no variable 'thinking'"):
        run([*words, "--orchestrator.sampling.chat-template-kwargs.thinking", "false"])
    with pytest.raises(ConfigError, match=r"t\.jinja, line 2 is not valid Jinja"):
        SFT.run(["--model", str(model), "--data", str(file), "--chat-template", str(file), "--dry-run"])


@pytest.mark.parametrize(
    ("given", "problem"),
    [("date = 2026-11-27", "write it in quotes"), ("a = nan", "not a number"), ("a = [{b = 12:00:00}]", "in quotes")],
)
def test_an_argument_that_json_does_not_have_is_refused(tmp_path, given, problem):
    file = tmp_path / "rl.toml"
    file.write_text(f"[chat_template_kwargs]\n{given}\n")
    with pytest.raises(ConfigError, match=f"chat_template_kwargs.*{problem}"):
        load_run(["@", str(file)])
    with pytest.raises(ConfigError, match="leave the argument out"):
        load_run(["--chat-template-kwargs", '{"a": null}'])


def test_arguments_keep_their_types_through_files_flags_and_the_record_of_a_run(tmp_path):
    file = tmp_path / "rl.toml"
    file.write_text('[chat_template_kwargs]\nenable_thinking = false\nreasoning_effort = "low"\n')
    flags = ["--chat-template-kwargs.budget", "512", "--chat-template-kwargs.list", "[1, 1.5]"]
    given = load_run(["@", str(file), *flags])
    assert given.chat_template_kwargs == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "budget": 512,
        "list": [1, 1.5],
    }
    file.write_text(dump_toml(given))
    again = load_run(["@", str(file)]).chat_template_kwargs
    assert json.dumps(again, sort_keys=True) == json.dumps(given.chat_template_kwargs, sort_keys=True)
