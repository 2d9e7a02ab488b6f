"""Apply the rules to a run as its steps and states arrive, and remember what was wrong during which steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.config import WatchConfig
from sluice.watch.rules import RULES, History, Load, Machine, Row, Rule, Said, Source

_PAST = 200
"""Most ended findings to remember. They are bounded because a rule may begin and end to apply again and again."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is or was wrong with a run.

    Attributes:
        rule: Name of the rule.
        what: The rule's latest sentence.
        broken: Whether it was at any time so bad that the run is worth nothing.
        since_step: The step after which it began; 0 before the first.
        since: When it began, in seconds since 1970.
        until_step: The last step at which it was wrong; None while it lasts.
    """

    rule: Rule
    what: str
    broken: bool
    since_step: int
    since: float
    until_step: int | None = None

    @property
    def active(self) -> bool:
        """Return whether it lasts."""
        return self.until_step is None

    def as_json(self) -> dict[str, object]:
        """Return the finding as JSON, for programs and for ``report.json``."""
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
    """For how long a rule has applied without a break."""

    since_step: int
    since: float
    steps: int = 0


class Watch:
    """Watches one run. It has no clock: the caller passes the time with each input.

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
        """The findings that last, then those that have ended; both in the order in which they began."""
        return [*sorted(self._active.values(), key=lambda each: each.since), *self._past]

    @property
    def active(self) -> list[Finding]:
        """The findings that last, in the order in which they began."""
        return sorted(self._active.values(), key=lambda each: each.since)

    def step(self, row: Row) -> list[Finding]:
        """Process a step; return the findings that begin with it."""
        self.history.add_step(row)
        return [*self._apply(Source.STEP), *self._apply(Source.TIME)]

    def load(self, load: Load) -> list[Finding]:
        """Process a state of the run; return the findings that begin with it."""
        self._begin(load.time)
        self.history.add_load(load)
        return [*self._apply(Source.LOAD), *self._apply(Source.TIME)]

    def machine(self, machine: Machine, now: float) -> list[Finding]:
        """Process the free disk and memory of the machine; return the findings that begin with it."""
        self._begin(now)
        self.history.machine = machine
        return [*self._apply(Source.MACHINE), *self._apply(Source.TIME)]

    def end(self, now: float) -> None:
        """Note that no process runs the run any more. End the findings that only a live run can have."""
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
        """Process the result of a rule; return a finding if one begins with it."""
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
    """Return 2 if a finding that lasts makes the run worth nothing, 1 if any other finding lasts, otherwise 0."""
    active = [each for each in findings if each.active]
    return 2 if any(each.broken for each in active) else 1 if active else 0
