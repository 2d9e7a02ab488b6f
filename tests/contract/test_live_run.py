"""A live run obeys: settings are changed by a call, hold from a batch on, are recorded, and survive a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket

import grpc
import pytest
from orchestrator_doubles import RolloutDouble, orchestrator_settings
from test_orchestrator_run import Scene, make_scene

from orchestrator_svc.journal.store import read_facts
from sluice.cli import steer
from sluice.cli.rl import claim
from sluice.client import OrchestratorClient
from sluice.config import ConfigError, SecurityConfig, load_run
from sluice.rpc import SluiceError
from sluice.rpc.client_security import ClientSecurity
from sluice.rpc.principals import add_token
from sluice.run_files import JOURNAL_FILE
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version

pytestmark = pytest.mark.slow

DEADLINE_S = 60


@pytest.fixture
async def scene(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        yield await make_scene(tmp_path, stack, [RolloutDouble()])


async def run_once_served(scene: Scene) -> orchestrator_pb2.Run:
    """The run as an orchestrator that has just been started describes it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(SluiceError):
                async with scene.client() as client:
                    return await client.run("test")


async def until_applied(scene: Scene, steps: int) -> None:
    """Let the trainer apply batch after batch up to this one, and no more."""
    while scene.trainer.version.number < steps:
        await scene.until(lambda: scene.trainer.waiting)
        scene.trainer.apply()


def rates(scene: Scene) -> dict[int, float | None]:
    """The learning rate in the header of each batch, as it was sent last."""
    return {
        header.sequence_no: header.learning_rate if header.HasField("learning_rate") else None
        for header in scene.trainer.headers
    }


async def test_a_change_holds_from_a_batch_on_and_is_recorded(scene: Scene) -> None:
    scene.trainer.automatic = False
    running = scene.start(max_steps=6)
    async with scene.client() as client:
        await until_applied(scene, 1)
        await scene.until(lambda: len(scene.trainer.waiting) == 2)  # made before the change: they keep what they had
        changed = await client.set("test", {"trainer.lr": "2.5e-7", "max_staleness": "3"})
        assert {(each.key, each.old_value, each.new_value, each.from_sequence_no) for each in changed} == {
            ("trainer.lr", "", "2.5e-07", 4),
            ("max_staleness", "2", "3", 4),
        }
        assert await client.set("test", {"trainer.lr": "0.25e-6"}) == []
        run = await client.run("test")
        assert (run.max_staleness, [each.principal for each in run.changed_settings]) == (3, ["anyone"] * 2)
        scene.trainer.run_freely()
        await asyncio.wait_for(running, DEADLINE_S)
    assert rates(scene) == {1: None, 2: None, 3: None, 4: 2.5e-7, 5: 2.5e-7, 6: 2.5e-7}
    assert [header.max_staleness for header in scene.trainer.headers] == [2, 2, 2, 3, 3, 3]
    report = scene.report()
    assert report["max_staleness"] == 3
    assert {"key": "trainer.lr", "old": "", "new": "2.5e-07", "principal": "anyone", "from_batch": 4} in report[
        "changed_settings"
    ]
    facts = [fact.setting_changed for _, fact in read_facts(scene.run_dir) if fact.HasField("setting_changed")]
    assert [(each.principal, each.key, each.new_value) for each in facts] == [
        ("anyone", each.key, each.new_value) for each in changed
    ]
    calls = [json.loads(line) for line in (scene.run_dir / "calls/orchestrator.jsonl").read_text().splitlines()]
    assert calls[0]["request"]["values"] == {"trainer.lr": "2.5e-7", "max_staleness": "3"}


async def test_a_refused_change_changes_nothing_and_lists_what_could_be(scene: Scene) -> None:
    scene.trainer.automatic = False
    running = scene.start()
    async with scene.client() as client:
        await scene.until(lambda: scene.trainer.waiting)
        with pytest.raises(SluiceError, match="max_running") as refused:
            await client.set("test", {"max_staleness": "1", "orchestrator.batch_size": "4"})
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(refused.value.violations) == ["values[orchestrator.batch_size]"]
        run = await client.run("test")
        assert (run.max_staleness, list(run.changed_settings)) == (2, [])
        scene.trainer.run_freely()
        await asyncio.wait_for(running, DEADLINE_S)
    assert scene.report()["changed_settings"] == []


