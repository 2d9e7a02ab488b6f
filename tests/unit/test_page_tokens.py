"""Page tokens that a client made up are refused with the remedy, whatever they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from envserver_svc.config import EnvServerConfig
from envserver_svc.servicer import EnvironmentServicer
from orchestrator_svc.run.status import TrajectoryHistory
from sluice.environments.base import Task
from sluice.rpc import SluiceError
from sluice.v1 import environment_pb2, orchestrator_pb2

MADE_UP = ["x", "0", "-1", "+1", " 1", "1.5", "1_0", "٣", "²", "9" * 19, "9" * 5000]


def refused(caught: pytest.ExceptionInfo[SluiceError], rpc: str) -> None:
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "page_token" in caught.value.violations
    assert f"{rpc} gave: begin with an empty one" in caught.value.message


class _Tasks:
    """Processes of an environment that has three tasks."""

    async def tasks(self, _split: str, _seed: int) -> list[Task]:
        return [Task(f"t{number}", {}, 7) for number in range(3)]


def environment() -> EnvironmentServicer:
    return EnvironmentServicer(cast("Any", _Tasks()), EnvServerConfig(source="a:B"))


@pytest.mark.parametrize("token", MADE_UP)
async def test_a_made_up_token_of_a_list_of_tasks_is_refused(token: str) -> None:
    request = environment_pb2.ListTasksRequest(page_token=token)
    with pytest.raises(SluiceError) as caught:
        await environment().ListTasks(request, cast("Any", SimpleNamespace()))
    refused(caught, "ListTasks")


async def test_tasks_are_listed_page_by_page() -> None:
    request, found = environment_pb2.ListTasksRequest(page_size=2), []
    service = environment()
    while True:
        page = await service.ListTasks(request, cast("Any", SimpleNamespace()))
        found += [each.task_id for each in page.tasks]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert found == ["t0", "t1", "t2"]


@pytest.mark.parametrize("token", MADE_UP)
def test_a_made_up_token_of_a_list_of_trajectories_is_refused(token: str) -> None:
    request = orchestrator_pb2.ListTrajectoriesRequest(page_token=token)
    with pytest.raises(SluiceError) as caught:
        TrajectoryHistory(max_bytes=1).page(request)
    refused(caught, "ListTrajectories")
