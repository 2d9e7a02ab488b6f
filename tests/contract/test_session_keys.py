"""What each key of a session opens: each call with each key, over HTTP and gRPC, through real gateways to the real orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from orchestrator_doubles import RolloutDouble
from simulated_clock import LIMIT_S
from test_external_episodes import EXTERNAL
from test_gateway_bad_input import ROUTES
from test_gateway_run import opened, served_gateway, traced
from test_orchestrator_run import DEADLINE_S, Scene, make_scene

from orchestrator_svc.journal import DATABASE
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.sessions.desk import SECRET
from sluice.agent import AgentClient, Episode
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.rpc.access import SESSION_KEY, SETTLING_KEY
from sluice.rpc.principals import add_token
from sluice.v1 import common_pb2, episode_pb2, episode_pb2_grpc, journal_pb2
from sluice.v1.tokens_pb2 import ChatMessage

pytestmark = pytest.mark.slow

SAMPLES: dict[str, Any] = {**ROUTES, "/v1/models": None, "/v1/models/m": None}
"""The routes that sample, or that a client asks before."""

SETTLES: dict[str, Any] = {"renew": {}, "reward": {"reward": 0.5}, "end": {"reward": 1}}
SETTLING_FACTS = ("reward_recorded", "episode_submitted", "episode_given_up")


@dataclass
class Stage:
    """A run of external episodes with so many gateways.

    Attributes:
        doors: gRPC target and URL of each gateway.
    """

    scene: Scene
    doors: list[tuple[str, str]]
    settings: dict[str, Any]
    running: asyncio.Task[None]

    def token(self, name: str) -> str:
        return (self.scene.directory / name).read_text().strip()

    def http(self, token: str, door: int = 0) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.doors[door][1], headers=headers, timeout=LIMIT_S)

    async def statuses(self, session: Mapping[str, Any], token: str) -> tuple[set[int], set[int]]:
        """Return what a token, or a key, gets from the calls that sample a session, and from those that settle it."""
        samples, settles = set(), set()
        async with self.http(token) as http:
            for route, body in SAMPLES.items():
                path = f"/sessions/{session['id']}{route}"
                response = await (http.get(path) if body is None else http.post(path, json=body))
                samples.add(response.status_code)
            for name, body in SETTLES.items():
                response = await http.post(f"/rl/sessions/{session['id']}/{name}", json=body)
                settles.add(response.status_code)
        return samples, settles

    async def restart(self) -> None:
        """End the orchestrator, and start it again."""
        await self.stop()
        self.running = self.scene.start(**self.settings)

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait({self.running})

    def settled(self) -> list[tuple[str, str]]:
        """Return the facts that settle an episode, and what let each of them in."""
        facts = [(fact.WhichOneof("kind"), fact) for _, fact in read_facts(self.scene.run_dir)]
        return [(kind, credential(getattr(fact, kind))) for kind, fact in facts if kind in SETTLING_FACTS]


def credential(fact: Any) -> str:
    return common_pb2.Credential.Name(fact.settled_by).removeprefix("CREDENTIAL_")


@contextlib.asynccontextmanager
async def stage(directory: Path, *, principals: bool, gateways: int = 1, **external: Any) -> AsyncIterator[Stage]:
    """Run a stage; with principals, these are the agents ann and bob."""
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(directory, stack, [RolloutDouble()])
        settings: dict[str, Any] = {**EXTERNAL, "external": external}
        security = SecurityConfig()
        if principals:
            file = directory / "principals.toml"
            for name, role in {"ann": "agent", "bob": "agent", "door": "gateway", "hand": "dispatcher"}.items():
                (directory / name).write_text(add_token(file, name, role))
                (directory / name).chmod(0o600)
            settings["common"] = {"security": {"principals_file": file}}
            names = {"token_file": directory / "door", "dispatcher_token_file": directory / "hand"}
            security = SecurityConfig.model_validate({"principals_file": file, **names})
        running = scene.start(**settings)
        doors = [await stack.enter_async_context(served_gateway(scene, security=security)) for _ in range(gateways)]
        played = Stage(scene, doors, settings, running)
        try:
            yield played
        finally:
            await played.stop()


async def session_of(played: Stage, principals: bool, request_id: str = "") -> dict[str, Any]:
    async with played.http(played.token("ann") if principals else "") as http:
        return await opened(http, request_id)


@pytest.mark.parametrize("principals", [True, False])
async def test_over_http_one_key_samples_and_the_other_settles(tmp_path, capsys, principals) -> None:
    async with stage(tmp_path, principals=principals) as played:
        session, other = [await session_of(played, principals) for _ in range(2)]
        assert session["key"].startswith(SESSION_KEY)
        assert session["settling_key"].startswith(SETTLING_KEY)
        assert await played.statuses(session, session["key"]) == ({200}, {403})
        if principals:
            assert await played.statuses(session, "") == ({401}, {401})
            assert await played.statuses(session, played.token("bob")) == ({404}, {404})
        else:
            assert await played.statuses(session, "") == ({200}, {403})
        assert await played.statuses(session, other["settling_key"]) == ({403}, {404})
        assert await played.statuses(session, session["settling_key"][:-1]) == ({404}, {404})
        assert played.settled() == []
        assert await played.statuses(session, session["settling_key"]) == ({403}, {200})
        async with played.http(other["settling_key"]) as http:
            path = f"/rl/sessions/{other['id']}/end"
            assert (await http.post(path, json={"abandon": "enough"})).status_code == 200
            assert (await http.post("/rl/sessions", json={})).status_code == 401 if principals else 200
    assert [each for each in played.settled() if each[0] != "episode_given_up"] == [
        ("reward_recorded", "SETTLING_KEY"),
        ("episode_submitted", "SETTLING_KEY"),
    ]
    assert ("episode_given_up", "SETTLING_KEY") in played.settled()
    shown = "\n".join(traced(played.scene.run_dir, capsys, session["id"]))
    assert "reward 0.5, by the settling key" in shown
    assert "submitted, reward 1, by the settling key" in shown
    given_up = "\n".join(traced(played.scene.run_dir, capsys, other["id"]))
    assert "given up: ABANDONED, by the settling key" in given_up


async def test_the_token_of_its_principal_settles_a_session_and_is_named(tmp_path, capsys) -> None:
    async with stage(tmp_path, principals=True) as played:
        session = await session_of(played, principals=True)
        assert await played.statuses(session, played.token("ann")) == ({200}, {200})
    assert played.settled() == [("reward_recorded", "PRINCIPAL"), ("episode_submitted", "PRINCIPAL")]
    assert "reward 0.5, by principal ann" in "\n".join(traced(played.scene.run_dir, capsys, session["id"]))


GRPC = {
    "Generate": lambda name, lease: episode_pb2.EpisodeServiceGenerateRequest(
        episode_id=name, conversation={"messages": [ChatMessage(role="user", content="Hello")]}
    ),
    "RenewLease": lambda name, lease: episode_pb2.RenewLeaseRequest(lease_id=lease),
    "RecordReward": lambda name, lease: episode_pb2.RecordRewardRequest(episode_id=name, reward=0.5),
    "SubmitTrajectory": lambda name, lease: episode_pb2.SubmitTrajectoryRequest(episode_id=name, reward=1),
    "AbandonEpisode": lambda name, lease: episode_pb2.AbandonEpisodeRequest(episode_id=name),
}


async def codes(played: Stage, session: Mapping[str, Any], name: str, key: str) -> list[str]:
    """Return what a principal gets over gRPC with a key from the calls that sample, renew, reward, submit and give up."""
    security = SecurityConfig(token_file=played.scene.directory / name if name else None)
    found = []
    async with connect(played.doors[0][0], security, role="agent") as channel:
        stub = episode_pb2_grpc.EpisodeServiceStub(channel)
        streamed = episode_pb2.EpisodeServiceGenerateStreamRequest(request=GRPC["Generate"](session["id"], ""))
        shown = (("session-key", key),) if key else ()
        for method, make in GRPC.items():
            try:
                await getattr(stub, method)(make(session["id"], session["lease_id"]), metadata=shown)
                found.append("OK")
            except grpc.aio.AioRpcError as error:
                found.append(error.code().name)
        with contextlib.suppress(grpc.aio.AioRpcError):
            parts = [part async for part in stub.GenerateStream(streamed, metadata=shown)]
            assert (found[0], len(parts) > 0) == ("OK", True)
    return found


NO, YES, GONE = "PERMISSION_DENIED", "OK", "FAILED_PRECONDITION"
REFUSED = [YES, NO, NO, NO, NO]
"""What the session key opens: it samples."""

SETTLED = [NO, YES, YES, YES, GONE]
"""What the settling key opens: all but sampling; what was submitted is not given up."""


async def test_over_grpc_one_key_samples_and_the_other_settles(tmp_path) -> None:
    async with stage(tmp_path, principals=False) as played:
        session, other = [await session_of(played, principals=False) for _ in range(2)]
        assert await codes(played, session, "", "") == [YES, YES, NO, NO, NO], "a lease is renewed by its name"
        assert await codes(played, session, "", session["key"]) == REFUSED
        assert await codes(played, session, "", other["settling_key"]) == [NO, *["NOT_FOUND"] * 4]
        assert played.settled() == []
        assert await codes(played, session, "", session["settling_key"]) == SETTLED
        assert {each for _, each in played.settled()} == {"SETTLING_KEY"}


async def test_over_grpc_a_key_narrows_what_a_principal_may_and_opens_nothing_without_one(tmp_path) -> None:
    async with stage(tmp_path, principals=True) as played:
        session, other = [await session_of(played, principals=True) for _ in range(2)]
        for key in ("", session["key"], session["settling_key"]):
            assert await codes(played, session, "", key) == ["UNAUTHENTICATED"] * 5
        assert await codes(played, session, "bob", "") == ["NOT_FOUND"] * 5
        assert await codes(played, session, "ann", session["key"]) == REFUSED
        assert played.settled() == []
        assert await codes(played, session, "ann", session["settling_key"]) == SETTLED
        assert await codes(played, other, "ann", "") == [YES, YES, YES, YES, GONE]
        assert {each for _, each in played.settled()} == {"SETTLING_KEY", "PRINCIPAL"}


@pytest.mark.parametrize("one_key", [False, True])
async def test_an_old_client_is_told_what_to_do_or_settles_as_before_by_the_setting(tmp_path, capsys, one_key) -> None:
    """A client of v0.1.0 settles with the key that it samples with, or over gRPC with none."""
    async with stage(tmp_path, principals=False, **({"one_key": True} if one_key else {})) as played:
        session, other = [await session_of(played, principals=False) for _ in range(2)]
        async with played.http(session["key"]) as http:
            assert (await http.post("/v1/chat/completions", json=SAMPLES["/v1/chat/completions"])).status_code == 200
            ended = await http.post(f"/rl/sessions/{session['id']}/end", json={"reward": 1})
        if one_key:
            assert ended.status_code == 200
            assert await codes(played, other, "", "") == [YES, YES, YES, YES, GONE]
            async with played.http(other["settling_key"]) as http:
                sampled = await http.post("/v1/chat/completions", json=SAMPLES["/v1/chat/completions"])
            assert sampled.status_code == 403, "that key does not sample even so"
        else:
            assert (ended.status_code, ended.json()["error"]["code"]) == (403, "SETTLING_KEY_REQUIRED")
            for remedy in ("settling_key", "session-key", "token of its principal", "external.one_key = true"):
                assert remedy in ended.json()["error"]["message"]
            assert (await codes(played, other, "", ""))[2:] == [NO, NO, NO]
    if not one_key:
        assert played.settled() == []
        return
    assert played.settled() == [
        ("episode_submitted", "SESSION_KEY"),
        ("reward_recorded", "NONE"),
        ("episode_submitted", "NONE"),
    ]
    assert "submitted, reward 1, by the session key" in "\n".join(traced(played.scene.run_dir, capsys, session["id"]))
    assert "reward 0.5, by a caller without a key" in "\n".join(traced(played.scene.run_dir, capsys, other["id"]))


async def test_keys_hold_at_every_gateway_and_after_a_restart_and_are_written_nowhere(tmp_path) -> None:
    async with stage(tmp_path, principals=False, gateways=2) as played:
        session = await session_of(played, principals=False, request_id="mine")
        keys = [session["key"], session["settling_key"]]
        await played.restart()
        async with played.http("", door=1) as http:
            again = await opened(http, "mine")
        assert [again["id"], again["key"], again["settling_key"]] == [session["id"], *keys]
        async with played.http(session["key"], door=1) as http:
            assert (await http.post("/v1/chat/completions", json=SAMPLES["/v1/chat/completions"])).status_code == 200
            assert (await http.post(f"/rl/sessions/{session['id']}/end", json={})).status_code == 403
        async with played.http(session["settling_key"], door=1) as http:
            assert (await http.post(f"/rl/sessions/{session['id']}/end", json={"reward": 1})).status_code == 200
    assert played.settled() == [("episode_submitted", "SETTLING_KEY")]
    written = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    assert any(each.name == SECRET for each in written)
    for key in keys:
        code = key.rpartition(".")[2].encode()
        assert [
            each for each, content in written.items() if code in content or bytes.fromhex(code.decode()) in content
        ] == []


async def test_a_session_that_an_earlier_release_opened_is_settled_as_it_was_then(tmp_path) -> None:
    async with stage(tmp_path, principals=False) as played:
        by_key, by_settling_key, by_nobody = [await session_of(played, principals=False) for _ in range(3)]
        await played.stop()
        forget_second_keys(tmp_path / "test" / DATABASE)
        await played.restart()
        later = await session_of(played, principals=False)
        for session in (by_key, by_settling_key, by_nobody, later):
            async with played.http(session["key"]) as http:
                reply = await http.post("/v1/chat/completions", json=SAMPLES["/v1/chat/completions"])
                assert reply.status_code == 200, reply.text
        for session, token in ((by_key, by_key["key"]), (by_settling_key, by_settling_key["settling_key"])):
            async with played.http(token) as http:
                for _ in range(2):
                    ended = await http.post(f"/rl/sessions/{session['id']}/end", json={"reward": 1})
                    assert ended.status_code == 200, ended.text
        assert await codes(played, by_nobody, "", "") == [YES, YES, YES, YES, GONE]
        assert await played.statuses(later, later["key"]) == ({200}, {403}), "it was opened by this release"
    assert played.settled() == [
        ("episode_submitted", "SESSION_KEY"),
        ("episode_submitted", "SETTLING_KEY"),
        ("reward_recorded", "NONE"),
        ("episode_submitted", "NONE"),
    ]


def forget_second_keys(database: Path) -> None:
    """Let a journal say of its sessions what one of v0.1.0 does: nothing of a settling key."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        rows = connection.execute("SELECT seq, fact FROM facts WHERE kind = 'episode_opened'").fetchall()
        assert len(rows) == 3
        for seq, content in rows:
            fact = journal_pb2.Fact.FromString(content)
            assert fact.episode_opened.two_keys
            fact.episode_opened.ClearField("two_keys")
            connection.execute("UPDATE facts SET fact = ? WHERE seq = ?", (fact.SerializeToString(), seq))


