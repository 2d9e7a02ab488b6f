"""Gives places in turn to names that want shares of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_ROUNDING = 1e-9
"""Places by which sums of shares may be off."""


class Shares:
    """Gives places to names so that after any number of places each has its share of them, less than one place off.

    Each place gives every name its share as credit and takes 1 from the name that gets it. Of those with credit above 0
    the one gets it that would be a whole place behind first: earliest deadline first keeps each credit between -1 and 1
    (Baruah et al., "Proportionate progress", 1996). What a name that cannot take a place is owed goes to the others.
    """

    def __init__(self, wanted: Mapping[str, float]) -> None:
        self._wanted = dict(wanted)
        self.credits = dict.fromkeys(wanted, 0.0)

    def share(self, name: str) -> float:
        """Return the wanted share of a name, 0 to 1."""
        total = sum(self._wanted.values())
        return self._wanted[name] / total if total else 0.0

    def want(self, name: str, weight: float) -> None:
        """Change the weight of a name."""
        self._wanted[name] = weight

    def choose(self, able: Collection[str]) -> str | None:
        """Return who gets the next place; None if none of `able` has a share."""
        due, shares = self._due(able)
        candidates = [name for name in shares if due[name] > _ROUNDING]
        return min(candidates, key=lambda name: (1 - due[name]) / shares[name], default=None)

    def give(self, name: str, able: Collection[str]) -> None:
        """Give a place to a name, chosen among `able`."""
        self.credits, _ = self._due(able)
        self.credits[name] -= 1
        if max(map(abs, self.credits.values())) > 1 + _ROUNDING:
            # These places were given under other shares, which a start that counts them again does not know.
            self.credits = dict.fromkeys(self.credits, 0.0)

    def _due(self, able: Collection[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the credits with those of the next place, and the shares of it of those who can take it.

        The others lose what they are owed, so that the sum of all is 1 and one of `able` is above 0.
        """
        weights = {name: weight for name, weight in self._wanted.items() if weight > 0 and name in able}
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()}
        lost = sum(max(0.0, credit) for name, credit in self.credits.items() if name not in shares)
        due = {
            name: credit + (1.0 + lost) * shares[name] if name in shares else min(0.0, credit)
            for name, credit in self.credits.items()
        }
        return due, shares
