"""Apply the rules to a run as its steps and states come, and remember what was wrong from when to when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.config import WatchConfig
from sluice.watch.rules import RULES, History, Load, Machine, Row, Rule, Said, Source

_PAST = 200
"""Findings that have ended and are remembered: a rule may come and go all the time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is or was wrong with a run.

    Attributes:
        rule: The rule that says so.
        what: What it said last.
        broken: Whether it was ever so bad that the run is worth nothing.
        since_step: The step after which it began; 0 before the first.
        since: When it began, in seconds since 1970.
        until_step: The last step at which it was wrong, None while it is.
    """

    rule: Rule
    what: str
    broken: bool
    since_step: int
    since: float
    until_step: int | None = None

    @property
    def active(self) -> bool:
        """Return whether it is wrong now."""
        return self.until_step is None

    def as_json(self) -> dict[str, object]:
        """Return it for programs, and for ``report.json``."""
        return {
            "rule": self.rule.name,
            "family": str(self.rule.family),
            "level": "broken" if self.broken else "look",
            "active": self.active,
            "since_step": self.since_step,
            "since": self.since,
            "until_step": self.until_step,
            "what": self.what,
            "why": self.rule.why,
            "remedy": self.rule.remedy,
        }


@dataclass(slots=True)
class _Held:
    """How long a rule has found something without a break."""

    since_step: int
    since: float
    steps: int = 0


class Watch:
    """Watches one run. It has no clock: each input carries its time.

    Args:
        limits: The limits of the rules.
        max_staleness: The bound on staleness, in versions.
    """

    def __init__(self, limits: WatchConfig | None = None, max_staleness: int = 0) -> None:
        self.history = History(limits or WatchConfig(), max_staleness)
        self._held: dict[str, _Held] = {}
        self._active: dict[str, Finding] = {}
        self._past: deque[Finding] = deque(maxlen=_PAST)

    @property
    def findings(self) -> list[Finding]:
        """What is wrong now, then what was, each in the order in which it began."""
        return [*sorted(self._active.values(), key=lambda each: each.since), *self._past]

    @property
    def active(self) -> list[Finding]:
        """What is wrong now, in the order in which it began."""
        return sorted(self._active.values(), key=lambda each: each.since)

    def step(self, row: Row) -> list[Finding]:
        """Take a step; return what began to be wrong with it."""
        self.history.add_step(row)
        return [*self._apply(Source.STEP), *self._apply(Source.TIME)]

    def load(self, load: Load) -> list[Finding]:
        """Take a state of the run; return what began to be wrong."""
        self._begin(load.time)
        self.history.add_load(load)
        return [*self._apply(Source.LOAD), *self._apply(Source.TIME)]

    def machine(self, machine: Machine, now: float) -> list[Finding]:
        """Take what is left of the machine; return what began to be wrong."""
        self._begin(now)
        self.history.machine = machine
        return [*self._apply(Source.MACHINE), *self._apply(Source.TIME)]

    def end(self, now: float) -> None:
        """Note that no process runs it any more. What only a live run can have ends with it."""
        self._begin(now)
        self.history.load = self.history.machine = None
        for source in (Source.LOAD, Source.MACHINE, Source.TIME):
            self._apply(source)

    def _begin(self, now: float) -> None:
        self.history.now = max(self.history.now, now)
        self.history.began = self.history.began or now

    def _apply(self, source: Source) -> list[Finding]:
        judged = [self._judge(rule, rule.test(self.history)) for rule in RULES if rule.source is source]
        return [finding for finding in judged if finding is not None]

    def _judge(self, rule: Rule, said: Said | None) -> Finding | None:
        """Take what a rule says; return a finding that begins with it."""
        step = self.history.last[-1].step if self.history.last else 0
        if said is None:
            self._held.pop(rule.name, None)
            if ended := self._active.pop(rule.name, None):
                self._past.append(replace(ended, until_step=max(ended.since_step, step - 1)))
            return None
        held = self._held.setdefault(rule.name, _Held(step, self.history.now))
        held.steps += 1
        if known := self._active.get(rule.name):
            self._active[rule.name] = replace(known, what=said.what, broken=known.broken or said.broken)
            return None
        if held.steps < rule.steps or self.history.now - held.since < rule.seconds:
            return None
        finding = Finding(rule, said.what, said.broken, held.since_step, held.since)
        self._active[rule.name] = finding
        return finding


def verdict(findings: Sequence[Finding]) -> int:
    """Return 2 if something that is wrong now makes the run worth nothing, 1 if something is wrong, 0 if nothing is."""
    active = [each for each in findings if each.active]
    return 2 if any(each.broken for each in active) else 1 if active else 0
