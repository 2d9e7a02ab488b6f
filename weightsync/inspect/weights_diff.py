"""What changed between two versions, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from safetensors import safe_open

__all__ = ["Difference", "compare", "difference_table"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor differs.

    Attributes:
        name: Its name in a checkpoint.
        elements: Number of values.
        changed: Values whose bits differ; all of them where data type or shape do.
        largest: Largest absolute difference; NaN where there is nothing to compare with.
        relative: Norm of the difference over the norm of the first tensor; NaN likewise.
        replaced: Whether the other version has none of this name, type and shape.
    """

    name: str
    elements: int
    changed: int
    largest: float
    relative: float
    replaced: bool = False


def compare(first: Path, second: Path) -> list[Difference]:
    """Compare two safetensors files; a tensor that only one has counts as changed throughout."""
    with safe_open(first, framework="pt") as one, safe_open(second, framework="pt") as other:
        names = sorted({*one.keys(), *other.keys()})
        held = set(one.keys()) & set(other.keys())
        return [
            _compare(name, one.get_tensor(name), other.get_tensor(name))
            if name in held
            else _replaced(name, (one if name in one.keys() else other).get_tensor(name))  # noqa: SIM118 - no mapping
            for name in names
        ]


def _compare(name: str, one: torch.Tensor, other: torch.Tensor) -> Difference:
    if one.dtype != other.dtype or one.shape != other.shape:
        return _replaced(name, other)
    width = one.element_size()
    flat = (each.reshape(-1).view(torch.uint8).reshape(-1, width) for each in (one, other))
    before, after = flat
    changed = int((before != after).any(dim=1).sum())
    if not changed:
        return Difference(name, one.numel(), 0, 0.0, 0.0)
    step = other.double() - one.double()
    scale = float(one.double().norm())
    return Difference(name, one.numel(), changed, float(step.abs().max()), float(step.norm()) / scale if scale else 0.0)


def _replaced(name: str, tensor: torch.Tensor) -> Difference:
    return Difference(name, tensor.numel(), tensor.numel(), float("nan"), float("nan"), replaced=True)


def difference_table(differences: Sequence[Difference], top: int) -> Table:
    """A row for each of the tensors that changed most, and one for all."""
    elements = sum(each.elements for each in differences)
    changed = sum(each.changed for each in differences)
    touched = sum(each.changed > 0 for each in differences)
    table = Table(box=None, header_style="bold", show_footer=True)
    table.add_column("tensor", f"{touched} of {len(differences)} tensors")
    table.add_column("values", f"{elements:,}", justify="right")
    table.add_column("changed", f"{changed / elements:.3%}" if elements else "", justify="right")
    table.add_column("largest step", justify="right")
    table.add_column("relative norm", justify="right")
    for each in sorted(differences, key=lambda row: -row.changed / max(1, row.elements))[:top]:
        share = each.changed / max(1, each.elements)
        steps = ("other type, shape or name", "") if each.replaced else (f"{each.largest:.2e}", f"{each.relative:.2e}")
        table.add_row(each.name, f"{each.elements:,}", f"{share:.3%}", *steps)
    return table
