"""RL with a loop of your own: `python examples/own_loop/rl_loop.py [ADDRESS]`. The engine is that of `sluice tuner`; the algorithm is here."""

import asyncio
import random
import statistics
import sys
from difflib import SequenceMatcher

from sluice.tuning import Tuning, row
from sluice.v1.tokens_pb2 import SamplingParams

STEPS, TASKS, SAMPLES, LR = 40, 16, 8, 1e-3
SAMPLING = SamplingParams(max_tokens=12, temperature=1.0)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(rng, count):
    """Strings of 5 to 10 letters. Those with a `q` are held out."""
    made = ("".join(rng.choices(LETTERS, k=rng.randint(5, 10))) for _ in range(100 * count))
    return [word for word in made if "q" not in word][:count]


def reward(word, text):
    """How alike the reversed word and a text are, 0 to 1."""
    return SequenceMatcher(None, text, word[::-1], autojunk=False).ratio()


async def sampled(training, tasks, n):
    """Samples of all tasks, and their rewards. All requests are sent before the first answer is awaited."""
    pending = [await training.sample([{"role": "user", "content": word}], SAMPLING, n=n) for word in tasks]
    responses = [await each for each in pending]
    return responses, [
        [reward(word, each.text) for each in r.samples] for word, r in zip(tasks, responses, strict=True)
    ]


async def held_out(training):
    """The mean reward of strings that are not trained on."""
    tasks = [word[:-1] + "q" for word in words(random.Random("held out"), 128)]
    _, rewards = await sampled(training, tasks, 4)
    return statistics.fmean(map(statistics.fmean, rewards))


async def main(address="127.0.0.1:7108", run="own_loop", seed=0):
    """Train, and print the reward before and after."""
    rng = random.Random(seed)
    async with Tuning(address) as tuning:
        training = await tuning.create(run, seed=seed)
        print(f"held out, before: {await held_out(training):.3f}", flush=True)
        for step in range(STEPS):
            responses, rewards = await sampled(training, words(rng, TASKS), SAMPLES)
            rows = []
            for response, group in zip(responses, rewards, strict=True):
                mean, spread = statistics.fmean(group), statistics.pstdev(group)
                rows += [row(response, i, (each - mean) / (spread + 1e-6)) for i, each in enumerate(group)]
            await training.forward_backward(rows, objective="grpo")
            applied = await training.optim_step(LR)
            print(
                f"step {step}: reward {statistics.fmean(map(statistics.fmean, rewards)):.3f}, gradient {(await applied).grad_norm:.3f}",
                flush=True,
            )
        await (await training.save("rl"))
        print(f"held out, after: {await held_out(training):.3f}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
