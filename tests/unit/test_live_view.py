"""What the views say about a run, drawn to a string."""

import io

import pytest
from rich.console import Console

from sluice.cli.live_view import RateLimit, RunProgress, RunView, render, sparkline, step_line
from sluice.cli.rl import report_failure
from sluice.supervise.log_records import LogLine
from sluice.supervise.supervisor import ChildState, Ending, Outcome
from sluice.v1 import orchestrator_pb2 as pb


def step(number: int, at: float, **metrics: float) -> pb.RunEvent:
    event = pb.RunEvent(step_finished=pb.StepFinished(step=number, metrics=metrics))
    event.time.FromMilliseconds(int(at * 1000))
    return event


@pytest.fixture
def progress() -> RunProgress:
    progress = RunProgress()
    progress.describe(pb.Run(max_steps=60, max_staleness=2, state=pb.RUN_STATE_RUNNING))
    for number in range(1, 11):
        progress.apply(
            step(
                number,
                100 + 2 * number,
                **{"reward/mean": number / 10, "staleness/mean": 0.5, "trainer/mismatch_kl": 1e-4},
            )
        )
    progress.apply(
        pb.RunEvent(
            load=pb.LoadReport(
                generated_tokens_per_s=1234,
                live_groups=40,
                max_live_groups=48,
                trainer_idle=0.25,
                bottleneck="rollout",
                max_staleness=2,
            )
        )
    )
    return progress


def drawn(progress: RunProgress, children: dict[str, ChildState] | None = None) -> str:
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(render("quickstart", progress, children or {}))
    return console.export_text()


def test_the_panel_shows_the_mix_and_what_does_not_come_through(progress: RunProgress) -> None:
    mixed = [
        pb.RunEnvironment(name="reverse", wanted_share=0.75, groups=37, groups_refilled=7),
        pb.RunEnvironment(name="sums", wanted_share=0.25, groups=10, quarantined_count=1),
    ]
    progress.apply(pb.RunEvent(load=pb.LoadReport(environments=mixed)))
    text = drawn(progress)
    assert "reverse 75% of 75% wanted, 7 replaced" in text
    assert "sums 25% of 25% wanted, 1 in quarantine" in text
    progress.apply(pb.RunEvent(load=pb.LoadReport(environments=[pb.RunEnvironment(name="only", groups=3)])))
    assert "only" not in drawn(progress)


@pytest.mark.parametrize("bound", [0, 4])
def test_the_panel_shows_the_bound_that_holds_now(progress: RunProgress, bound: int) -> None:
    progress.apply(pb.RunEvent(load=pb.LoadReport(max_staleness=bound)))
    assert f"mean 0.50, bound {bound}" in drawn(progress)


def test_the_panel_shows_step_reward_staleness_throughput_waiting_and_time_left(progress: RunProgress) -> None:
    text = drawn(progress, {"trainer": ChildState.SERVING, "rollout": ChildState.RESTARTING})
    for expected in (
        "quickstart: running",
        "10/60",
        "2.00 s/step, 1:40 left",
        "0.100 → 1.000",
        "mean 0.50, bound 2",
        "1,234 tokens/s",
        "40/48 groups live",
        "trainer waits for rollout",
        "trainer idle 25%",
        "● rollout restarting",
    ):
        assert expected in text


def test_a_run_that_has_only_begun_can_be_drawn() -> None:
    assert "starting" in drawn(RunProgress())


def test_a_step_is_one_plain_line(progress: RunProgress) -> None:
    assert step_line(progress) == (
        "step 10/60  reward 1.000  staleness 0.50  mismatch_kl 0.00010  2.00 s/step  1,234 tokens/s  "
        "trainer waits for rollout  100 s left"
    )


def test_a_replica_is_one_row_from_before_its_name_is_known(progress: RunProgress) -> None:
    address = "127.0.0.1:5001"
    for name, eligible in ((address, False), ("rollout-0", True)):
        replica = pb.Replica(replica=name, address=address, eligible=eligible, reason="does not answer " * 20)
        progress.apply(pb.RunEvent(replica_changed=pb.ReplicaChanged(replica=replica)))
        text = drawn(progress)
        assert text.count("0 running") == 1
        assert name in text
        assert ("does not answer" in text) is not eligible


