"""Which source of a setting wins, and how each of them is written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from toy_service import install_toy

from sluice.config import ConfigError, Section, load_command, load_run
from sluice.config.schema import deep_merge


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for variable in list(os.environ):
        if variable.startswith("SLUICE_"):
            monkeypatch.delenv(variable)
    monkeypatch.syspath_prepend(str(install_toy(tmp_path / "site")))
    yield
    for module in ("toy_svc", "toy_svc.config", "toy_svc.app"):
        sys.modules.pop(module, None)


def toml(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_flags_override_files_override_environment_overrides_defaults(tmp_path, monkeypatch):
    first = toml(tmp_path, "first.toml", "seed = 2\nmax_staleness = 2\n[toy]\nlr = 2\n")
    second = toml(tmp_path, "second.toml", "seed = 3\n")
    monkeypatch.setenv("SLUICE_SEED", "1")
    monkeypatch.setenv("SLUICE_TOY__LR", "1")
    monkeypatch.setenv("SLUICE_TOY__OPTIMIZER__DECAY", "0.5")
    run = load_run(["@", first, f"@{second}", "--max-staleness", "4"])
    assert (run.seed, run.max_staleness, run.toy.lr, run.toy.optimizer.decay) == (3, 4, 2.0, 0.5)
    assert run.run == "default"


def test_tables_of_several_files_merge_key_by_key_and_lists_are_replaced(tmp_path):
    first = toml(tmp_path, "1.toml", "[toy]\ntags = ['x', 'y']\n[toy.optimizer]\ndecay = 0.1\n[toy.engine]\na = 1\n")
    second = toml(tmp_path, "2.toml", "[toy]\ntags = ['z']\n[toy.optimizer]\nbetas = [0.5, 0.6]\n[toy.engine]\nb = 2\n")
    toy = load_run(["@", first, "@", second]).toy
    assert toy.tags == ["z"]
    assert (toy.optimizer.decay, toy.optimizer.betas) == (0.1, [0.5, 0.6])
    assert toy.engine == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "seed: 4\ntoy:\n  tags: [x]\n  limit: null\n  optimizer: {decay: 0.5}\n"),
        ("run.json", '{"seed": 4, "toy": {"tags": ["x"], "limit": "none", "optimizer": {"decay": 0.5}}}'),
    ],
)
def test_a_file_may_be_yaml_or_json(tmp_path, name, text):
    run = load_run(["@", toml(tmp_path, name, text), "--toy.optimizer.betas", "0.5,0.6"])
    assert (run.seed, run.toy.tags, run.toy.limit) == (4, ["x"], None)
    assert (run.toy.optimizer.decay, run.toy.optimizer.betas) == (0.5, [0.5, 0.6])


@pytest.mark.parametrize("form", ["file", "flag"])
def test_none_is_a_value_where_it_is_one_of_the_choices_and_unsets_elsewhere(tmp_path, form):
    kind, coefficient = "trainer.objective.correction.kind", "trainer.objective.kl_coef"
    chosen = ["--trainer.objective.preset", "grpo", "--trainer.objective.proximal", "recompute"]
    if form == "file":
        text = f"{kind} = 'none'\n{coefficient} = 'none'\n"
        objective = load_run(["@", toml(tmp_path, "none.toml", text), *chosen]).trainer.objective
    else:
        objective = load_run([*chosen, f"--{kind}", "none", f"--{coefficient}", "none"]).trainer.objective
    assert objective.correction.kind == "none"
    assert objective.resolved.correction == "none"
    assert objective.kl_coef is None


def test_a_table_that_may_be_absent_is_a_table():
    assert load_run([]).toy.late is None
    assert load_run(["--toy.late.at", "7"]).toy.late.at == 7


def test_a_partial_table_keeps_the_defaults_of_the_field_not_of_its_class(tmp_path):
    run = load_run(["@", toml(tmp_path, "a.toml", "[toy.server]\nhost = '::1'\n")])
    assert (run.toy.server.host, run.toy.server.port) == ("::1", 7999)


def test_a_flat_file_goes_into_the_table_named_before_it(tmp_path):
    flat = toml(tmp_path, "flat.toml", "lr = 7\n[optimizer]\ndecay = 1\n")
    run = load_run(["--toy", "@", flat, "--toy.verbose"])
    assert (run.toy.lr, run.toy.optimizer.decay, run.toy.verbose) == (7.0, 1.0, True)


def test_inference_is_another_name_of_rollout_in_every_layer(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_INFERENCE__SERVER__DRAIN_S", "1")
    flat = toml(tmp_path, "flat.toml", "[server]\nport = 1\n")
    whole = toml(tmp_path, "whole.toml", "[inference.server]\nmetrics_port = 2\n")
    rollout = load_run(["--inference", "@", flat, "@", whole, "--inference.server.http-port=3"]).rollout
    server = rollout["server"] if isinstance(rollout, dict) else rollout.server.model_dump()
    found = [float(server[key]) for key in ("drain_s", "port", "metrics_port", "http_port")]
    assert found == [1, 1, 2, 3]


def test_in_a_command_of_one_service_the_name_of_its_table_may_be_left_out():
    run = load_run(["--lr", "3", "--seed", "5", "--server.port", "1", "--toy.limit", "9"], service="toy")
    assert (run.toy.lr, run.seed, run.toy.server.port, run.toy.limit) == (3.0, 5, 1, 9)


@pytest.mark.parametrize("words", [["--toy.verbose"], ["--toy.verbose=true"], ["--toy.verbose", "yes"]])
def test_a_boolean_flag_may_stand_alone(words):
    assert load_run([*words, "--seed", "1"]).toy.verbose is True


def test_a_boolean_flag_can_be_switched_off():
    assert load_run(["--toy.verbose", "--toy.verbose", "false"]).toy.verbose is False


def test_insecure_has_a_short_flag():
    assert load_run(["--insecure"]).security.insecure is True


@pytest.mark.parametrize("text", ["b,c", '["b", "c"]', "b, c"])
def test_lists_are_written_with_commas_or_as_json(text):
    assert load_run(["--toy.tags", text]).toy.tags == ["b", "c"]


def test_free_form_tables_take_json_values_and_keep_text():
    engine = load_run(["--toy.engine.max_len", "128", "--toy.engine.name", "x", "--toy.engine.eager"]).toy.engine
    assert engine == {"max_len": 128, "name": "x", "eager": True}


def test_values_under_a_users_own_keys_are_typed_by_their_text():
    flags = ("--trainer.objective.params.gain", "0.1", "--trainer.objective.params.kind=soft")
    own = ("--trainer.objective.params.on", "--trainer.objective.preset", "mine:surrogate")
    params = load_run([*flags, *own]).trainer.objective.params
    assert params == {"gain": 0.1, "kind": "soft", "on": True}


def test_lists_of_tables_are_written_as_json():
    assert load_run(["--toy.schedule", '[{"at": 3, "factor": 0.5}]']).toy.schedule[0].at == 3


def test_none_unsets_in_every_layer(tmp_path, monkeypatch):
    assert load_run(["--toy.limit", "none"]).toy.limit is None
    assert load_run(["@", toml(tmp_path, "n.toml", "[toy]\nlimit = 'none'\n")]).toy.limit is None
    monkeypatch.setenv("SLUICE_TOY__LIMIT", "none")
    assert load_run([]).toy.limit is None


def test_negative_numbers_are_values():
    with pytest.raises(ConfigError, match="greater than 0"):
        load_run(["--toy.lr", "-1"])


def test_empty_variables_and_those_of_kubernetes_and_of_children_are_ignored(monkeypatch):
    for name, value in {
        "SLUICE_SEED": "",
        "SLUICE_ROLLOUT_SERVICE_HOST": "10.0.0.1",
        "SLUICE_ROLLOUT_PORT": "tcp://10.0.0.1:7103",
        "SLUICE_ROLLOUT_PORT_7103_TCP_ADDR": "10.0.0.1",
        "SLUICE_INTERNAL_STAGE": "/dev/shm",
        "SLUICE_TEST_SLOW": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert load_run([]).seed == 0


def test_an_evaluation_tells_agents_its_gateway_by_variables(monkeypatch):
    monkeypatch.setenv("SLUICE_GATEWAY", "127.0.0.1:4321")
    monkeypatch.setenv("SLUICE_GATEWAY_URL", "http://127.0.0.1:4322")
    monkeypatch.setenv("SLUICE_RUN", "eval")
    run = load_run([])
    assert (run.peers.gateway, run.run) == ("127.0.0.1:4321", "eval")


def test_the_log_level_can_be_set_by_a_variable(monkeypatch):
    monkeypatch.setenv("SLUICE_LOG_LEVEL", "debug")
    assert load_run([]).log_level == "debug"


def test_the_table_of_a_package_that_is_not_installed_is_accepted_unread(tmp_path):
    run = load_run(["@", toml(tmp_path, "a.toml", "[absent]\nwhatever = 1\n")])
    assert run.absent == {"whatever": 1}
    with pytest.raises(ConfigError, match="not installed"):
        run.section("absent")


class Settings(Section):
    lr: float = Field(1e-3, gt=0, description="Learning rate.")
    data: str = Field("", description="File.")


def test_a_command_with_settings_of_its_own_has_the_same_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("SLUICE_SFT__LR", "1")
    monkeypatch.setenv("SLUICE_SFT__DATA", "x")
    monkeypatch.setenv("SLUICE_SEED", "1")
    config = load_command(Settings, ["@", toml(tmp_path, "a.toml", "data = 'y'\n")], "sft")
    assert isinstance(config, Settings)
    assert (config.lr, config.data) == (1.0, "y")
    assert load_run([]).seed == 1
    with pytest.raises(ConfigError, match=r"lr: .*greater than 0.*from the command line"):
        load_command(Settings, ["--lr", "0"], "sft")


def test_a_removed_setting_is_read_with_its_old_default_and_refused_with_another_value(tmp_path, monkeypatch):
    old = "[weightsync]\nio-threads = 8\n[[orchestrator.environments]]\nenvironment = 'x'\nenvironment_processes.log_lines_per_minute = 600\n"
    load_run(["@", toml(tmp_path, "v0.1.0.toml", old)])
    with pytest.raises(ConfigError, match=r"new\.toml: weightsync\.io_threads is no setting any more.*always 8"):
        load_run(["@", toml(tmp_path, "new.toml", "[weightsync]\nio_threads = 4\n")])
    with pytest.raises(ConfigError, match=r"--tuner\.deadlines\.sample_s: .*set tuner\.deadlines\.operation_s"):
        load_run(["--tuner.deadlines.sample_s", "4"])
    load_run(["--trainer.queue_batches", "2", "--trainer.lr=1e-3"])
    monkeypatch.setenv("SLUICE_WEIGHTSYNC__IO_THREADS", "8")
    monkeypatch.setenv("SLUICE_TRAINER__QUEUE_BATCHES", "3")
    with pytest.raises(ConfigError, match=r"SLUICE_TRAINER__QUEUE_BATCHES: .*always 2"):
        load_run([])


def test_the_file_of_a_run_is_read_whatever_its_removed_settings_were(tmp_path):
    written = "[trainer]\nqueue_batches = 4\n[orchestrator.environment_processes]\nlog_lines_per_minute = 1\n"
    load_run(["@", toml(tmp_path, "config.toml", written)])
    with pytest.raises(ConfigError, match="queue_batches is no setting any more"):
        load_run(["@", toml(tmp_path, "mine.toml", written)])


@pytest.mark.parametrize(
    "text",
    ["environment_args: {api_key: hunter2, x: [}", "api_key: hunter2: x", 'api_key: "hunter2', "a:\n- hunter2\nb\n"],
)
def test_what_is_said_about_broken_yaml_has_none_of_it(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.yaml is not YAML: .*line \d") as error:
        load_run(["@", toml(tmp_path, "run.yaml", text)])
    assert "hunter2" not in str(error.value)


KEYS = st.sampled_from("abc")
TABLES = st.recursive(
    st.dictionaries(KEYS, st.integers(), max_size=3),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def leaves(table, path=()):
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


@given(TABLES, TABLES)
def test_merging_keeps_every_upper_value_and_each_lower_one_that_is_not_overridden(lower, upper):
    merged = dict(leaves(deep_merge(lower, upper)))
    above = dict(leaves(upper))
    for path, value in above.items():
        if value != {}:
            assert merged[path] == value
    for path, value in leaves(lower):
        covered = any(path[: len(other)] == other[: len(path)] for other in above)
        if not covered:
            assert merged[path] == value


@given(TABLES, TABLES, TABLES)
def test_merging_changes_no_input_and_ignores_empty_tables(first, second, third):
    copies = repr((first, second, third))
    deep_merge(deep_merge(first, second), third)
    assert repr((first, second, third)) == copies
    assert deep_merge(first, {}) == first == deep_merge({}, first)
