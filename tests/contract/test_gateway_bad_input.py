"""What a gateway answers to bad input, in front of a real orchestrator: its code, the form of its error, and nothing in the journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from orchestrator_doubles import RolloutDouble
from simulated_clock import LIMIT_S, SimulatedClock
from test_external_episodes import EXTERNAL
from test_orchestrator_run import DEADLINE_S, Scene, make_scene

from gateway_svc.app import serve
from gateway_svc.config import GatewayConfig
from orchestrator_svc.journal.store import read_facts
from sluice.config import CommonConfig, PeersConfig, SecurityConfig
from sluice.rpc import connect
from sluice.rpc.principals import add_token
from sluice.v1 import episode_pb2, episode_pb2_grpc, tokens_pb2

pytestmark = pytest.mark.slow

LEASE_S = 10.0
"""On the simulated clock of the orchestrator."""

MOST_BYTES = 4096
USER: Any = [{"role": "user", "content": "Hello"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": USER},
    "/v1/completions": {"model": "m", "prompt": "Hello"},
    "/v1/responses": {"model": "m", "input": "Hello"},
    "/v1/messages": {"model": "m", "max_tokens": 8, "messages": USER},
    "/v1/messages/count_tokens": {"model": "m", "messages": USER},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}
"""Each route that takes a prompt, with a body that can be served."""

NONSENSE: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [{"n": 0}, {"max_tokens": -1}, {"temperature": "hot"}, {"messages": []}, {"messages": 3}],
    "/v1/completions": [{"n": 0}, {"max_tokens": -1}, {"prompt": ["a", "b"]}, {"echo": True}, {"prompt": [-1]}],
    "/v1/responses": [{"input": 3}, {"max_output_tokens": -1}, {"temperature": "hot"}, {"input": [3]}],
    "/v1/messages": [{"max_tokens": -1}, {"messages": []}, {"messages": [{"role": 1}]}, {"temperature": "hot"}],
    "/v1/messages/count_tokens": [{"messages": 3}],
    "/inference/v1/generate": [{"token_ids": []}, {"token_ids": [-1]}, {"token_ids": [1 << 40]}, {"token_ids": "a"}],
}
"""Fields of each route that cannot be served."""

KEPT = {"session_generation_recorded", "reward_recorded", "episode_submitted"}
"""Facts that bad input must not leave behind."""


@dataclass
class Doors:
    scene: Scene
    url: str
    target: str
    clock: SimulatedClock

    def http(self, token: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=LIMIT_S)

    def token(self, name: str) -> str:
        return (self.scene.directory / name).read_text().strip()

    @contextlib.asynccontextmanager
    async def episodes(self, name: str):
        security = SecurityConfig(token_file=self.scene.directory / name if name else None)
        async with connect(self.target, security, role="agent") as channel:
            yield episode_pb2_grpc.EpisodeServiceStub(channel)

    def kept(self) -> list[str]:
        """Facts of what agents sampled, rewarded and submitted."""
        kinds = [fact.WhichOneof("kind") for _, fact in read_facts(self.scene.run_dir)]
        return [kind for kind in kinds if kind in KEPT]


@pytest.fixture
async def doors(tmp_path):
    """A gateway and an orchestrator with principals: agents ann and bob, and one that may train only."""
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [RolloutDouble()])
        file = tmp_path / "principals.toml"
        for name, role in {
            "ann": "agent",
            "bob": "agent",
            "door": "gateway",
            "hand": "dispatcher",
            "eve": "trainer",
        }.items():
            (tmp_path / name).write_text(add_token(file, name, role))
            (tmp_path / name).chmod(0o600)
        security = {
            "principals_file": file,
            "token_file": tmp_path / "door",
            "dispatcher_token_file": tmp_path / "hand",
        }
        clock = SimulatedClock()
        running = scene.start(
            **EXTERNAL,
            external={"lease_s": LEASE_S, "idle_s": 600},
            common={"security": {"principals_file": file}},
            clock=clock,
        )
        common = CommonConfig(
            run="test",
            output_dir=tmp_path,
            model="double",
            peers=PeersConfig(orchestrator=scene.target),
            security=SecurityConfig.model_validate(security),
        )
        settings = {"server": {"port": 0, "http_port": 0}, "capture": {"limits": {"max_body_bytes": MOST_BYTES}}}
        listening: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        config = GatewayConfig.model_validate(settings)
        serving = asyncio.create_task(serve(common, config, lambda *addresses: listening.set_result(addresses)))
        try:
            await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
            target, url = listening.result()
            yield Doors(scene, url, target, clock)
        finally:
            for task in (serving, running):
                task.cancel()
            await asyncio.wait({serving, running})


async def opened(http: httpx.AsyncClient, request_id: str = "") -> dict[str, Any]:
    """Open a session, as soon as the services have found each other."""
    while True:
        with contextlib.suppress(httpx.ConnectError):
            response = await http.post("/rl/sessions", json={"wait_s": 60, "request_id": request_id})
            if response.status_code == 200:
                return dict(response.json())
            assert response.status_code in {429, 503}, response.text
        await asyncio.sleep(0.05)


async def renewed(doors: Doors, session: dict[str, Any]) -> None:
    """Renew the lease of a session."""
    async with doors.episodes("ann") as episodes:
        await episodes.RenewLease(episode_pb2.RenewLeaseRequest(lease_id=session["lease_id"]))


def check_form(response: httpx.Response) -> None:
    """See that an error has the form of the dialect of its route."""
    body = response.json()
    if "/v1/messages" in response.request.url.path:
        assert (body["type"], set(body["error"])) == ("error", {"type", "message"}), response.text
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}, response.text
    assert len(body["error"]["message"]) > 20, response.text


async def test_bad_input_in_each_dialect_has_a_code_of_its_own_and_leaves_nothing(doors) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ann, bob, eve, none, wrong, keyed, settles = [
            await stack.enter_async_context(doors.http(token))
            for token in (doors.token("ann"), doors.token("bob"), doors.token("eve"), "", "wrong", "", "")
        ]
        expired = await opened(ann)
        await doors.clock.advance(LEASE_S + 1)
        ended = await opened(ann)
        assert (await ann.post(f"/rl/sessions/{ended['id']}/end", json={"abandon": "x"})).status_code == 200
        session = await opened(ann, "once")
        assert (await opened(ann, "once"))["id"] == session["id"]
        await renewed(doors, session)
        keyed.headers["authorization"] = f"Bearer {session['key']}"
        settles.headers["authorization"] = f"Bearer {session['settling_key']}"

        async def code(http: httpx.AsyncClient, path: str, body: Any = None, **headers: str) -> int:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await http.post(path, content=content, headers={"content-type": "application/json", **headers})
            check_form(response)
            return response.status_code

        tampered = {"authorization": f"Bearer {session['key'][:-1]}{'1' if session['key'][-1] == '0' else '0'}"}
        for route, body in ROUTES.items():
            named = f"/sessions/{session['id']}{route}"
            found = {
                "no JSON": {await code(keyed, route, text) for text in (b"", b"{", b"[]", b'{"a": "\xff"}', b"\x00")},
                "nested too deep": {await code(keyed, route, b'{"x":' + b"[" * 1800 + b"]" * 1800 + b"}")},
                "fields that cannot be served": {await code(keyed, route, body | each) for each in NONSENSE[route]},
                "no content type": {await code(keyed, route, body, **{"content-type": "text/plain"})},
                "too large": {await code(keyed, route, body | {"padding": "x" * MOST_BYTES})},
                "no session": {await code(none, route, body), await code(ann, route, body)},
                "no such token": {await code(wrong, named, body)},
                "role that may not": {await code(eve, named, body)},
                "key that was changed": {await code(none, route, body, **tampered)},
                "another principal's": {await code(bob, named, body)},
                "key of another session": {await code(keyed, f"/sessions/{ended['id']}{route}", body)},
                "no such session": {await code(ann, f"/sessions/g9-9-9{route}", body)},
                "ended": {await code(none, route, body, **{"x-api-key": ended["key"]})},
                "lease expired": {await code(none, route, body, **{"x-api-key": expired["key"]})},
            }
            assert found == {
                "no JSON": {400},
                "nested too deep": {400},
                "fields that cannot be served": {400},
                "no content type": {415},
                "too large": {413},
                "no session": {401},
                "no such token": {401},
                "role that may not": {403},
                "key that was changed": {404},
                "another principal's": {404},
                "key of another session": {404},
                "no such session": {404},
                "ended": {410},
                "lease expired": {410},
            }, route
        path = f"/rl/sessions/{session['id']}"
        assert {
            "turn before its first": await code(keyed, "/v1/responses", {"input": "a", "previous_response_id": "r/0"}),
            "reward of a turn that is not there": await code(settles, f"{path}/reward", {"reward": 1, "branch": "r/0"}),
            "reward that is no number": await code(settles, f"{path}/reward", b'{"reward": NaN}'),
            "reward of another principal": await code(bob, f"{path}/reward", {"reward": 1}),
            "reward of an ended one": await code(ann, f"/rl/sessions/{ended['id']}/reward", {"reward": 1}),
            "submitted before it was sampled": await code(settles, f"{path}/end", {"reward": 1}),
            "ended by another principal": await code(bob, f"{path}/end", {"abandon": "x"}),
            "ended by another key": await code(settles, f"/rl/sessions/{ended['id']}/end", {}),
            "renewed by another principal": await code(bob, f"{path}/renew", {}),
            "renewed by another key": await code(none, f"{path}/renew", {}, **{"x-api-key": ended["settling_key"]}),
            "renewed after it was given up": await code(ann, f"/rl/sessions/{ended['id']}/renew", {}),
            "renewed too late": await code(
                none, f"/rl/sessions/{expired['id']}/renew", {}, **{"x-api-key": expired["settling_key"]}
            ),
            "opened without a token": await code(none, "/rl/sessions", {}),
            "opened by a session key": await code(keyed, "/rl/sessions", {}),
            "opened with a wait of an hour": await code(ann, "/rl/sessions", {"wait_s": 3600}),
        } == {
            "turn before its first": 404,
            "reward of a turn that is not there": 404,
            "reward that is no number": 400,
            "reward of another principal": 404,
            "reward of an ended one": 410,
            "submitted before it was sampled": 400,
            "ended by another principal": 404,
            "ended by another key": 404,
            "renewed by another principal": 404,
            "renewed by another key": 404,
            "renewed after it was given up": 410,
            "renewed too late": 410,
            "opened without a token": 401,
            "opened by a session key": 401,
            "opened with a wait of an hour": 400,
        }
        assert doors.kept() == []
        # The session serves as before; what is repeated is done once.
        assert (await keyed.post("/v1/chat/completions", json=ROUTES["/v1/chat/completions"])).status_code == 200
        ends = [await settles.post(f"{path}/end", json={"reward": 1}) for _ in range(2)]
        assert [each.status_code for each in ends] == [200, 200]
        assert ends[0].json() == ends[1].json()
        assert {
            "submitted with another reward": await code(settles, f"{path}/end", {"reward": 2}),
            "given up after it was submitted": await code(settles, f"{path}/end", {"abandon": "x"}),
            "sampled after it was submitted": await code(keyed, "/v1/responses", ROUTES["/v1/responses"]),
        } == {
            "submitted with another reward": 400,
            "given up after it was submitted": 410,
            "sampled after it was submitted": 410,
        }
        assert doors.kept() == ["session_generation_recorded", "episode_submitted"]


async def test_bad_calls_over_grpc_have_a_code_of_their_own_and_leave_nothing(doors) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with doors.http(doors.token("ann")) as http:
            session = await opened(http)
        ann, bob, eve, none = [
            await stack.enter_async_context(doors.episodes(name)) for name in ("ann", "bob", "eve", "")
        ]
        await renewed(doors, session)
        name, conversation = session["id"], {"messages": [{"role": "user", "content": "Hello"}]}

        def asked(**fields: Any) -> episode_pb2.EpisodeServiceGenerateRequest:
            return episode_pb2.EpisodeServiceGenerateRequest(
                **{"episode_id": name, "conversation": conversation} | fields
            )

        async def code(method: Any, request: Any) -> str:
            try:
                await method(request)
            except grpc.aio.AioRpcError as error:
                return error.code().name
            return "OK"

        leasing, opening = episode_pb2.LeaseTasksRequest, episode_pb2.OpenEpisodeRequest
        rewarding, submitting = episode_pb2.RecordRewardRequest, episode_pb2.SubmitTrajectoryRequest
        assert {
            "no token": await code(none.Generate, asked()),
            "role that may not": await code(eve.Generate, asked()),
            "another principal's": await code(bob.Generate, asked()),
            "no such session": await code(ann.Generate, asked(episode_id="g9-9-9")),
            "no prompt": await code(ann.Generate, episode_pb2.EpisodeServiceGenerateRequest(episode_id=name)),
            "no samples": await code(ann.Generate, asked(n=0)),
            "too many samples": await code(ann.Generate, asked(n=(1 << 32) - 1)),
            "name too long": await code(ann.LeaseTasks, leasing(run="runs/test", request_id="x" * 129, max_tasks=1)),
            "no tasks": await code(ann.LeaseTasks, leasing(run="runs/test", request_id="r")),
            "another run": await code(ann.LeaseTasks, leasing(run="runs/other", request_id="r", max_tasks=1)),
            "endless wait": await code(
                ann.LeaseTasks, leasing(run="runs/test", request_id="r", max_tasks=1, wait=Duration(seconds=2**63 - 1))
            ),
            "no such lease": await code(ann.OpenEpisode, opening(lease_id="l9", request_id="o")),
            "lease of another": await code(bob.OpenEpisode, opening(lease_id=session["lease_id"], request_id="o")),
            "no more episodes": await code(ann.OpenEpisode, opening(lease_id=session["lease_id"], request_id="other")),
            "reward that is no number": await code(ann.RecordReward, rewarding(episode_id=name, reward=math.nan)),
            "reward before the turn": await code(ann.RecordReward, rewarding(episode_id=name, generation_id="r/0")),
            "submitted before it was sampled": await code(ann.SubmitTrajectory, submitting(episode_id=name)),
            "submitted by another": await code(bob.SubmitTrajectory, submitting(episode_id=name)),
            "too large": await code(
                ann.Generate, asked(conversation=None, token_ids=tokens_pb2.TokenIds(ids=[1 << 30] * (1 << 20)))
            ),
        } == {
            "no token": "UNAUTHENTICATED",
            "role that may not": "PERMISSION_DENIED",
            "another principal's": "NOT_FOUND",
            "no such session": "NOT_FOUND",
            "no prompt": "INVALID_ARGUMENT",
            "no samples": "INVALID_ARGUMENT",
            "too many samples": "INVALID_ARGUMENT",
            "name too long": "INVALID_ARGUMENT",
            "no tasks": "INVALID_ARGUMENT",
            "another run": "NOT_FOUND",
            "endless wait": "INVALID_ARGUMENT",
            "no such lease": "NOT_FOUND",
            "lease of another": "NOT_FOUND",
            "no more episodes": "FAILED_PRECONDITION",
            "reward that is no number": "INVALID_ARGUMENT",
            "reward before the turn": "NOT_FOUND",
            "submitted before it was sampled": "FAILED_PRECONDITION",
            "submitted by another": "NOT_FOUND",
            "too large": "RESOURCE_EXHAUSTED",
        }
        assert doors.kept() == []
        assert await code(ann.Generate, asked(request_id="mine")) == "OK"
        assert await code(ann.Generate, asked(request_id="mine")) == "OK"
        another = {"messages": [{"role": "user", "content": "Another"}]}
        assert await code(ann.Generate, asked(request_id="mine", conversation=another)) == "ALREADY_EXISTS"
        assert doors.kept() == ["session_generation_recorded"]
        assert await code(ann.AbandonEpisode, episode_pb2.AbandonEpisodeRequest(episode_id=name)) == "OK"
        assert await code(ann.Generate, asked()) == "FAILED_PRECONDITION"
