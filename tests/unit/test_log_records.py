"""What a process writes, as lines for people and as records of its log: any bytes give JSON lines, and no text is lost."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from supervised import Witness, run

from sluice.supervise.log_records import LogLine, Records, original, read_line
from sluice.supervise.supervisor import ChildLog, ChildSpec, LogLimit

OURS = '{"attempt": 2, "event": "pull failed", "level": "warning", "timestamp": "2026-11-28T10:04:33Z", "service": "rollout"}'
PIECE = 1 << 16
"""Characters from which a line without an end is split."""


def records(*lines: str) -> list[dict[str, Any]]:
    """Return the records of lines of one process."""
    made = Records("trainer", lambda: datetime(2026, 11, 28, 10, 4, 33, 250_000, tzinfo=UTC))
    return [json.loads(record) for line in lines for record in made.of(line)]


def strict(line: str) -> dict[str, Any]:
    """Parse a line as JSON that other programs read too: Python reads NaN, jq may not."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert isinstance(record, dict)
    return record


def logged(path: Path, *chunks: bytes) -> list[dict[str, Any]]:
    """Return the records of a log after a process wrote these bytes."""

    async def write() -> None:
        stream = asyncio.StreamReader()
        following = asyncio.create_task(ChildLog(path, LogLimit()).follow(stream, lambda _: None))
        for chunk in chunks:
            stream.feed_data(chunk)
            await asyncio.sleep(0)
        stream.feed_eof()
        await following

    asyncio.run(write())
    if not path.exists():
        return []  # nothing but blank lines
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [strict(line) for line in content.decode().splitlines()]


def test_a_line_of_a_library_becomes_a_record_with_time_service_and_level() -> None:
    assert records("WARNING 11-21 02:00:00 [cpu.py:3] slow") == [
        {
            "event": "WARNING 11-21 02:00:00 [cpu.py:3] slow",
            "level": "warning",
            "timestamp": "2026-11-28T10:04:33.250000Z",
            "service": "trainer",
            "foreign": True,
        }
    ]


def test_a_record_of_ours_stays_as_it_is_to_the_byte() -> None:
    assert Records("trainer").of(OURS) == [OURS]


@pytest.mark.parametrize(
    ("raw", "level"),
    [
        ("I1126 10:04:33.123456 7 fork_posix.cc:71] Other threads are running", "info"),
        ("E1126 10:04:33.123456 7 chttp2.cc:9] no", "error"),
        ("F1126 10:04:33.123456 7 x.cc:9] check failed", "critical"),
        ("\x1b[1;33mWARNING\x1b[0m 11-21 slow", "warning"),
        ("(EngineCore pid=12) ERROR 11-21 boom", "error"),
        ("INFOrmation", "info"),
        ("nothing special", "info"),
    ],
)
def test_the_level_is_the_one_that_a_line_names(raw: str, level: str) -> None:
    assert [record["level"] for record in records(raw)] == [level]


@pytest.mark.parametrize("prefix", ["", "(EngineCore pid=12) "])
def test_a_traceback_is_a_record_a_line_and_all_of_them_are_errors(prefix: str) -> None:
    trace = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in <module>',
        "    1 / 0",
        "ZeroDivisionError: by zero",
    ]
    told = records(*(prefix + line for line in ["before", *trace, "after"]))
    assert [record["event"] for record in told] == [prefix + line for line in ["before", *trace, "after"]]
    assert [record["level"] for record in told] == ["info", "error", "error", "error", "error", "info"]


def test_of_a_progress_bar_the_last_state_is_kept_and_what_it_is_written_over() -> None:
    bars = "".join(
        f"\rLoading shards: {each:3}%|{'#' * each:10}| {each}/10 [00:0{each}<00:00, 3.{each}it/s]"
        for each in range(1, 10)
    )
    told = records(f"Starting to load{bars}\r\x1b[Kdone")
    assert [record["event"] for record in told] == [
        "Starting to load",
        "Loading shards:   9%|######### | 9/10 [00:09<00:00, 3.9it/s]",
        "done",
    ]


def test_a_record_of_ours_that_shares_its_line_with_a_progress_bar_is_a_record_of_its_own() -> None:
    bar, ours = records(f"\rLoading: 50%|## |{OURS}")
    assert (bar["event"], bar["foreign"]) == ("Loading: 50%|## |", True)
    assert ours == json.loads(OURS)


def test_numbers_that_json_lacks_are_texts() -> None:
    line = OURS.replace('"attempt": 2', '"loss": NaN, "scale": -Infinity')
    (record,) = (strict(each) for each in Records("trainer").of(line))
    assert (record["loss"], record["scale"], record["event"]) == ("NaN", "-Infinity", "pull failed")


def test_json_that_is_not_of_our_logging_is_text() -> None:
    (record,) = records('{"event": "of a library", "x": 1}')
    assert record["event"] == '{"event": "of a library", "x": 1}'


@pytest.mark.parametrize("raw", ['{"event": ' + "[" * 50_000, '{"event": ' + "1" * 5000 + "}"])
def test_json_that_cannot_be_parsed_is_text_and_ends_nothing(raw: str) -> None:
    assert [record["event"] for record in records(raw)] == [raw]
    assert read_line(raw) == LogLine(20, raw, structured=False)


