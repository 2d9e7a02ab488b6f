"""`sluice monitor` reads runs that live and runs that have ended, as people and programs ask for them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sluice.cli.main import main
from sluice.cli.monitor import Notifier, find_run
from sluice.config import ConfigError
from sluice.run_files import locked
from sluice.watch.files import NewLines, RunFiles
from sluice.watch.rules import Row

STEPS = 40
BEGAN = time.time()


def step_line(step: int, **values: float) -> str:
    """Return a line of metrics.jsonl; in names two underscores stand for a slash."""
    good = {
        "reward/mean": 0.3 + step / 100,
        "completion/mean_tokens": 40.0,
        "trainer/mismatch_kl": 0.001,
        "time/step_s": 1.0,
    }
    own = {name.replace("__", "/"): value for name, value in values.items()}
    return json.dumps({"step": step, "time": BEGAN + step, **good, **own}) + "\n"


def write_run(output_dir: Path, name: str, lines: list[str], report: Mapping[str, object] | None) -> Path:
    """Write what `sluice monitor` reads of a run."""
    directory = output_dir / name
    (directory / "trajectories").mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(lines))
    (directory / "config.toml").write_text(f'run = "{name}"\n[orchestrator]\nmax_steps = {STEPS}\n')
    samples = [
        {
            "step": STEPS,
            "task_id": f"t{number}",
            "reward": number / 4,
            "prompt": [{"role": "user", "content": "2+2?"}],
            "completion": f"four {number} \x1b[31m",
        }
        for number in range(5)
    ]
    text = "".join(json.dumps(each) + "\n" for each in samples)
    (directory / "trajectories" / f"step_{STEPS:06d}.jsonl").write_text(text)
    if report is not None:
        (directory / "report.json").write_text(json.dumps(report))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory with a run that learned, one that was ruined, and one whose processes are gone."""
    steps = range(1, STEPS + 1)
    write_run(tmp_path, "good", [step_line(each) for each in steps], {"state": "succeeded", "steps": STEPS})
    ruined = [
        step_line(each, **({"trainer__mismatch_kl": 0.5, "reward__mean": 0.05} if each > 20 else {})) for each in steps
    ]
    write_run(tmp_path, "ruined", ruined, {"state": "succeeded", "steps": STEPS})
    write_run(tmp_path, "gone", [step_line(each) for each in steps], None)
    return tmp_path


def monitor(runs: Path, *words: str) -> int:
    """Run the command on a directory of runs."""
    return main(["monitor", *words, "--output-dir", str(runs)])


@pytest.mark.parametrize(("run", "code"), [("good", 0), ("ruined", 2), ("gone", 2)])
def test_once_says_by_its_exit_code_how_a_run_is(runs: Path, run: str, code: int, capsys) -> None:
    assert monitor(runs, run, "--once") == code
    said = capsys.readouterr().out
    assert said.startswith(f"{run}: {'gone' if run == 'gone' else 'succeeded'}, step {STEPS}/{STEPS}: ")
    assert ("BROKEN mismatch since step 21: mismatch_kl is 0.5" in said) is (run == "ruined")


def test_once_as_json_has_findings_with_reason_and_remedy(runs: Path, capsys) -> None:
    assert monitor(runs, "ruined", "--once", "--json") == 2
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["verdict"]) == ("succeeded", STEPS, "broken")
    assert [each["rule"] for each in found["findings"]] == ["mismatch", "reward"]
    assert all(each["since_step"] > 20 and each["why"] and each["remedy"] for each in found["findings"])


def test_a_list_has_a_line_for_each_run_and_the_worst_verdict(runs: Path, capsys) -> None:
    assert monitor(runs, "--list", "--json") == 2
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {each["run"]: each["verdict"] for each in lines} == {"good": "fine", "ruined": "broken", "gone": "broken"}
    assert monitor(runs, "--list") == 2
    assert "broken: mismatch, reward" in capsys.readouterr().out


def test_an_ended_run_is_summarised_with_metrics_and_samples(runs: Path, capsys) -> None:
    assert monitor(runs, "good") == 0
    said = capsys.readouterr().out
    assert "reward/mean" in said
    assert "task t0" in said
    assert "\x1b" not in said, "a terminal must not obey what a model wrote"


def test_metrics_and_samples_can_be_asked_for_alone(runs: Path, capsys) -> None:
    assert monitor(runs, "good", "--metrics") == 0
    assert "time/step_s" in (said := capsys.readouterr().out)
    assert "task t0" not in said
    assert monitor(runs, "good", "--samples", "2", "--below", "0.6", "--json") == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [0.0, 0.25]


