"""The same loop for supervised fine-tuning: `python examples/own_loop/sft_loop.py MODEL [ADDRESS]`; MODEL has the tokenizer."""

import asyncio
import random
import sys

from rl_loop import held_out, words
from transformers import AutoTokenizer

from sluice.tuning import Tuning, demonstration

STEPS, BATCH, LR = 60, 32, 3e-3


async def main(model, address="127.0.0.1:7108", run="own_loop", seed=0):
    """Teach right answers, and print the reward before and after."""
    rng, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(model)

    def example(word):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": word}], add_generation_prompt=True, return_dict=False
        )
        return demonstration(prompt, [*tokenizer.encode(word[::-1]), tokenizer.eos_token_id])

    async with Tuning(address) as tuning:
        training = await tuning.create(run, seed=seed)
        print(f"held out, before: {await held_out(training):.3f}", flush=True)
        losses = []
        for _ in range(STEPS):  # nothing is awaited in between: the engine never waits for this loop
            losses.append(await training.forward_backward(map(example, words(rng, BATCH)), objective="sft"))
            await training.optim_step(LR)
        print("loss:", *[f"{(await each).loss:.2f}" for each in losses[::10]])
        await (await training.save("sft"))
        print(f"held out, after: {await held_out(training):.3f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
