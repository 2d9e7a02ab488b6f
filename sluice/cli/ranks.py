"""`sluice ranks`: the processes of a trainer on this machine, and how they join those of other machines."""

from __future__ import annotations

import argparse
import sys

from sluice.config import ConfigError, Options, seconds, whole_number
from sluice.imports import large_imports

EXIT_FAILURE = 1

LOST_S = 30.0
"""Seconds without a sign of life after which a machine is gone."""


def run(argv: list[str]) -> int:
    """Start the ranks, and wait until all have ended.

    Returns:
        0 if all ended well, or after SIGTERM (130 if it came while other nodes were still awaited). 1 if a node is missing. Otherwise the
        exit code of the rank that failed first.

    Raises:
        ConfigError: if the words are wrong, or the host of the rendezvous is unknown.
    """
    options = _parser().parse_args(argv)
    if not options.words:
        raise ConfigError("name the service, as in `sluice ranks --processes 8 trainer @ rl.toml`")
    host, _, port = options.rendezvous.rpartition(":")
    if options.nodes > 1 and not (host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigError(
            f"--rendezvous is {options.rendezvous!r}: give host:port of the first node, the same on all {options.nodes} nodes"
        )
    if options.node_rank >= options.nodes:
        raise ConfigError(
            f"--node-rank is {options.node_rank}: {options.nodes} nodes have numbers below {options.nodes}"
        )
    with large_imports():
        from sluice.supervise.node_rendezvous import Nodes, NodesMissingError  # noqa: PLC0415 - brings PyTorch
        from sluice.supervise.rank_launcher import launch  # noqa: PLC0415

    nodes = Nodes()
    if options.nodes > 1:
        lost_s = max(options.lost, options.grace)
        nodes = Nodes(options.nodes, options.node_rank, host.strip("[]"), int(port), options.join, lost_s)
    try:
        return launch(options.processes, options.grace, nodes, options.words)
    except NodesMissingError as error:
        print(f"sluice ranks: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    except OSError as error:
        raise ConfigError(f"cannot find the first node at {options.rendezvous}: {error.strerror or error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice ranks",
        usage="sluice ranks --processes N [--nodes N --node-rank I --rendezvous HOST:PORT] trainer @ rl.toml ...",
        description="Start the processes of a trainer on this machine. With --nodes they join those of other machines, on which the same"
        " command runs; if one dies, all end, and all commands are started again.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=whole_number(1, 1024), required=True, help="processes on this machine, one for each GPU")
    add("--nodes", type=whole_number(1), default=1, help="machines with such processes (default: 1)")
    add("--node-rank", type=whole_number(0), default=0, help="number of this machine; 0 is the one that serves calls")
    add("--rendezvous", metavar="HOST:PORT", default="", help="address of machine 0 and a port that is free there")
    add(
        "--join",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds in which all machines must join (default: 600)",
    )
    add(
        "--lost",
        type=seconds,
        default=LOST_S,
        metavar="S",
        help="seconds without a sign of life, --grace at least, after which a machine is gone (default: 30)",
    )
    add("--grace", type=seconds, default=6.0, metavar="S", help="seconds to end after SIGTERM (default: 6)")
    add("words", nargs=argparse.REMAINDER, metavar="SERVICE @ FILE", help="the service and its settings")
    return parser
