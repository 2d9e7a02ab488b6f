"""What a run starts and where, as data, and how each engine (local, compose, Helm, Slurm, Ray) runs such a plan.

`make_plan` is a pure function of the settings and the machines. A module beside it renders the plan for one engine.
"""

from __future__ import annotations

from sluice.plan.machines import Machine, Machines
from sluice.plan.plan import Part, Place, Plan, Port, Purpose, Restart, make_plan

__all__ = ["Machine", "Machines", "Part", "Place", "Plan", "Port", "Purpose", "Restart", "make_plan"]
