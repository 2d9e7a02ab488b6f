"""Ten thousand replicas on paper: what a fleet costs and where its first limit is, by simulation with measured costs.

The real scheduler, and the real ledger and choice of a source of the weight service, run on a simulated clock and a simulated network
(benchmarks/fleet/model.py). What single messages cost is measured first, or read from a file (`--costs`). Then the
simulation of one machine's replicas is compared with a real run of them, and larger fleets are simulated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.children import in_child, scratch
from benchmarks.fleet import fanout_costs
from benchmarks.fleet.costs import Costs, OrchestratorCosts, WeightCosts, from_json, read_costs
from benchmarks.fleet.fleet import Fleet, Limits, Network, Work
from benchmarks.fleet.model import NEVER, Limit, Result, Simulation, simulate
from benchmarks.fleet.real_run import Observed, observe
from benchmarks.orchestrator import run as measure_orchestrator
from orchestrator_svc.config import FoundReplicasConfig
from sluice.config import ConfigError
from sluice.telemetry import configure_logging

REPLICAS = (64, 1_024, 10_240)

CHECKED = 8
"""Replicas of the real run: those of one machine."""

CHECKED_WORK = Work(
    group=16,
    groups_per_replica=2,
    tokens=128,
    generation_s=3.0,
    train_s=1.0,
    weights_bytes=float(32 << 20),
    tensors=16,
    trainer_ranks=1,
)

SHORT = ("--in-flight=1000", "--also=8000", "--multi-turn=0", "--rate=800", "--seconds=8")
"""Options for `sluice bench orchestrator` at the start."""

SHORT_ELEMENTS = 16_000_000
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where receivers stage

WITHIN = 0.2
"""Largest share by which the simulation may differ from the real run."""


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure, compare, simulate and print; return the content of the JSON line."""
    work, network = Work(), Network()
    parser = argparse.ArgumentParser(prog="sluice bench scale", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS), help="sizes of the fleet")
    parser.add_argument("--costs", type=Path, help="file with the last lines of the benchmarks that measure them")
    parser.add_argument("--write-costs", type=Path, help="file to write the measured costs to, for --costs")
    parser.add_argument("--check", action="store_true", help="only compare the simulation with a real run")
    parser.add_argument("--no-check", action="store_true", help="leave that out")
    parser.add_argument("--checked-versions", type=int, default=12, help="versions of the real run that count")
    parser.add_argument("--versions", type=int, default=3, help="simulated versions that count")
    parser.add_argument(
        "--uplink-gbit", type=float, default=network.uplink_gbit, help="10^9 bits/s that a machine sends"
    )
    parser.add_argument("--latency-ms", type=float, default=network.latency_s * 1e3, help="one way, of any message")
    parser.add_argument("--fan-out", type=int, default=4, help="relays at one source; 0: all at the root")
    parser.add_argument("--poll-s", type=float, help="orchestrator.replicas.poll_s; default: the setting's")
    parser.add_argument("--progress-s", type=float, help="orchestrator.replicas.progress_s; default: the setting's")
    parser.add_argument("--group", type=int, default=work.group, help="samples of a group")
    parser.add_argument("--groups-per-replica", type=int, default=work.groups_per_replica, help="under way at a time")
    parser.add_argument("--tokens", type=int, default=work.tokens, help="tokens of a sample")
    parser.add_argument("--generation-s", type=float, default=work.generation_s, help="mean seconds of a request")
    parser.add_argument("--train-s", type=float, default=work.train_s, help="seconds of a step")
    parser.add_argument("--max-staleness", type=int, default=work.max_staleness)
    parser.add_argument("--weights-gb", type=float, default=work.weights_bytes / 1e9, help="of the model")
    parser.add_argument("--tensors", type=int, default=work.tensors, help="of the model")
    parser.add_argument("--delta", type=float, default=33.0, help="bytes of the weights over those of a delta")
    parser.add_argument(
        "--trainer-ranks", type=int, default=work.trainer_ranks, help="processes that push their shards"
    )
    options = parser.parse_args(argv)
    work, limits, network = _work(options), _limits(options), Network(options.uplink_gbit, options.latency_ms / 1e3)
    costs, all_costs = _costs(options)
    result: dict[str, Any] = {"all_costs": all_costs}
    failures: list[str] = []
    if not options.no_check:
        with (
            scratch(None) as directory,
            tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=SHARED_MEMORY) as shared,
        ):
            rows = in_child(_check, costs, directory, Path(shared), options.checked_versions)
        print(checked_table(rows), flush=True)
        result["check"] = [asdict(each) | {"ratio": round(each.ratio, 3)} for each in rows]
        result["ratios"] = {f"simulated_over_real_{each.name}": round(each.ratio, 3) for each in rows}
        failures = [f"{each.name}: {each.ratio:.2f} of the real run" for each in rows if each.counts and not each.holds]
    if not options.check:
        fleets = []
        for replicas in options.replicas:
            begun = time.monotonic()
            fleet = Fleet(replicas, fan_out=options.fan_out)
            found = simulate(fleet, work, costs, network, limits, versions=options.versions)
            fleets.append(found)
            print(f"{replicas:,} replicas: simulated in {time.monotonic() - begun:.0f} s", flush=True)
        print(table(fleets), flush=True)
        print(limits_table(fleets[-1]), flush=True)
        result["fleets"] = [as_json(each) for each in fleets]
    return {**result, **({"failures": failures} if failures else {})}