def test_repeated_events_change_nothing(progress: RunProgress) -> None:
    rewards = list(progress.rewards)
    assert not progress.apply(step(3, 106, **{"reward/mean": 0.3}))
    assert (progress.step, list(progress.rewards)) == (10, rewards)


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [([], 5, ""), ([0.0, 1.0], 5, "▁█"), ([0.5, 0.5, 0.5], 3, "▁▁▁"), ([0.0, 0.0, 1.0, 1.0], 2, "▁█")],
)
def test_a_sparkline_fits_its_width(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


@pytest.mark.parametrize(
    ("line", "verbose", "shown"),
    [
        (LogLine(20, "hello", structured=True), False, False),
        (LogLine(20, "hello", structured=True), True, True),
        (LogLine(30, "careful", structured=True), False, True),
        (LogLine(30, "a library's opinion", structured=False), False, False),
        (LogLine(40, "broken [1]", structured=False), False, True),
    ],
)
def test_warnings_and_errors_are_shown_with_the_name_of_their_child(line: LogLine, verbose: bool, shown: bool) -> None:
    out = io.StringIO()
    view = RunView("r", Console(file=out, width=110), live=False, verbose=verbose)
    view.on_line("rollout-1", line)
    assert out.getvalue() == (f"   rollout-1 | {line.text}\n" if shown else "")


def test_without_a_terminal_services_restarts_and_steps_are_plain_lines(progress: RunProgress) -> None:
    out = io.StringIO()
    view = RunView("r", Console(file=out, width=200), live=False, verbose=False)
    view.on_state("trainer", ChildState.STARTING, "")
    view.on_state("trainer", ChildState.SERVING, "")
    view.on_state("trainer", ChildState.RESTARTING, "ended with signal SIGKILL; restart 1 of 3 in 0.5 s")
    view.progress = progress
    view.on_event(step(11, 122, **{"reward/mean": 1.1}))
    view.on_event(step(11, 122, **{"reward/mean": 1.1}))
    assert out.getvalue().splitlines() == [
        "trainer serves",
        "trainer ended with signal SIGKILL; restart 1 of 3 in 0.5 s",
        step_line(progress),
    ]


def test_repeated_lines_of_one_kind_become_a_few_lines_and_a_count() -> None:
    limit = RateLimit()
    shown = [line for number in range(40) for line in limit.offer("core.py", f"line {number}", now=0.1 * number)]
    assert shown == ["line 0", "line 1", "line 2"]
    assert limit.offer("other", "news", now=5.0) == ["(36 more like it) line 39", "news"]
    assert limit.offer("core.py", "line 40", now=6.0) == []
    assert limit.offer("core.py", "line 41", now=60.0) == ["line 40", "line 41"]
    assert limit.flush() == []


def test_a_traceback_is_cut_to_its_first_and_last_line_unless_verbose() -> None:
    line = LogLine(40, "service failed\nTraceback:\n  File x\nValueError: no", structured=True)
    for verbose, expected in ((False, ["service failed: ValueError: no"]), (True, line.text.splitlines())):
        out = io.StringIO()
        RunView("r", Console(file=out, width=110), live=False, verbose=verbose).on_line("trainer", line)
        assert out.getvalue().splitlines() == [f"     trainer | {part}" for part in expected]


def test_a_refusal_of_a_service_is_shown_alone(tmp_path):
    logged = ("Loading weights: 100%", "stopped", "sluice: model: /m holds no layers")
    for tail, shown in ((logged, 1), (("Traceback", "ValueError: no"), 2)):
        out = io.StringIO()
        view = RunView("r", Console(file=out, width=200), live=False, verbose=False)
        report_failure(view, Outcome(Ending.FAILED, "trainer", "ended", tail), "run r failed", tmp_path)
        assert [line.partition(" | ")[2] for line in out.getvalue().splitlines()[1:-1]] == [*tail[-shown:]]
