"""Secrets of the settings: found by type, name and form to any depth, and shown nowhere."""

from __future__ import annotations

import io
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import structlog
from toy_service import install_toy

from sluice.cli.main import main
from sluice.config import ConfigError, dump_toml, load_run
from sluice.config.secrets import REDACTED, is_secret_name, redact, redact_text, secret_values
from sluice.telemetry import configure_logging

SECRET = "correct-horse-battery"


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
    "name",
    [
        "api_key",
        "apiKey",
        "API_KEYS",
        "hf_token",
        "token",
        "password",
        "db-password",
        "client_secret",
        "secrets",
        "judge_key",
        "openai_key",
        "private_key",
        "Authorization",
        "credentials",
        "judgePassword",
        "passphrase",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "eos_token",
        "stop_token",
        "max_tokens",
        "answer_key",
        "question_key",
        "tls_key",
        "key",
        "keys",
        "model",
        "",
        "token_file",
        "token_budget",
        "tokenizer",
        "kv_cache_bytes",
        "secretary",
    ],
)
def test_names_of_ordinary_settings_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "sk-abcdefgh12345678",
        "hf_abcdefghijkl",
        "ghp_abcdefghijklmnop1234",
        "https://me:pw3xyz@judge/x",
        "https://judge/x?api_key=abcdef&n=3",
        "AKIAABCDEFGHIJKLMNOP",
        "Bearer abcdefgh12",
        "judge_key=abcdef",
    ],
)
def test_texts_with_the_form_of_a_secret_are_redacted(text: str) -> None:
    assert REDACTED in redact_text(f"cannot read {text!r}")
    assert redact_text(f"cannot read {text!r}") != redact_text(text)


def test_secrets_are_redacted_to_any_depth_and_nothing_else_is() -> None:
    plain: dict[str, Any] = {
        "judge": {"model": "gpt", "auth": [{"headers": {"Authorization": SECRET, "Accept": "json"}}]},
        "api_keys": {"first": SECRET, "second": [SECRET, {"third": SECRET}], "pin": 123456},
        "max_tokens": 5,
        "use_token": True,
        "answer_key": "solution",
    }
    assert redact(plain) == {
        "judge": {"model": "gpt", "auth": [{"headers": {"Authorization": REDACTED, "Accept": "json"}}]},
        "api_keys": {"first": REDACTED, "second": [REDACTED, {"third": REDACTED}], "pin": REDACTED},
        "max_tokens": 5,
        "use_token": True,
        "answer_key": "solution",
    }
    assert set(secret_values(plain)) == {SECRET, "123456"}


NESTED = ["--toy.engine", json.dumps({"judge": {"tries": 3, "judge_key": SECRET, "more": [{"password": SECRET}]}})]


def test_a_dry_run_shows_no_nested_secret_and_the_private_copy_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_run([*NESTED, "--dry-run"])
    printed = capsys.readouterr().out
    assert SECRET not in printed
    assert tomllib.loads(printed)["toy"]["engine"]["judge"]["tries"] == 3
    private = tomllib.loads(dump_toml(load_run(NESTED), redacted=False))
    assert private["toy"]["engine"]["judge"]["more"] == [{"password": SECRET}]


@pytest.mark.parametrize(
    "words",
    [
        ["--toy.lr", "0", "--toy.tags", f'["{SECRET}"]', *NESTED],  # one that is named elsewhere too
        ["--toy.engine", f"judge_key={SECRET}"],
        ["--toy.engine", '{"judge_key": "' + SECRET + '"'],
        ["--toy.limit", '{"judge_key": "' + SECRET + '"}'],
        ["--toy.optimizer", '{"decay": {"api_key": "' + SECRET + '"}}'],
        [f"api_key={SECRET}"],
        ["--toy.lr", f"https://me:{SECRET}@judge/x"],
    ],
)
def test_no_error_about_settings_shows_a_secret(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(words)
    assert SECRET not in str(caught.value)


def test_no_error_of_a_file_or_a_variable_shows_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'[toy]\nlr = "fast"\n[toy.engine.judge]\njudge_key = "{SECRET}"\n[toy.optimizer]\ndecay = "{SECRET}"\n'
    )
    monkeypatch.setenv("SLUICE_TOY__LIMIT", SECRET)
    with pytest.raises(ConfigError) as caught:
        load_run(["@", str(path)])
    assert SECRET not in str(caught.value)
    assert "toy.lr" in str(caught.value)


def test_the_error_of_a_check_shows_no_secret() -> None:
    def check(run: Any) -> None:
        raise ConfigError(f"the environment refuses {run.toy.engine}")

    with pytest.raises(ConfigError, match="the environment refuses") as caught:
        load_run(NESTED, check=check)
    assert SECRET not in str(caught.value)


def test_what_a_service_raises_and_logs_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = tmp_path / "site" / "toy_svc" / "app.py"
    app.write_text(
        app.read_text().replace(
            "    server = RpcServer", "    raise ERROR(f'no judge at {config.engine}')\n    server = RpcServer"
        )
    )
    for error, code in (("ConfigError", 2), ("ValueError", 1)):
        monkeypatch.delitem(sys.modules, "toy_svc.app", raising=False)
        monkeypatch.setattr(
            "builtins.ERROR", {"ConfigError": ConfigError, "ValueError": ValueError}[error], raising=False
        )
        assert main(["toy", *NESTED]) == code
        printed = capsys.readouterr().err
        assert "no judge at" in printed
        assert SECRET not in printed


def test_logs_hide_the_secrets_of_the_run() -> None:
    output = io.StringIO()
    configure_logging("toy", "info", output, secrets=[SECRET])
    log = structlog.get_logger()
    log.info("asked with %s", SECRET, headers={"x": [SECRET]}, count=3)
    log.error("failed", exc_info=ValueError(SECRET))
    assert SECRET not in output.getvalue()
    assert json.loads(output.getvalue().splitlines()[0])["count"] == 3
