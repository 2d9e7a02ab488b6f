"""A trainer with LoRA: the versions of its run are adapters that PEFT loads, and it goes on from a checkpoint of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from trainer_stack import RUN, Stack, settings, stack, tiny_model, trainer_config, trainer_service, weight_service
from transformers import AutoModelForCausalLM

from sluice.client import TrainerClient
from sluice.versions import Version
from trainer_svc.service.learner import Learner

pytestmark = pytest.mark.slow

LORA = {"rank": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("adapted"))


def assert_computes(model: Path, adapter: Path, learner: Learner) -> None:
    """A published adapter beside its base says what the policy says."""
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    ids = torch.arange(8, 40)[None]
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.load_state_dict(learner.engine.named_tensors(learner.publish_dtype))
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, policy(input_ids=ids).logits, atol=1e-5, rtol=0.0)


async def test_the_versions_of_a_run_are_adapters(model: Path, tmp_path: Path) -> None:
    async with stack(model, tmp_path, lora=LORA, lr=1e-2) as running:
        await running.client.begin_epoch(RUN, 1)
        versions = tmp_path / RUN / "weights"
        assert_computes(model, versions / "v1.0", running.trainer.learner)
        for number in (1, 2, 3):
            await running.submit(number)
            report = await running.report(number)
        async with asyncio.timeout(30):
            while running.trainer.published != Version(1, 3):  # noqa: ASYNC110 - the trainer tells nobody
                await asyncio.sleep(0.02)
        assert report.metrics["weights/bytes_sent"] < 0.5 * sum(
            each.nbytes
            for each in running.trainer.learner.engine.named_tensors(running.trainer.learner.publish_dtype).values()
        )
        assert_computes(model, versions / "v1.3", running.trainer.learner)
        with pytest.raises(AssertionError, match="not close"):
            assert_computes(model, versions / "v1.0", running.trainer.learner)


async def test_a_run_goes_on_from_a_checkpoint_that_holds_the_adapter_alone(model: Path, tmp_path: Path) -> None:
    async with weight_service(settings(model, tmp_path)) as address:
        common = settings(model, tmp_path, address)
        config = trainer_config(lora=LORA, lr=1e-2)
        states = []
        for epoch in (1, 2):
            async with trainer_service(common, config) as (trainer, target), TrainerClient(target) as client:
                await client.begin_epoch(RUN, epoch)
                engine = trainer.learner.engine
                states.append({name: tensor.clone() for name, tensor in engine.state_tensors().items()})
                assert all(".lora_" in name for name in states[-1])
                if epoch == 1:
                    running = Stack(trainer, client, target, trainer.learner.tokenizer_digest, tmp_path)
                    await running.submit(1)
                    await running.report(1)
                    states[0] = {name: tensor.clone() for name, tensor in engine.state_tensors().items()}
                    await client.save_checkpoint(RUN)
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert_computes(model, tmp_path / RUN / "checkpoints" / "step_1" / "hf", trainer.learner)
        assert_computes(model, tmp_path / RUN / "weights" / "v2.1", trainer.learner)
