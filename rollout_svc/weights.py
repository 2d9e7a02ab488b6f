"""The replica's weight versions: follows weight sync, applies what is staged, says what serves."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import structlog

from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import EngineError
from rollout_svc.supervision import EngineSupervisor
from sluice.config import CommonConfig
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2
from sluice.versions import Version
from weightsync.staged import ApplyReport, StagedVersion

log = structlog.get_logger()
