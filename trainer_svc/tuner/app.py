"""`sluice tuner`: load the base model, and train adapters of it for callers with their own training loops, until a signal."""

from __future__ import annotations

import asyncio
import os

import structlog
from transformers import AutoTokenizer

from sluice.chat_template import set_chat_template, template_text
from sluice.config import CommonConfig, Service
from sluice.render import tokenizer_digest
from sluice.rpc import RpcServer
from sluice.tasks import settle
from sluice.v1 import training_pb2_grpc
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.service.compute_thread import ComputeThread
from trainer_svc.tuner.adapters import AdapterBank
from trainer_svc.tuner.config import TunerConfig
from trainer_svc.tuner.sampler import Sampler
from trainer_svc.tuner.servicer import TrainingServicer
from trainer_svc.tuner.tuner import Tuner

SERVICE_NAME = "sluice.v1.TrainingService"

LEAST_GRACE_S = 1.0
"""Least seconds that the compute thread gets to end its operation."""

log = structlog.get_logger(__name__)


async def serve(common: CommonConfig, config: TunerConfig) -> None:
    """Serve one base model."""
    compute, failed = ComputeThread(), asyncio.Event()
    tuner: Tuner | None = None
    server = RpcServer(
        "tuner", config.server, common.security, run=common.run, call_log=common.run_dir / "calls/tuner.jsonl"
    )
    servicer = TrainingServicer(f"runs/{common.run}", lambda: tuner)
    server.add(training_pb2_grpc.add_TrainingServiceServicer_to_server, servicer, SERVICE_NAME)
    server.set_serving(False, "its model, which it loads")
    server.count_left(lambda: {**server.calls_left(), "operations": 0 if tuner is None else tuner.operations_left})
    await server.start()

    def load() -> tuple[AdapterBank, str]:
        template, arguments = template_text(common.chat_template), common.chat_template_kwargs
        tokenizer = set_chat_template(AutoTokenizer.from_pretrained(common.model), template, arguments)
        bank = AdapterBank(TrainEngine(config, common.model, common.seed, chat_template=template))
        return bank, tokenizer_digest(tokenizer, arguments)

    async def run() -> None:
        nonlocal tuner
        try:
            bank, digest = await compute.run(load, deadline_s=config.deadlines.load_s, what="loading the base model")
            tuner = Tuner(
                config, bank, Sampler(common, config.deadlines, digest), compute, common.run_dir / "trainings"
            )
            server.set_serving(True)
            async with asyncio.TaskGroup() as group:
                group.create_task(tuner.run_forever(), name="operations")
                group.create_task(tuner.remove_idle(), name="idle trainings")
                group.create_task(tuner.sampler.keep_to_base(), name="policy of replicas")
        finally:
            failed.set()

    running = asyncio.create_task(run(), name="tuner")
    left_s = 0.0
    try:
        left_s = await server.serve_until_signal(failed)
    finally:
        ended_by_itself = running.done()
        running.cancel()
        await settle(running)
        grace_s = max(left_s, LEAST_GRACE_S)
        if tuner is not None:
            try:
                async with asyncio.timeout(grace_s):
                    await tuner.stop()
            except TimeoutError:
                log.warning("not all trainings could be saved in time", drain_s=config.server.drain_s)
            await tuner.sampler.close()
        ended = await compute.stop(LEAST_GRACE_S)
    if ended_by_itself:
        running.result()
    if not ended:
        log.warning("the compute thread did not end in time, leaving it behind", drain_s=config.server.drain_s)
        os._exit(0)


SERVICE = Service("tuner", TunerConfig, serve)
