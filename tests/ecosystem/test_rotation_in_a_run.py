"""A run with mutual TLS, whose certificates and authority are replaced while it trains."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sluice.cli.init_model import ModelShape, init_model

ROOT = Path(__file__).parents[2]
SLUICE = (sys.executable, "-m", "sluice.cli.main")

AGENT = """
import asyncio
import ssl
import time

import httpx
import openai


class Agent:
    def __init__(self, certs):
        self.certs = certs

    def context(self):
        for _ in range(1000):  # a certificate and its key are two files, and may be replaced between two looks
            try:
                context = ssl.create_default_context(cafile=f"{self.certs}/ca.pem")
                context.load_cert_chain(f"{self.certs}/agents.pem", f"{self.certs}/agents.key")
            except ssl.SSLError:
                time.sleep(0.01)
                continue
            return context
        raise RuntimeError("the certificate does not fit its key")

    async def run(self, data, base_url, api_key):
        await asyncio.sleep(0.4)  # the run must last until everything was replaced
        async with httpx.AsyncClient(verify=self.context()) as http:
            policy = openai.AsyncOpenAI(api_key=api_key, base_url=base_url, http_client=http, max_retries=0)
            asked = [{"role": "user", "content": data["text"]}]
            reply = await policy.chat.completions.create(model="any", messages=asked)
        return 1.0 if len(reply.choices[0].message.content) % 2 else 0.5
"""
"""Talks to the gateway by HTTPS with a client certificate, and repeats nothing."""

AGE_S = 1.0
MAX_STEPS = 200
STEPS = ("renew --all", "authority add", "authority use", "authority drop")

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(600)]


def sluice(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SLUICE, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.soak  # `make test` replaces certificates and the authority beside calls: tests/contract/test_rotation.py
def test_a_run_loses_nothing_while_certificates_and_the_authority_are_replaced(tmp_path: Path) -> None:
    """It has no token: every service is known by its certificate."""
    certs, model, outputs = tmp_path / "certs", tmp_path / "model", tmp_path / "outputs"
    init_model(model, ModelShape(layers=1))
    sluice("certs", "init", "--dir", str(certs))
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {
        "model": model,
        "output-dir": outputs,
        "run": "rotated",
        "security.certs-dir": certs,
        "security.connection-age-s": AGE_S,
        "rollout.engine": "transformers",
        "orchestrator.batch-size": 2,
        "orchestrator.group-size": 2,
        "orchestrator.max-steps": MAX_STEPS,
        "agents.agent": f"{tmp_path}/agent.py:Agent",
        "agents.args.certs": certs,
        "gateway.server.port": 0,
        "gateway.server.http-port": 0,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    run = subprocess.Popen(
        [*SLUICE, "rl", "@", "examples/reverse_text/rl.toml", *flags, "--plain"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout is not None
    said: list[str] = []

    def next_step() -> None:
        for line in run.stdout:
            said.append(line.rstrip())
            if line.startswith("step "):
                return
        raise AssertionError("the run ended:\n" + "\n".join(said))

    try:
        next_step()
        for step in STEPS:
            sluice("certs", *step.split(), "--dir", str(certs))
            until = time.monotonic() + 3 * AGE_S  # a look at the files, and the age of a connection, with room to spare
            while time.monotonic() < until:
                next_step()
        said += run.communicate(timeout=600)[0].splitlines()
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, "\n".join(said)
    assert not [line for line in said if "restart" in line]
    report = json.loads((outputs / "rotated" / "report.json").read_text())
    assert report["sessions_ended"] == {"SUBMITTED": 4 * MAX_STEPS}
    assert (report["groups_failed"], report["generation_retries"], report["replicas_evicted"]) == ({}, 0, {})
    told = json.loads(sluice("audit", str(outputs / "rotated"), "--json").stdout)
    assert (told["exact"], told["trained"]) == (True, 4 * MAX_STEPS)
    print(f"{told['trained']} episodes of {MAX_STEPS} batches, none lost; generations repeated: 0")
