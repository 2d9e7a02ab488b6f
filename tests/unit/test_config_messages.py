"""What a wrong setting is told, and what `--help` and `--dry-run` print."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from toy_service import install_toy

from sluice.config import ConfigError, dump_toml, load_run, markdown_reference, run_config_class, service_configs
from sluice.config.schema import leaf_paths


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in list(os.environ):
        if variable.startswith("SLUICE_"):
            monkeypatch.delenv(variable)
    monkeypatch.syspath_prepend(str(install_toy(tmp_path / "site")))
    yield
    for module in ("toy_svc", "toy_svc.config", "toy_svc.app"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["--max-stalenes", "1"], "max_staleness"),
        (["--toy.lrr", "1"], "toy.lr"),
        (["--toy.optimiser.decay", "1"], "toy.optimizer"),
        (["--toy.optimizer.dekay", "1"], "toy.optimizer.decay"),
        (["--decay", "1"], "toy.optimizer.decay"),
        (["--securty.insecure"], "security"),
    ],
)
def test_an_unknown_flag_names_the_nearest_key(words, nearest):
    with pytest.raises(ConfigError, match=rf"unknown key.*did you mean '{nearest}'"):
        load_run(words)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("sed = 1", "seed"), ("[toy]\nlr = 1\ntag = ['x']", "toy.tags"), ("[toy.server]\nprot = 1", "toy.server.port")],
)
def test_an_unknown_key_in_a_file_names_the_file_and_the_nearest_key(tmp_path, text, nearest):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"wrong\.toml: unknown key.*did you mean '{nearest}'"):
        load_run(["@", str(path)])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_staleness = true", r"max_staleness: must be a valid integer.*got 'true' \(from .*wrong\.toml\)"),
        ("[trainer]\nlr = false", r"trainer\.lr: must be a valid number.*got 'false'"),
        ("[trainer]\nbetas = [0.9]", r"trainer\.betas: needs more values than \[0\.9\] \(from"),
        ("[orchestrator.sampling]\ntemperature = 101", "temperature: must be less than or equal to 100"),
        ("[orchestrator.sampling]\ntemperature = 1e-6", r"temperature: must be greater than or equal to 0\.01"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_place(tmp_path, text, told):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_run(["@", str(path)])


def test_a_byte_order_mark_is_no_setting(tmp_path):
    path = tmp_path / "from_windows.toml"
    path.write_bytes("\ufeffrun = 'words'\n".encode())
    assert load_run(["@", str(path)]).run == "words"


def test_text_of_the_wrong_form_names_the_characters_that_fit():
    with pytest.raises(ConfigError, match=r"run: does not fit .*lower-case letters.*got 'My Run'"):
        load_run(["--run", "My Run"])
    with pytest.raises(ConfigError, match=r"toy\.named\.here: .*pattern"):
        load_run(["--toy.named.here", "UP"])


def test_an_unknown_key_in_a_list_of_tables_is_found(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text("[[toy.schedule]]\nat = 1\n[[toy.schedule]]\natt = 1\n")
    with pytest.raises(ConfigError, match=r"unknown key 'toy\.schedule\.1\.att'"):
        load_run(["@", str(path)])


def test_an_unknown_variable_names_itself_and_the_nearest_key(monkeypatch):
    monkeypatch.setenv("SLUICE_TOY__LEARNING", "1")
    with pytest.raises(ConfigError, match="SLUICE_TOY__LEARNING: unknown key"):
        load_run([])


def test_a_value_out_of_range_names_its_source(tmp_path, monkeypatch):
    path = tmp_path / "range.toml"
    path.write_text("[toy]\nlr = 0\n")
    monkeypatch.setenv("SLUICE_SEED", "x")
    with pytest.raises(ConfigError) as caught:
        load_run(["@", str(path), "--run", "No Slug"])
    message = str(caught.value)
    assert "toy.lr" in message
    assert "range.toml" in message
    assert "seed" in message
    assert "(from the environment)" in message
    assert "(from the command line)" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seed"], "needs a value"),
        (["@"], "needs the path"),
        (["@", "/nowhere.toml"], "cannot read the config file /nowhere.toml"),
        (["seed=3"], "cannot read 'seed=3'"),
        (["--seed.x", "1"], "is a value, not a table"),
        (["--toy.tags", "[1"], "is not JSON"),
        (["--security.tls-cert", "a.pem"], "tls_cert and tls_key go together"),
    ],
)
def test_a_malformed_command_line_says_what_is_wrong(words, expected):
    with pytest.raises(ConfigError, match=expected):
        load_run(words)


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml is not TOML"):
        load_run(["@", str(path)])


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("broken.yaml", "a: [1", "is not YAML"),
        ("broken.json", "{a: 1}", "is not JSON"),
        ("list.yaml", "- seed", "has no settings"),
        ("empty.json", "null", None),
    ],
)
def test_a_file_of_another_format_is_named_where_it_cannot_be_read(tmp_path, name, text, told):
    path = tmp_path / name
    path.write_text(text)
    if told is None:
        assert load_run(["@", str(path)]).seed == 0
        return
    with pytest.raises(ConfigError, match=rf"{name} {told}"):
        load_run(["@", str(path)])


SECRETS = ["--toy.api-key", "sk-1", "--toy.engine.hf_token", "hf-2", "--toy.url", "https://me:pw3@judge/x"]


def test_a_dry_run_prints_what_would_be_used_without_secrets(capsys):
    with pytest.raises(SystemExit) as stopped:
        load_run([*SECRETS, "--seed", "7", "--dry-run"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["seed"] == 7
    for secret in ("sk-1", "hf-2", "pw3"):
        assert secret not in printed


def test_what_is_dumped_loads_back_to_the_same_settings(tmp_path):
    words = [*SECRETS, "--toy.limit", "none", "--toy.schedule", '[{"at": 3}]', "--peers.rollout", "a:1,b:2"]
    run = load_run(words)
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(run, redacted=False))
    again = load_run(["@", str(path)])
    assert again.model_dump() == run.model_dump()
    assert again.toy.api_key.get_secret_value() == "sk-1"


def test_help_lists_every_setting_of_the_command_with_type_and_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        load_run(["--help"], service="toy")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--toy.limit int | none  (default: 5)" in printed
    assert "--toy.server.port int  (default: 7999)" in printed
    assert "Decay of the moments." in printed
    assert "--peers.trainer str" in printed
    assert "--trainer." not in printed


def test_the_reference_page_has_each_setting_as_a_row_or_refers_to_the_table_that_has_it():
    model = run_config_class()
    page = markdown_reference(model)
    references = dict(re.findall(r"^`\[([^`]+)\]`: (.*as in \[`\[[^`]+\]`\].*)$", page, re.MULTILINE))
    for path, _ in leaf_paths(model):
        *table, name = path
        if f"| `{'.'.join(path)}` |" not in page:
            reference = references[".".join(table)]
            home = re.search(r"as in \[`\[([^`]+)\]`\]", reference)[1]
            assert f"| `{home}.{name}` |" in page
            assert reference.startswith("as in") or f"`{name}`" in reference


def test_a_table_that_refers_to_another_names_the_defaults_that_differ():
    page = markdown_reference(run_config_class())
    assert re.search(
        r"^`\[trainer\.server\]`: as in .*orchestrator\.server.*, but `port` = `7102`\.", page, re.MULTILINE
    )
    assert page.count("| `orchestrator.server.drain_s` |") == 1
    assert "`toy.server.drain_s`" not in page


@pytest.mark.parametrize("service", ["weightsync", "rollout", "trainer", "orchestrator"])
def test_every_setting_of_the_services_has_a_default_and_a_description(service):
    config_class = service_configs()[service]
    assert config_class is not None, f"the package of {service} has no config module"
    config_class()
    for path, field in leaf_paths(config_class):
        assert field.description, f"{service}.{'.'.join(path)} has no description"