@pytest.mark.slow
def test_plots_go_to_a_folder(runs: Path, tmp_path: Path, capsys) -> None:
    assert monitor(runs, "good", "--plots", str(tmp_path / "plots")) == 0
    written = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"reward-mean.png", "time-step_s.png"} <= written
    assert f"{len(written)} plots" in capsys.readouterr().out


def test_a_run_that_is_not_there_is_named_with_what_to_do(runs: Path, capsys) -> None:
    assert monitor(runs, "godo") == 2
    assert "--list" in capsys.readouterr().err


@pytest.mark.parametrize("until", ["lunch", "step=", "step=-1", "step=²"])
def test_what_cannot_be_waited_for_is_refused(runs: Path, until: str, capsys) -> None:
    assert monitor(runs, "good", "--until", until) == 2
    assert "step=N" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("until", "code"), [("succeeded", 0), (f"step={STEPS}", 0), ("ended", 0), ("failed", 1), ("step=99", 1)]
)
def test_waiting_for_a_run_that_has_ended_says_at_once_whether_it_came(runs: Path, until: str, code: int) -> None:
    assert monitor(runs, "good", "--until", until) == code


@pytest.mark.slow
def test_a_live_run_is_followed_until_a_step_and_its_findings_are_told(tmp_path: Path, capsys) -> None:
    # A step that is old is a finding, too.
    directory = write_run(tmp_path, "live", [step_line(each, time=time.time()) for each in range(1, 11)], None)
    told = tmp_path / "told"

    def train() -> None:
        with (directory / "metrics.jsonl").open("a") as lines:
            for step in range(11, 31):
                lines.write(step_line(step, trainer__mismatch_kl=0.5, time=time.time()))
                lines.flush()

    with locked(directory) as is_ours:
        assert is_ours
        training = threading.Thread(target=train)
        training.start()
        words = ("live", "--until", "step=30", "--plain", "--every", "1", "--notify", f"cat >> {told}; echo >> {told}")
        assert monitor(tmp_path, *words) == 0
        training.join()
    said = capsys.readouterr().out
    assert "mismatch since step 11" in said
    messages = [json.loads(line) for line in told.read_text().splitlines()]
    assert [(each["event"], each["rule"]) for each in messages] == [("finding", "mismatch")]


@pytest.mark.slow
def test_a_step_that_does_not_come_in_time_ends_the_wait(tmp_path: Path, capsys) -> None:
    directory = write_run(tmp_path, "live", [step_line(1)], None)
    with locked(directory):
        assert monitor(tmp_path, "live", "--until", "step=2", "--within", "1", "--every", "1") == 1
    assert "step=2 has not come within 1 s" in capsys.readouterr().err


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Yield the URL of a server and the list of requests that it got. It answers the path /refuse with 500."""
    taken: list[dict[str, object]] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/refuse" else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Taker) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()
        serving.join()


def test_a_webhook_takes_what_is_told_and_its_failure_is_only_printed(webhook, capsys) -> None:
    url, taken = webhook
    asyncio.run(Notifier(url, "r").send("ended", {"state": "failed"}))
    assert taken == [{"run": "r", "event": "ended", "state": "failed"}]
    assert capsys.readouterr().err == ""
    asyncio.run(Notifier(f"{url}/refuse", "r").send("ended", {}))
    asyncio.run(Notifier("exit 3", "r").send("ended", {}))
    assert capsys.readouterr().err.splitlines() == [
        f"sluice: --notify {url}/refuse failed: HTTP 500",
        "sluice: --notify exit 3 failed: exit code 3",
    ]


def test_only_whole_new_lines_are_read_and_a_shorter_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = NewLines(path)
    assert lines.read() == []
    path.write_bytes(b"one\ntw")
    assert lines.read() == [b"one"]
    path.write_bytes(b"one\ntwo\n")
    assert lines.read() == [b"two"]
    assert lines.read() == []
    path.write_bytes(b"1\n")
    assert lines.read() == [b"1"]


def test_torn_lines_and_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 2.0, "completion/mean_tokens": 3.0, "reward/mean": null}\n{"step": 2, "ti{"step": 3}\n[]\n{"time": 1}\n'
    )
    assert list(RunFiles(tmp_path).new_rows()) == [Row(1, 2.0, {"completion/mean_tokens": 3.0})]


def test_a_directory_can_be_named_as_well_and_the_newest_run_needs_no_name(runs: Path, capsys) -> None:
    assert main(["monitor", str(runs / "good"), "--once"]) == 0
    assert monitor(runs, "--once") == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("gone: gone")


def test_without_runs_it_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--output-dir"):
        find_run(None, ["--output-dir", str(tmp_path)])
