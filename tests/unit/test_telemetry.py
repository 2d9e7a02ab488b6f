"""Logs, curves and metrics as their readers find them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import threading
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sluice.telemetry import MetricsWriter, StateMetrics, configure_logging, counter, gauge


@pytest.fixture
def logs():
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_both_kinds_of_loggers_write_json_lines_with_the_service(logs):
    configure_logging("trainer", "info", logs)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger("ours").info("step", number=3)
        logging.getLogger("theirs").warning("slow %s", "disk", extra={"seconds": 2})
    ours, theirs = lines(logs)
    assert {
        "service": "trainer",
        "level": "info",
        "event": "step",
        "number": 3,
        "request_id": "r1",
    }.items() <= ours.items()
    expected = {"service": "trainer", "level": "warning", "event": "slow disk", "seconds": 2, "request_id": "r1"}
    assert expected.items() <= theirs.items()


@pytest.mark.parametrize(("level", "written"), [("debug", 4), ("warning", 2), ("critical", 0)])
def test_the_level_applies_to_both_kinds_of_loggers(logs, level, written):
    configure_logging("x", level, logs)
    for logger in (structlog.get_logger("ours"), logging.getLogger("theirs")):
        logger.info("less")
        logger.warning("more")
    assert len(lines(logs)) == written


def test_the_level_comes_from_the_environment_when_none_is_given(logs, monkeypatch):
    monkeypatch.setenv("SLUICE_LOG_LEVEL", "ERROR")
    configure_logging("x", None, logs)
    structlog.get_logger().warning("not written")
    assert logs.getvalue() == ""


def test_an_unknown_level_is_an_error(logs):
    with pytest.raises(ValueError, match="choose one of debug"):
        configure_logging("x", "loud", logs)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_traceback_is_written_without_local_variables(logs, stream):
    output = stream()
    configure_logging("x", "info", output)

    def fail(token: str) -> None:
        raise RuntimeError(len(token))

    try:
        fail("secret-" + "token")
    except RuntimeError:
        structlog.get_logger().exception("failed")
    assert "RuntimeError: 12" in output.getvalue()
    assert "secret-token" not in output.getvalue()


def test_a_terminal_gets_readable_lines(logs):
    terminal = Terminal()
    configure_logging("x", "info", terminal)
    structlog.get_logger().info("hello")
    assert "hello" in terminal.getvalue()
    with pytest.raises(json.JSONDecodeError):
        json.loads(terminal.getvalue())


def test_people_get_sentences_and_the_same_problem_three_times(logs):
    configure_logging("env", "warning", logs, for_people=True)
    for task in ("a", "b", "c", "d"):
        structlog.get_logger().warning("scoring failed", task=task, problem="KeyError: 'x'\n  File \"env.py\", line 5")
    structlog.get_logger().warning("scoring failed", task="e", problem="another")
    for _ in range(4):  # structlog cannot drop the lines of other loggers
        logging.getLogger("theirs").warning("slow %s", "disk")
    problem = "  KeyError: 'x'\n    File \"env.py\", line 5\n"
    assert logs.getvalue() == (
        f"scoring failed: task a\n{problem}scoring failed: task b\n{problem}scoring failed: task c\n{problem}"
        "  (others like it are not shown)\nscoring failed: task e\n  another\n" + 4 * "slow disk\n"
    )


def test_curves_go_to_json_lines_and_tensorboard_and_are_continued(tmp_path):
    for step in (1, 2):
        with contextlib.closing(MetricsWriter(tmp_path / "run")) as writer:
            writer.write(step, {"reward/mean": step / 4, "loss": math.nan})
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward/mean"], line["loss"]) for line in written] == [(1, 0.25, None), (2, 0.5, None)]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "run"))
    events.Reload()
    assert {(event.step, event.value) for event in events.Scalars("reward/mean")} == {(1, 0.25), (2, 0.5)}
    assert all(math.isnan(event.value) for event in events.Scalars("loss"))


@pytest.mark.parametrize("torn", ["", '{"step": 2, "ti', '{"step": 2}'])
def test_a_line_that_a_kill_left_half_does_not_take_the_next_one_with_it(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + torn)
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(3, {"loss": 1.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


async def test_state_is_scraped_on_its_loop_from_any_thread():
    registry, loops = CollectorRegistry(), []

    def read():
        loops.append(asyncio.get_running_loop())
        yield gauge("things", "Things.", {"a": 1.0, "b": 2.0}, "kind")
        yield counter("steps", "Steps.", 3.0)

    with StateMetrics(read, registry):
        elsewhere = await asyncio.to_thread(generate_latest, registry)
        here = generate_latest(registry)
    assert elsewhere == here
    assert {b'things{kind="b"} 2.0', b"steps_total 3.0"} <= set(here.splitlines())
    assert loops == [asyncio.get_running_loop()] * 2
    assert generate_latest(registry) == b""


async def test_a_busy_loop_does_not_hold_up_a_scrape(monkeypatch: pytest.MonkeyPatch):
    registry, scraped = CollectorRegistry(), []
    monkeypatch.setattr(StateMetrics, "READ_S", 0.01)
    with StateMetrics(lambda: [gauge("things", "Things.", 1.0)], registry):
        scraping = threading.Thread(target=lambda: scraped.append(generate_latest(registry)))
        scraping.start()
        scraping.join()  # the loop stands still meanwhile
    assert scraped == [b""]
