"""The HTTP port knows the same principals as gRPC: roles, certificates, quotas, and the log of calls."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import openai
import pytest
from certificates import Authority
from openai_dialect import chat, client_of, http_client
from rollout_stack import Replica

from sluice.client import RolloutClient
from sluice.config import SecurityConfig
from sluice.rpc.principals import add_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"prompt": [5, 6], "max_tokens": 1}


def principals_file(folder: Path, quota: str) -> tuple[SecurityConfig, dict[str, str]]:
    file = folder / "principals.toml"
    tokens = {role: add_token(file, role, role) for role in ("admin", "agent", "gateway", "replica", "viewer")}
    file.write_text(file.read_text().replace('role = "agent"\n', f'role = "agent"\nquota = {quota}\n'))
    return SecurityConfig(principals_file=file), tokens


async def post(replica: Replica, path: str, token: str) -> httpx.Response:
    async with http_client() as http:
        return await http.post(replica.url + path, json=BODY, headers={"authorization": f"Bearer {token}"})


async def test_roles_and_quotas_hold_over_both_ports_together(model, engine, tmp_path):
    security, tokens = principals_file(tmp_path, "{requests_per_s = 0.01, burst = 2}")
    async with Replica(model, engine, security) as served:
        codes = {role: (await post(served, "/v1/completions", tokens[role])).status_code for role in tokens}
        assert codes == {"admin": 200, "agent": 200, "gateway": 200, "replica": 403, "viewer": 403}
        (tmp_path / "agent.token").write_text(tokens["agent"])
        async with RolloutClient(served.target, SecurityConfig(token_file=tmp_path / "agent.token")) as rollout:
            await rollout.model()  # the second call of its burst, by gRPC
        refused = await post(served, "/v1/completions", tokens["agent"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "QUOTA_RATE")
        assert 50 < int(refused.headers["retry-after"]) <= 100
        async with client_of(served, tokens["agent"]) as client:
            with pytest.raises(openai.RateLimitError):
                await chat(client.with_options(max_retries=0))


async def test_a_viewer_reads_the_metrics_and_the_model_and_nothing_more(model, engine, tmp_path):
    security, tokens = principals_file(tmp_path, "{}")
    async with Replica(model, engine, security) as served, http_client() as http:
        headers = {"authorization": f"Bearer {tokens['viewer']}"}
        for path in ("/metrics", "/v1/models", "/v1/models/small"):
            assert (await http.get(served.url + path, headers=headers)).status_code == 200
            assert (await http.get(served.url + path)).status_code == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/reload_weights", "/update_weights"):
            assert (await post(served, path, tokens["viewer"])).status_code == 403
            assert (await post(served, f"{path}%0A", tokens["viewer"])).status_code == 403
        assert (await post(served, "/elsewhere", tokens["viewer"])).status_code == 404


async def test_changes_of_the_weights_are_logged_with_their_principal(model, engine, tmp_path):
    security, tokens = principals_file(tmp_path, "{}")
    async with Replica(model, engine, security, call_log=tmp_path / "calls/one.jsonl") as served:
        assert (await post(served, "/reload_weights", tokens["admin"])).status_code == 200
        assert (await post(served, "/reload_weights", tokens["agent"])).status_code == 403
        refused = await post(served, "/update_weights?", tokens["admin"])
        assert refused.status_code == 400
    lines = [json.loads(line) for line in (tmp_path / "calls/one.jsonl").read_text().splitlines()]
    assert [(line["principal"], line["method"], line["code"]) for line in lines] == [
        ("admin", "RolloutAdminService/ReloadWeights", "OK"),
        ("agent", "RolloutAdminService/ReloadWeights", "PERMISSION_DENIED"),
    ]
    assert lines[0]["peer"].startswith("http:127.0.0.1:")


async def test_a_client_certificate_names_its_principal_over_http(model, engine, tmp_path):
    authority = Authority(tmp_path / "a")
    own, own_key = authority.issue("server")
    file = tmp_path / "principals.toml"
    file.write_text('[[principal]]\nname = "bot"\nrole = "agent"\ncertificate = "spiffe://site/bot"\n')
    security = SecurityConfig(
        principals_file=file, tls_cert=own, tls_key=own_key, tls_ca=authority.path, require_client_cert=True
    )
    async with Replica(model, engine, security) as served:
        codes = {}
        for name in ("bot", "stranger"):
            context = ssl.create_default_context(cafile=authority.path)
            context.load_cert_chain(*authority.issue(name, uri=f"spiffe://site/{name}"))
            async with httpx.AsyncClient(verify=context) as http:
                url = f"https://127.0.0.1:{served.http_port}/v1/completions"
                codes[name] = (await http.post(url, json=BODY)).status_code
        assert codes == {"bot": 200, "stranger": 401}