async def test_a_restart_takes_changed_settings_back_and_sends_batches_as_they_were_made(scene: Scene) -> None:
    scene.trainer.automatic = False
    running = scene.start(max_steps=6)
    async with scene.client() as client:
        await until_applied(scene, 1)
        await scene.until(lambda: len(scene.trainer.waiting) == 2)
        await client.set("test", {"trainer.lr": "0.5", "max_staleness": "1"})
        await until_applied(scene, 2)
        await scene.until(lambda: 4 in rates(scene))
    running.cancel()
    await asyncio.wait({running})
    before = {header.sequence_no: header for header in scene.trainer.headers}
    scene.trainer.checkpoint = Version(1, 2)
    scene.trainer.crash()  # the batches after its checkpoint are sent again
    scene.trainer.headers.clear()
    again = scene.start(max_steps=6)  # the settings file still says max_staleness = 2
    assert (await run_once_served(scene)).max_staleness == 1
    scene.trainer.run_freely()
    await asyncio.wait_for(again, DEADLINE_S)
    after = {header.sequence_no: header for header in scene.trainer.headers}
    for number in (3, 4):
        assert after[number].batch_id == before[number].batch_id
        assert after[number].HasField("learning_rate") == before[number].HasField("learning_rate") == (number == 4)
        assert after[number].max_staleness == before[number].max_staleness == (1 if number == 4 else 2)
    assert rates(scene)[6] == 0.5
    assert scene.report()["max_staleness"] == 1
    assert len(scene.report()["changed_settings"]) == 2


async def test_a_lower_bound_on_groups_under_way_holds_at_once(scene: Scene) -> None:
    scene.trainer.automatic = False
    running = scene.start(max_steps=8, max_concurrent=64)
    async with scene.client() as client:
        await scene.until_run(client, lambda run: run.live_groups == 6)  # three batches of two
        await client.set("test", {"orchestrator.max_concurrent": "2"})
        run = await client.run("test")
        assert (run.max_live_groups, run.live_groups) == (2, 6)
        await until_applied(scene, 2)
        run = await scene.until_run(client, lambda run: run.step == 2)
        assert run.live_groups == 2, "no group was started since"
        await client.set("test", {"orchestrator.max_concurrent": "64"})
        await scene.until_run(client, lambda run: run.live_groups == 6)
        scene.trainer.run_freely()
        await asyncio.wait_for(running, DEADLINE_S)
    assert scene.report()["steps"] == 8


async def test_the_command_finds_the_orchestrator_by_the_name_of_the_run(scene: Scene, capsys) -> None:
    scene.trainer.automatic = False
    running = scene.start()
    await scene.until(lambda: scene.trainer.waiting)
    (scene.run_dir / "config.toml").write_text(f'[peers]\norchestrator = "{scene.target}"\n')
    where = ["--output-dir", str(scene.directory)]

    def call(*words: str) -> int:
        return steer.run("set", ["test", *words, *where])

    assert await asyncio.to_thread(call, "trainer.lr=1e-4", "max_staleness = 1") == 0
    assert await asyncio.to_thread(call, "max_staleness=1") == 0
    assert await asyncio.to_thread(call, "seed=1") == 1
    printed = capsys.readouterr()
    first, second, third = [line for line in printed.out.splitlines() if not line.startswith("20")]  # without the log
    assert first.startswith("max_staleness: 2 -> 1, from batch ")
    assert second.startswith("trainer.lr: as started -> 0.0001, from batch ")
    assert third == "nothing changed: the run has these values"
    assert "cannot be changed while the run lives" in printed.err
    scene.trainer.run_freely()
    await asyncio.wait_for(running, DEADLINE_S)


async def test_the_commands_show_pause_resume_and_stop_a_run(scene: Scene, capsys) -> None:
    scene.trainer.automatic = False
    running = scene.start(max_steps=40)
    await scene.until(lambda: scene.trainer.waiting)
    (scene.run_dir / "config.toml").write_text(f'[peers]\norchestrator = "{scene.target}"\n')

    async def said(command: str, *words: str) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(steer.run, command, ["test", *words, "--output-dir", str(scene.directory)]) == 0
        lines = capsys.readouterr().out.splitlines()
        return "\n".join(line for line in lines if not line.startswith("20"))  # without the log

    shown = await said("status")
    assert re.search(r"^state +running$", shown, re.MULTILINE)
    assert re.search(r"^step +0 of 40, version ", shown, re.MULTILINE)
    assert re.search(r"^\S+ +version \S+ at 127\.0\.0\.1:\d+, \d+ samples$", shown, re.MULTILINE), "a replica"
    assert json.loads(await said("status", "--json"))["max_steps"] == "40"
    assert (await said("pause")).startswith("paused at step 0")
    assert re.search(r"^state +paused$", await said("status"), re.MULTILINE)
    assert (await said("resume")).startswith("resumed at step 0")
    assert (await said("stop", "--reason", "enough")).startswith("ends after the batches that are made")
    scene.trainer.run_freely()
    await asyncio.wait_for(running, DEADLINE_S)
    assert (steps := scene.report()["steps"]) < 40
    capsys.readouterr()
    assert await asyncio.to_thread(steer.run, "status", ["test", "--output-dir", str(scene.directory)]) == 1
    said_at_the_end = capsys.readouterr().err
    assert (
        f"sluice: run test has ended (stopped after {steps} steps); `sluice rl ... --resume` continues it"
        in said_at_the_end
    )


