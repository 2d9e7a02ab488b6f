"""Write deploy/helm/sluice/findings.yaml, an alert for each rule of sluice.watch: `python deploy/observability/findings.py`.

The orchestrator applies the rules and exports what they say, so that alerts, terminal, report and monitor never differ. Only what a
process that hangs cannot say of itself is asked here, from the time of its last step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from sluice.watch.rules import RULES, Rule

FILE = Path(__file__).parents[1] / "helm" / "sluice" / "findings.yaml"
HEAD = "# Written by deploy/observability/findings.py from sluice/watch/rules.py. docs/rules.md has every rule.\n"
RUN = "{{ or $labels.release $labels.run }}"

OVERDUE = {
    "alert": "SluiceStepOverdue",
    "expr": "time() - (sluice_run_last_step_timestamp_seconds > 0) > 3600 and on (instance) sluice_run_state{state='running'} == 1",
    "for": "5m",
    "labels": {"severity": "warning"},
    "annotations": {
        "summary": f"The run of {RUN} made its last step {{{{ $value | humanizeDuration }}}} ago.",
        "description": "The orchestrator answers Prometheus and has not said so itself. `sluice status RUN` says what it waits for.",
    },
}
"""For steps that take longer than an hour, give it another limit."""


def alert_name(rule: Rule) -> str:
    """Return the name of the alert of a rule."""
    return "SluiceRun" + "".join(part.capitalize() for part in rule.name.split("-"))


def alert(rule: Rule) -> dict[str, object]:
    """Return the alert of a rule: it fires while the orchestrator says so, and is critical if the run is worth nothing like this."""
    return {
        "alert": alert_name(rule),
        "expr": f"sluice_run_finding{{rule='{rule.name}'}} > 0",
        "labels": {"severity": "{{ if ge $value 2.0 }}critical{{ else }}warning{{ end }}"},
        "annotations": {
            "summary": f"{RUN}: {rule.why}",
            "description": f"{rule.remedy} report.json and the orchestrator's log have the numbers.",
        },
    }


def text() -> str:
    """Return the file."""
    groups = [{"name": "sluice-findings", "rules": [*map(alert, RULES), OVERDUE]}]
    return HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, width=1000)


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is not fresh")
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        sys.exit(f"{FILE}: not fresh; run `python deploy/observability/findings.py`")


if __name__ == "__main__":
    main()
