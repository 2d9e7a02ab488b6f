"""RL in a script: `python examples/script/train.py outputs/reverse_text/sft`. The reward function is one of TRL's kind."""

import difflib
import random
import sys

import sluice


def alike(completions, answer, **_):
    """How alike each completion and the reversed text are, 0 to 1."""
    said = [each[0]["content"] for each in completions]
    return [difflib.SequenceMatcher(None, text, right, autojunk=False).ratio() for text, right in zip(said, answer)]


rng = random.Random(0)
words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(5, 10))) for _ in range(4096)]
rows = [{"prompt": [{"role": "user", "content": word}], "answer": word[::-1]} for word in words]
settings = {
    "orchestrator": {"batch_size": 16, "group_size": 8, "max_steps": 60, "sampling.max_tokens": 12},
    "trainer.lr": 1e-4,
    "rollout": {"engine": "transformers", "max_model_len": 64},
}
run = sluice.train(sys.argv[1], rows, alike, run="script", settings=settings)
print(f"{run.model}: reward {run.rewards[0]:.3f} -> {run.rewards[-1]:.3f}")