async def test_a_viewer_watches_a_run_and_cannot_change_it(scene: Scene, capsys) -> None:
    file, token = scene.directory / "principals.toml", scene.directory / "viewer.token"
    token.write_text(add_token(file, "dashboard", "viewer"))
    scene.trainer.automatic = False
    running = scene.start(max_steps=2, common={"security": SecurityConfig(principals_file=file)})
    await scene.until(lambda: scene.trainer.waiting)

    async def call(command: str, *words: str) -> int:
        where = ["--output-dir", str(scene.directory), "--security.token-file", str(token)]
        return await asyncio.to_thread(
            steer.run, command, ["test", *words, "--peers.orchestrator", scene.target, *where]
        )

    assert await call("status") == 0
    assert re.search(r"^state +running$", capsys.readouterr().out, re.MULTILINE)
    for words in (["pause"], ["resume"], ["stop"], ["set", "max_staleness=1"]):
        assert await call(*words) == 1
        assert "needs the role admin; principal 'dashboard' has the role viewer" in capsys.readouterr().err
    async with OrchestratorClient(scene.target, ClientSecurity(token_file=token)) as client:
        watching = client.watch("test")
        assert (await anext(watching)).event.sequence_no
        scene.trainer.run_freely()
        await asyncio.wait_for(running, DEADLINE_S)
        await watching.aclose()
    assert scene.report()["steps"] == 2


@pytest.mark.parametrize(
    ("began", "held", "message"),
    [
        (False, False, "nothing answers at 127.0.0.1:{port} ("),
        (True, False, "run r is not running: no `sluice rl` holds"),
        (True, True, "run r is starting, or an orchestrator that ended is started again: nothing answers at"),
    ],
)
def test_where_nobody_answers_the_files_of_the_run_say_why(tmp_path, capsys, began, held, message):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.toml").write_text(f'run = "r"\n[peers]\norchestrator = "127.0.0.1:{port}"\n')
    if began:
        (tmp_path / "r" / JOURNAL_FILE).touch()
    words = ["r", "trainer.lr=1", "--output-dir", str(tmp_path)]
    with (
        claim(load_run(["--run", "r", "--output-dir", str(tmp_path)]), resume=True)
        if held
        else contextlib.nullcontext()
    ):
        assert steer.run("set", words) == 1
    assert message.format(port=port) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["r", "max_staleness"], "write KEY=VALUE"),
        (["r", "a=1", "a=2"], "each key once"),
        (["r", "a=1", "--output-dir", "nowhere"], "there is no run 'r' in nowhere"),
        (["r"], "required"),
    ],
)
def test_a_malformed_command_says_how_to_write_it(words, message):
    with pytest.raises(ConfigError, match=message):
        steer.run("set", words)


async def test_the_ratio_of_environments_is_changed_and_stays_changed(scene: Scene) -> None:
    scene.trainer.automatic = False
    environment = orchestrator_settings(scene.directory, scene.target).environment
    mix = [{"environment": environment, "name": name} for name in ("easy", "hard")]

    def shares(run: orchestrator_pb2.Run) -> dict[str, float]:
        return {each.name: each.wanted_share for each in run.environments}

    running = scene.start(max_steps=12, environment="", environments=mix)
    async with scene.client() as client:
        await scene.until(lambda: scene.trainer.waiting)
        assert shares(await client.run("test")) == {"easy": 0.5, "hard": 0.5}
        await client.set("test", {"orchestrator.environments.hard.ratio": "3"})
        before = await client.run("test")
        assert shares(before) == {"easy": 0.25, "hard": 0.75}
        await until_applied(scene, 4)
    running.cancel()
    await asyncio.wait({running})
    again = scene.start(max_steps=12, environment="", environments=mix)
    assert shares(await run_once_served(scene)) == {"easy": 0.25, "hard": 0.75}
    scene.trainer.run_freely()
    await asyncio.wait_for(again, DEADLINE_S)
    drawn = [fact.task_drawn for _, fact in read_facts(scene.run_dir) if fact.HasField("task_drawn")]
    later = [each.environment for each in drawn[sum(each.groups for each in before.environments) :]]
    assert abs(later.count("hard") - 0.75 * len(later)) <= 1.5
