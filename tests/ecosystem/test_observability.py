"""A real Prometheus finds a run of `sluice rl`, and answers each query of the dashboards."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from sluice.cli.init_model import ModelShape, init_model
from sluice.rpc.server import free_ports
from sluice.watch.rules import RULES

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-ecosystem-kubernetes/bin"
FOLDER = ROOT / "deploy/observability"
RUN, LIMIT_S = "seen", 300.0

DASHBOARDS = runpy.run_path(str(FOLDER / "dashboards.py"))

needs_prometheus = pytest.mark.skipif(
    not (TOOLS / "prometheus").exists(), reason="needs Prometheus: make install-ecosystem"
)

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_dashboards_are_those_of_the_table() -> None:
    for name in DASHBOARDS["DASHBOARDS"]:
        written = (DASHBOARDS["FOLDER"] / f"{name}.json").read_text()
        assert written == DASHBOARDS["text"](name), "run python deploy/observability/dashboards.py"
        panels = [each for each in json.loads(written)["panels"] if each["type"] != "row"]
        assert len({each["title"] for each in panels}) == len(panels)


@needs_prometheus
def test_the_settings_for_containers_are_those_of_a_prometheus_and_name_the_port_of_the_overlay(tmp_path: Path) -> None:
    for name in ("ca.pem", "prometheus.token", "viewer.token"):
        (tmp_path / name).write_text("")
    config = tmp_path / "prometheus-compose.yml"
    config.write_text((FOLDER / config.name).read_text())
    command = [str(TOOLS / "promtool"), "check", "config", "--syntax-only", str(config)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    ports = {
        table["server"].get("metrics_port")
        for table in tomllib.loads((ROOT / "deploy/docker/run.toml").read_text()).values()
        if isinstance(table, dict) and "server" in table
    }
    (port,) = ports
    jobs = yaml.safe_load(config.read_text())["scrape_configs"]
    addresses = {target for job in jobs for each in job.get("static_configs", ()) for target in each["targets"]}
    assert addresses == {f"{name}:{port}" for name in ("weightsync", "trainer", "orchestrator", "gateway")}
    assert [each["port"] for job in jobs for each in job.get("dns_sd_configs", ())] == [port]
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    assert {each.partition(":")[0] for each in addresses} | {"rollout"} <= services.keys()


class Prometheus:
    """A Prometheus under way."""

    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer.

        Raises:
            httpx.HTTPError: if it does not serve, or says 503 since it starts.
        """
        response = self._client.get(f"/api/v1/{path}", params=parameters)
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            response.raise_for_status()
        answer = response.json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def rows(self, expr: str) -> list[dict[str, Any]]:
        """Return what a query gives now."""
        rows: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return rows


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the settings of deploy/observability beside a run of two replicas."""
    directory = tmp_path_factory.mktemp("observed")
    model, outputs = directory / "model", directory / "outputs"
    init_model(model, ModelShape(layers=1))
    words = ["@", "examples/reverse_text/rl.toml", "--model", str(model), "--output-dir", str(outputs), "--run", RUN]
    words += ["--rollout.engine=transformers", "--orchestrator.batch-size=2", "--orchestrator.group-size=2"]
    words += ["--metrics-ports=true", "--orchestrator.max-steps=100000", "--replicas=2", "--threads=1"]
    words += ["--orchestrator.evaluation.prompts=2", "--orchestrator.evaluation.every-steps=2"]
    words += ["--orchestrator.checkpoint.every-steps=5"]
    # The folders lie to each other as in the repository.
    config = directory / "deploy/observability/prometheus.yml"
    config.parent.mkdir(parents=True)
    for rules in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]:
        copied = config.parent / rules
        copied.parent.mkdir(parents=True)
        copied.write_text((FOLDER / rules).read_text())
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    settings["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config.write_text(yaml.safe_dump(settings))
    checked = subprocess.run(
        [str(TOOLS / "promtool"), "check", "config", str(config)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (port,) = free_ports(1)
    flags = [
        f"--config.file={config}",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        (directory / "prometheus.log").open("w") as log,
        (directory / "run.log").open("w") as shown,
        subprocess.Popen([str(TOOLS / "prometheus"), *flags], stdout=log, stderr=subprocess.STDOUT) as server,
        subprocess.Popen(
            [sys.executable, "-m", "sluice.cli.main", "rl", *words],
            cwd=ROOT,
            env=dict(os.environ),
            stdout=shown,
            stderr=subprocess.STDOUT,
        ) as run,
    ):
        try:
            asked, end = Prometheus(port), time.monotonic() + LIMIT_S
            while True:
                assert run.poll() is None, (directory / "run.log").read_text()
                assert server.poll() is None, (directory / "prometheus.log").read_text()
                assert time.monotonic() < end, (directory / "run.log").read_text()
                try:
                    rows = asked.rows("sluice_run_policy_number")
                except httpx.HTTPError:  # it starts
                    rows = []
                if rows and float(rows[0]["value"][1]) >= 5:
                    break
                time.sleep(0.5)
            yield asked
        finally:
            run.terminate()
            server.terminate()
            run.wait(60)
            server.wait(20)
    assert not (outputs / f"{RUN}.metrics_targets.json").exists()


@needs_prometheus
def test_prometheus_finds_each_service_by_the_list_of_the_run(prometheus: Prometheus) -> None:
    targets = prometheus.ask("targets")["activeTargets"]
    assert [(each["scrapeUrl"], each["lastError"]) for each in targets if each["health"] == "down"] == []
    found = {(each["labels"]["service"], each["labels"]["replica"]) for each in targets}
    assert found == {
        ("weightsync", "weightsync"),
        ("trainer", "trainer"),
        ("rollout", "rollout-0"),
        ("rollout", "rollout-1"),
        ("orchestrator", "orchestrator"),
    }
    assert {each["labels"]["run"] for each in targets} == {RUN}


@needs_prometheus
def test_each_rule_of_a_run_is_asked_and_has_an_alert(prometheus: Prometheus) -> None:
    assert {each["metric"]["rule"] for each in prometheus.rows("sluice_run_finding")} == {each.name for each in RULES}
    (group,) = prometheus.ask("rules")["groups"]
    assert len(group["rules"]) == len(RULES) + 1
    assert {each["health"] for each in group["rules"]} <= {"ok", "unknown"}


@needs_prometheus
def test_each_query_of_each_panel_is_answered(prometheus: Prometheus) -> None:
    queries = {
        f"{name}: {panel.title}: {query.legend}": query
        for name, (_, rows) in DASHBOARDS["DASHBOARDS"].items()
        for panels in rows.values()
        for panel in panels
        for query in panel.queries
    }
    texts = {where: DASHBOARDS["filled"](query.expr, RUN) for where, query in queries.items()}
    empty, end = {*texts}, time.monotonic() + LIMIT_S
    while empty and time.monotonic() < end:
        empty = {where for where in empty if not prometheus.rows(texts[where])}
        if not [where for where in empty if not queries[where].needs]:
            break
        time.sleep(1)
    assert [where for where in sorted(empty) if not queries[where].needs] == []
    named = {each for text in texts.values() for each in re.findall(r"\b(?:sluice|process)_[a-z_0-9]+", text)}
    known = {*prometheus.ask("label/__name__/values")}
    absent = {
        each
        for where, query in queries.items()
        if query.needs
        for each in re.findall(r"\bsluice_[a-z_0-9]+", texts[where])
    }
    assert named - known <= absent


@needs_prometheus
def test_a_run_that_goes_on_is_ready_everywhere(prometheus: Prometheus) -> None:
    ready = {row["metric"]["replica"]: row["value"][1] for row in prometheus.rows("sluice_ready")}
    assert ready == dict.fromkeys(("weightsync", "trainer", "rollout-0", "rollout-1", "orchestrator"), "1")
