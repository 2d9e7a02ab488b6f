"""Prometheus raises an alert for each rule of a run that finds something, and for a run whose orchestrator hangs."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml

from sluice.rpc.server import free_ports
from sluice.watch.rules import RULES, Rule

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-ecosystem-kubernetes/bin"
FINDINGS = ROOT / "deploy/helm/sluice/findings.yaml"
LIMIT_S = 120.0

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(not (TOOLS / "promtool").exists(), reason="needs Prometheus: make install-ecosystem"),
]


def alert_of(rule: Rule) -> dict[str, object]:
    """Return the alert of a rule as the file has it."""
    rules = yaml.safe_load(FINDINGS.read_text())["groups"][0]["rules"]
    (found,) = (each for each in rules if f"rule='{rule.name}'" in each["expr"])
    return found


def expected(rule: Rule, severity: str) -> dict[str, object]:
    """Return how promtool describes the alert of a rule that fires."""
    alert = alert_of(rule)
    annotations = {
        key: text.replace("{{ or $labels.release $labels.run }}", "r") for key, text in alert["annotations"].items()
    }
    return {"exp_labels": {"rule": rule.name, "run": "r", "severity": severity}, "exp_annotations": annotations}


def test_each_alert_fires_while_its_rule_finds_something_and_is_critical_if_the_run_is_broken(tmp_path: Path) -> None:
    checks = [
        {
            "eval_time": at,
            "alertname": alert_of(rule)["alert"],
            "exp_alerts": [expected(rule, severity)] if severity else [],
        }
        for rule in RULES
        for at, severity in (("1m", ""), ("3m", "warning"), ("5m", "critical"), ("7m", ""))
    ]
    series = [
        {"series": f'sluice_run_finding{{rule="{rule.name}",run="r"}}', "values": "0 0 1 1 2 2 0 0"} for rule in RULES
    ]
    # promtool's clock begins at 0.
    overdue = {
        "interval": "1m",
        "input_series": [
            {"series": 'sluice_run_last_step_timestamp_seconds{run="r",instance="i"}', "values": "60+0x200"},
            {"series": 'sluice_run_state{run="r",instance="i",state="running"}', "values": "1+0x90 0+0x110"},
        ],
        "promql_expr_test": [],
        "alert_rule_test": [
            {"eval_time": "55m", "alertname": "SluiceStepOverdue", "exp_alerts": []},
            {
                "eval_time": "70m",
                "alertname": "SluiceStepOverdue",
                "exp_alerts": [
                    {
                        "exp_labels": {"run": "r", "instance": "i", "severity": "warning"},
                        "exp_annotations": {
                            "summary": "The run of r made its last step 1h 9m 0s ago.",
                            "description": "The orchestrator answers Prometheus and has not said so itself. `sluice status RUN` says what it waits for.",
                        },
                    }
                ],
            },
            {"eval_time": "120m", "alertname": "SluiceStepOverdue", "exp_alerts": []},
        ],
    }
    tests = tmp_path / "tests.yaml"
    found = {"interval": "1m", "input_series": series, "alert_rule_test": checks}
    tests.write_text(
        yaml.safe_dump({"rule_files": [str(FINDINGS)], "evaluation_interval": "1m", "tests": [found, overdue]})
    )
    tested = subprocess.run(
        [str(TOOLS / "promtool"), "test", "rules", str(tests)], capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.fixture
def orchestrator() -> Iterator[int]:
    """Serve the metrics of an orchestrator whose run is ruined and made its last step two hours ago; yield the port."""
    metrics = (
        'sluice_run_finding{rule="mismatch"} 2\nsluice_run_finding{rule="entropy"} 0\n'
        f'sluice_run_last_step_timestamp_seconds {time.time() - 7200}\nsluice_run_state{{state="running"}} 1\n'
    ).encode()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(metrics)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_a_real_prometheus_raises_the_alerts_of_a_run_that_is_ruined_and_overdue(
    orchestrator: int, tmp_path: Path
) -> None:
    rules = yaml.safe_load(FINDINGS.read_text())
    for each in rules["groups"][0]["rules"]:
        if "for" in each:
            each["for"] = "5s"
    (tmp_path / "findings.yaml").write_text(yaml.safe_dump(rules))
    (port,) = free_ports(1)
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["findings.yaml"],
        "scrape_configs": [
            {
                "job_name": "sluice",
                "static_configs": [{"targets": [f"127.0.0.1:{orchestrator}"], "labels": {"run": "r"}}],
            }
        ],
    }
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    command = [
        str(TOOLS / "prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    wanted = {("SluiceRunMismatch", "critical"), ("SluiceStepOverdue", "warning")}
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as server:
        try:
            firing, end = set[tuple[str, str]](), time.monotonic() + LIMIT_S
            while not wanted <= firing:
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < end, firing
                try:
                    answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/alerts", timeout=30)
                except httpx.TransportError:  # it starts
                    answer = httpx.Response(503)
                alerts = answer.json()["data"]["alerts"] if answer.is_success else []
                firing = {
                    (each["labels"]["alertname"], each["labels"]["severity"])
                    for each in alerts
                    if each["state"] == "firing"
                }
                time.sleep(1)
        finally:
            server.terminate()
            server.wait(20)
    assert firing == wanted