def _work(options: argparse.Namespace) -> Work:
    return Work(
        group=options.group,
        groups_per_replica=options.groups_per_replica,
        tokens=options.tokens,
        generation_s=options.generation_s,
        train_s=options.train_s,
        max_staleness=options.max_staleness,
        weights_bytes=options.weights_gb * 1e9,
        delta_bytes=options.weights_gb * 1e9 / options.delta,
        tensors=options.tensors,
        trainer_ranks=options.trainer_ranks,
    )


def _limits(options: argparse.Namespace) -> Limits:
    given = {"poll_s": options.poll_s, "progress_s": options.progress_s}
    try:
        return Limits(
            replicas=FoundReplicasConfig(**{name: value for name, value in given.items() if value is not None})
        )
    except ValidationError as error:
        raise ConfigError(f"--poll-s and --progress-s do not go together: {error.errors()[0]['msg']}") from error


# The costs.


def _costs(options: argparse.Namespace) -> tuple[Costs, dict[str, Mapping[str, Any]]]:
    """Return the costs from the file. Measure those that it lacks."""
    found: dict[str, Mapping[str, Any]] = {}
    if options.costs is not None:
        try:
            found = read_costs(options.costs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--costs: {error}") from error
    if "orchestrator" not in found:
        found["orchestrator"] = dict(measure_orchestrator(list(SHORT)))["costs"]
    if "weightsync" not in found:
        with (
            scratch(None) as directory,
            tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=SHARED_MEMORY) as shared,
        ):
            found["weightsync"] = in_child(_measure_weights, directory, Path(shared))
    costs = Costs(from_json(OrchestratorCosts, found["orchestrator"]), from_json(WeightCosts, found["weightsync"]))
    if options.write_costs is not None:
        options.write_costs.write_text(json.dumps({"bench": "scale", "all_costs": found}) + "\n")
    return costs, found


def _measure_weights(directory: Path, shared: Path) -> dict[str, Any]:
    configure_logging("bench", "warning")
    return asdict(asyncio.run(fanout_costs.measure(SHORT_ELEMENTS, directory, shared)))