@pytest.mark.parametrize("principals", [True, False])
async def test_the_client_settles_what_it_plays_and_shows_the_agent_no_key_for_it(tmp_path, principals) -> None:
    seen: list[str] = []

    async def play(episode: Episode) -> float:
        seen.append(str(episode.opened))
        assert episode.opened.session_key
        reply = await episode.generate([ChatMessage(role="user", content="Say something.")])
        if len(seen) == 1:
            await episode.abandon("once", requeue=True)
            return 0.0
        await episode.reward(0.5, generation_id=reply.generation_id)
        return 1.0

    async with stage(tmp_path, principals=principals) as played:
        security = SecurityConfig(token_file=tmp_path / "ann" if principals else None)
        async with AgentClient(played.doors[0][0], "test", security) as agent:
            assert await agent.run(play, at_a_time=1) >= 8
        await played.running
    assert not any(SETTLING_KEY in each for each in seen)
    assert {kind for kind, _ in played.settled()} == {*SETTLING_FACTS}
    assert {each for _, each in played.settled()} == {"SETTLING_KEY"}


async def test_the_refusal_of_a_wrong_key_names_no_key(tmp_path) -> None:
    async with stage(tmp_path, principals=False) as played:
        session = await session_of(played, principals=False)
        async with played.http(session["settling_key"]) as http:
            refused = await http.post("/v1/chat/completions", json=SAMPLES["/v1/chat/completions"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "SAMPLING_KEY_REQUIRED")
        async with played.http(session["key"]) as http:
            other = await http.post(f"/rl/sessions/{session['id']}/renew", json={})
        for answer in (refused, other):
            assert not any(key.rpartition(".")[2] in answer.text for key in (session["key"], session["settling_key"]))
