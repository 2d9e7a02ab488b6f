"""Which workflow runs the episodes of an environment."""

from __future__ import annotations

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.envs.base import MultiTurnEnvironment, SingleTurnEnvironment
from orchestrator_svc.envs.calls import EnvironmentCalls
from orchestrator_svc.envs.loading import load_attribute
from orchestrator_svc.workflows.base import RolloutWorkflow
from orchestrator_svc.workflows.multi_turn import MultiTurn
from orchestrator_svc.workflows.single_turn import SingleTurn
from sluice.config import ConfigError

__all__ = ["choose_workflow"]


def choose_workflow(
    config: OrchestratorConfig, environment: SingleTurnEnvironment | MultiTurnEnvironment, calls: EnvironmentCalls
) -> RolloutWorkflow:
    """The workflow that the settings name; ``auto`` goes by what the environment can do.

    Raises:
        ConfigError: if it does not fit the environment, or is not found.
    """
    single = isinstance(environment, SingleTurnEnvironment)
    name = config.workflow if config.workflow != "auto" else "single_turn" if single else "multi_turn"
    if name == "single_turn" and isinstance(environment, SingleTurnEnvironment):
        return SingleTurn(environment)
    if name == "multi_turn" and isinstance(environment, MultiTurnEnvironment):
        return MultiTurn(environment, config.max_turns, calls)
    if name in {"single_turn", "multi_turn"}:
        raise ConfigError(
            f'workflow {name} does not fit environment {environment.name}: set orchestrator.workflow = "auto"'
        )
    workflow: RolloutWorkflow = load_attribute(name, "workflow")(environment, config)
    if not hasattr(workflow, "arun_episode"):
        raise ConfigError(f"workflow {name} has no arun_episode(engine, data)")
    return workflow
