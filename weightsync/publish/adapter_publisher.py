"""A trainer's half for LoRA: pushes an adapter as a version of its own, which engines load beside the weights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import torch
from safetensors.torch import load_file

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version
from weightsync.format.chunks import MAX_CHUNK_BYTES
from weightsync.format.names import run_resource
from weightsync.publish.dense_push import push_dense
from weightsync.publish.push_report import PushReport
from weightsync.publish.shard_source import ShardSource
from weightsync.publish.transfer import Destination

__all__ = ["AdapterPublisher"]

SHARD = "adapter_model"
"""Name of an adapter's only shard."""


class AdapterPublisher:
    """Publishes adapter versions of one run.

    Args:
        channel: To the weight service, with the admin role.
        run: The run's name.
        base: Version of the weights that the adapters belong to; the default is the model on disk.
    """

    def __init__(self, channel: grpc.aio.Channel, run: str, *, base: Version = BASE) -> None:
        self._channel, self._run, self.base = channel, run_resource(run), base

    async def push(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, object],
        *,
        deadline_s: float,
        labels: Mapping[str, str] | None = None,
    ) -> PushReport:
        """Publish an adapter: visible as a whole when this returns, not at all if it raises before the commit. Idempotent.

        Args:
            version: Which policy it makes of its base.
            tensors: CPU tensors as `peft.get_peft_model_state_dict` names them; unchanged until this returns.
            config: PEFT's configuration, as `LoraConfig.to_dict` or ``adapter_config.json`` gives it.
            deadline_s: Seconds for everything.
            labels: Free facts for the manifest.

        Raises:
            SluiceError: as the contract says of PushWeights and CommitVersion.
            ValueError: if a tensor cannot travel.
        """
        form = pb.Manifest(
            kind=pb.VERSION_KIND_ADAPTER,
            base=self.base.to_proto(),
            adapter_config=json.dumps(config, default=_plain, indent=1, sort_keys=True),
        )
        return await push_dense(
            Destination(self._channel, self._run, version, time.monotonic() + deadline_s),
            ShardSource(SHARD, tensors),
            chunk_bytes=MAX_CHUNK_BYTES,
            labels=labels or {},
            form=form,
        )

    async def push_directory(self, version: Version, directory: Path, *, deadline_s: float) -> PushReport:
        """Publish what `PeftModel.save_pretrained` wrote; else as `push`."""
        tensors = await asyncio.to_thread(load_file, directory / "adapter_model.safetensors")
        config = json.loads((directory / "adapter_config.json").read_text())
        return await self.push(version, tensors, config, deadline_s=deadline_s)


def _plain(value: object) -> object:
    """PEFT keeps sets and enumerations in its configuration."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