# The comparison with a real run.


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of the real run and of the simulation, per version unless its name says otherwise.

    Attributes:
        counts: Whether it has to be within `WITHIN`; else it is only shown.
    """

    name: str
    real: float
    simulated: float
    counts: bool = True

    @property
    def ratio(self) -> float:
        """Return the simulated figure over the real one."""
        return self.simulated / self.real if self.real else math.inf

    @property
    def holds(self) -> bool:
        """Return whether both are close enough."""
        return 1 - WITHIN <= self.ratio <= 1 + WITHIN


def _check(costs: Costs, directory: Path, shared: Path, versions: int) -> list[Compared]:
    configure_logging("bench", "warning")
    weights = costs.weights
    delta_bytes = CHECKED_WORK.weights_bytes * weights.delta_over_dense
    work = replace(CHECKED_WORK, delta_bytes=delta_bytes, reports=weights.reports)
    real = asyncio.run(observe(directory, shared, work, replicas=CHECKED, versions=versions, warm_up=2))
    fleet = Fleet(CHECKED, per_host=CHECKED)
    simulated = Simulation(fleet, work, costs, Network(uplink_gbit=1000.0, latency_s=0.0002)).run(versions)
    return compared(real, simulated)


_DISPATCH = ("polls", "requests", "stream messages")
_TO_REPLICAS = (
    "announcements of relays",
    "pulls of relays",
    "reports of relays",
    "lists",
    "lists of relays",
    "renewals of relays",
    "heartbeats of relays",
)


def compared(real: Observed, simulated: Result) -> list[Compared]:
    """Return the figures that a real run and a simulation have in common."""

    def summed(counts: Mapping[str, float], names: Sequence[str]) -> float:
        return sum(counts.get(name, 0.0) for name in names)

    return [
        Compared("seconds", real.seconds, simulated.seconds),
        Compared("fan_out_s", real.fan_out_s, simulated.fan_out_s),
        Compared("loaded_fan_out_s", real.loaded_fan_out_s, simulated.fan_out_s, counts=False),
        Compared("dispatch_messages", real.dispatch[0], summed(simulated.messages, _DISPATCH)),
        Compared("dispatch_bytes", real.dispatch[1], summed(simulated.sizes, _DISPATCH)),
        Compared("batch_bytes", real.batches, simulated.sizes["batches"]),
        Compared("weight_messages", real.weights[0], summed(simulated.messages, _TO_REPLICAS)),
        Compared("weight_bytes", real.weights[1], summed(simulated.sizes, _TO_REPLICAS)),
        Compared("reports", real.reports, summed(simulated.messages, ("reports", "renewals")) / 2),
        Compared("busy_orchestrator", real.busy["orchestrator"], simulated.busy["orchestrator"], counts=False),
        Compared("busy_weightsync", real.busy["weightsync"], simulated.busy["weightsync"], counts=False),
        Compared("busy_relay", real.busy["busiest relay"], simulated.busy["busiest relay"], counts=False),
    ]


def checked_table(rows: Sequence[Compared]) -> str:
    """Return the comparison as a table."""
    lines = [
        (
            each.name + ("" if each.counts else " (not counted)"),
            f"{each.real:,.4g}",
            f"{each.simulated:,.4g}",
            f"{each.ratio:.2f}",
        )
        for each in rows
    ]
    return _table((f"{CHECKED} replicas, per version", "real", "simulated", "ratio"), lines)


# The fleets.


def table(results: Sequence[Result]) -> str:
    """Return a column for each fleet."""

    def row(name: str, values: Sequence[str]) -> tuple[str, ...]:
        return (name, *values)

    def each(show: Any) -> list[str]:  # noqa: ANN401 - from a result to its text
        return [show(one) for one in results]

    weights = [name for name in results[-1].messages if name not in {*_DISPATCH, "batches"}]
    rows = [
        row("relays", each(lambda one: f"{one.fleet.hosts if one.fleet.relays else 0:,}")),
        row("seconds a version", each(lambda one: f"{one.seconds:,.1f}")),
        row("commit until the last replica serves it, s", each(lambda one: f"{one.fan_out_s:,.1f}")),
        row("trajectories/s", each(lambda one: f"{one.trajectories_per_s:,.0f}")),
        row("staleness", each(lambda one: f"{one.staleness:.2f}")),
        row(
            "orchestrator: messages a version", each(lambda one: _count(sum(one.messages[name] for name in _DISPATCH)))
        ),
        row("of these status requests", each(lambda one: _count(one.messages["polls"]))),
        row("orchestrator: MB a version", each(lambda one: _megabytes(one.sizes, (*_DISPATCH, "batches")))),
        row(
            "weights: messages a version",
            each(lambda one: _count(sum(one.messages.get(name, 0.0) for name in weights))),
        ),
        row(
            "weights from the root: MB a version",
            each(lambda one: _megabytes(one.sizes, [name for name in weights if "relays" not in name])),
        ),
        row("cores that the orchestrator would need", each(lambda one: f"{one.cores['orchestrator']:.2f}")),
        row("cores that the weight service would need", each(lambda one: f"{one.cores['weightsync']:.2f}")),
        row("cores of the busiest relay", each(lambda one: f"{one.cores.get('busiest relay', 0.0):.2f}")),
        row("orchestrator's longest queue, s", each(lambda one: f"{one.lag_s['orchestrator']:,.1f}")),
        row("first limit of machines", each(lambda one: _first(one, settings=False))),
        row("first setting", each(lambda one: _first(one, settings=True))),
    ]
    return _table(("replicas", *(f"{one.fleet.replicas:,}" for one in results)), rows)


def limits_table(result: Result) -> str:
    """Return each limit of a fleet as a table; the limit that is reached first comes first."""
    rows = [
        (limit.name, _number(limit.used), _number(limit.most), _reached(limit, result), limit.moved_by)
        for limit in sorted(result.limits, key=lambda each: each.reached_at(result.fleet.replicas))
    ]
    head = (f"limit, with {result.fleet.replicas:,} replicas", "used", "of", "reached at replicas", "moved by")
    return _table(head, rows)


def as_json(result: Result) -> dict[str, Any]:
    """Return a result without its states of single replicas."""
    content = asdict(result)
    del content["served"]
    content["first_limit"] = result.first_limit.name
    return content


def _first(result: Result, *, settings: bool) -> str:
    limits = [each for each in result.limits if each.is_setting is settings]
    first: Limit = min(limits, key=lambda each: each.reached_at(result.fleet.replicas))
    return f"{first.name}, at {_reached(first, result)}"


def _reached(limit: Limit, result: Result) -> str:
    at = limit.reached_at(result.fleet.replicas)
    return "more" if at == NEVER else f"{at:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _megabytes(sizes: Mapping[str, float], names: Sequence[str]) -> str:
    return f"{sum(sizes.get(name, 0.0) for name in names) / 1e6:,.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