def test_a_line_without_an_end_and_a_piece_of_a_long_one_are_marked(tmp_path: Path) -> None:
    long = b"x" * (3 * PIECE)
    told = logged(tmp_path / "child.log", b"whole\n", long + b"\nends", b" here")
    assert "".join(record["event"] for record in told[1:-1]) == long.decode()
    assert all(len(record["event"]) <= 2 * PIECE for record in told)
    assert [record.get("cut", False) for record in told] == [False, *[True] * (len(told) - 3), False, True]
    assert told[-1]["event"] == "ends here"


def test_what_a_killed_supervisor_left_of_a_line_becomes_a_record_and_the_next_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "child.log"
    path.write_text(f"{OURS}\n{OURS[:40]}")
    told = logged(path, b"resumed\n")
    assert [record["event"] for record in told] == ["pull failed", OURS[:40], "resumed"]
    assert [record.get("cut", False) for record in told] == [False, True, False]


def test_a_character_that_the_end_cuts_is_kept_as_bytes(tmp_path: Path) -> None:
    (record,) = logged(tmp_path / "child.log", "café".encode()[:-1])
    assert record["event"] == "caf\\xc3"


def letters(text: str) -> str:
    """Return the letters of a text as a log keeps them: successive texts over one another with equal letters are one."""
    plain = re.sub(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])", "", text)
    found = ""
    for line in plain.split("\n"):
        last = None
        for state in filter(str.strip, line.split("\r")):
            ours = OURS if state.endswith(OURS) and state.count('{"') == 1 else ""
            bare = state.removesuffix(ours)
            now = re.sub(r"[\W\d_]+", "", bare)
            found += now if bare.strip() and now != last else ""
            found += re.sub(r"[\W\d_]+", "", ours)
            last = None if ours else now
    return found


PIECES = st.one_of(
    st.binary(max_size=12),
    st.text(max_size=12).map(str.encode),
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"\x1b[31m", b"\x1b]8;;http://x\x07", b"\x00", b"\xe2\x80\xa8", b"\xed\xa0\x80"]
    ),
    st.sampled_from(
        [OURS.encode(), b'{"event": NaN}', b"Traceback (most recent call last):", b"  File", b"10%|#|", b'{"', b'"}']
    ),
)


@pytest.mark.slow
@given(st.lists(PIECES, max_size=25), st.integers(1, 40))
@example([OURS.encode(), b"\n", OURS[:50].encode(), b"\n", OURS.encode()], 7)
@example([b"a", b"\n", b"\xff" * 10, b"\r", b"x" * (PIECE + 100), b"\n"], 1 << 17)
def test_any_bytes_give_lines_of_json_and_no_text_is_lost(pieces: list[bytes], step: int) -> None:
    written = b"".join(pieces)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "child.log"
        told = logged(path, *(written[at : at + step] for at in range(0, len(written), step)))
        raw = path.read_text().splitlines() if told else []
    for record in told:
        assert {"event", "level", "timestamp", "service"} <= record.keys()
    # A piece without an end and a record of ours behind other text are put together again as they were written.
    kept = "".join(original(line) + ("" if strict(line).get("cut") else "\n") for line in raw)
    assert letters(kept) == letters(written.decode(errors="backslashreplace"))


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq")
def test_jq_reads_the_log_of_a_real_process_to_its_end(tmp_path: Path) -> None:
    code = f"""
import os, sys
print({OURS!r}, flush=True)
os.write(2, b"I1126 10:04:33.123456 7 fork_posix.cc:71] fork\\n\\x1b[31mred\\x1b[0m \\xff\\xfe\\n")
os.write(2, b"\\r 10%|# | 1/10\\r 20%|## | 2/10")
os.write(2, {OURS.encode()!r} + b"\\n")
sys.stdout.flush()
1 / 0
"""
    log = tmp_path / "logs/trainer.log"
    child = ChildSpec("trainer", (sys.executable, "-c", code), log, asyncio.Event().wait)
    asyncio.run(run([child], Witness(), max_restarts=0))
    done = subprocess.run(["jq", "-r", ".event", str(log)], capture_output=True, text=True, check=True)
    told = done.stdout.splitlines()
    assert told[:6] == [
        "pull failed",
        "I1126 10:04:33.123456 7 fork_posix.cc:71] fork",
        "red \\xff\\xfe",
        " 20%|## | 2/10",
        "pull failed",
        "Traceback (most recent call last):",
    ]
    assert told[-1] == "ZeroDivisionError: division by zero"


def test_lines_of_our_services_are_read_as_sentences() -> None:
    line = read_line(
        '{"event": "pull failed", "level": "warning", "timestamp": "t", "service": "rollout", "attempt": 2}'
    )
    assert line == LogLine(30, "pull failed attempt=2", structured=True, kind="pull failed")


@pytest.mark.parametrize(
    ("raw", "level"),
    [
        ("WARNING 11-21 02:00:00 [cpu.py:3] slow", 30),
        ("(EngineCore pid=12) ERROR 11-21 boom", 40),
        ("nothing special", 20),
        ("{not json", 20),
    ],
)
def test_lines_of_libraries_get_the_level_that_they_start_with(raw: str, level: int) -> None:
    assert (read_line(raw).level, read_line(raw).text) == (level, raw)


def test_a_python_warning_of_a_library_is_not_counted_as_a_line_of_our_service() -> None:
    line = read_line(
        '{"event": "/x/torch/utils.py:485: UserWarning: assuming", "level": "warning", "service": "trainer"}'
    )
    assert (line.level, line.structured) == (30, False)
