"""Lets a model answer the strings of examples/reverse_text and writes what it says, as texts to distill from.

python examples/distill/texts.py outputs/reverse_text/warm outputs/distill/texts.jsonl --count 4096
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "reverse_text"))

from env import words

BATCH = 256
MAX_TOKENS = 12


@torch.no_grad()
def answers(directory: Path, asked: list[str], seed: int) -> Iterator[tuple[str, str]]:
    """What a model answers to each string, sampled at temperature 1; strings of one length go together, without padding.

    Args:
        directory: A model directory.
        asked: The strings.
        seed: Seed of the samples.
    """
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(seed)
    by_length: dict[int, list[str]] = defaultdict(list)
    for word in asked:
        by_length[len(word)].append(word)
    for same in by_length.values():
        for start in range(0, len(same), BATCH):
            batch = same[start : start + BATCH]
            chats = [[{"role": "user", "content": word}] for word in batch]
            ids = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            said = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS)
            texts = tokenizer.batch_decode(said[:, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            yield from zip(batch, texts, strict=True)


def main() -> None:
    """Write them to a JSONL file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of the model that answers")
    parser.add_argument("path", type=Path, help="JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=4096)
    arguments = parser.parse_args()
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    asked = list(islice(words("train", arguments.seed), arguments.count))
    with arguments.path.open("w", encoding="utf-8") as file:
        for word, text in answers(arguments.model, asked, arguments.seed):
            messages = [{"role": "user", "content": word}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": messages}) + "\n")
    print(f"{arguments.path}: {arguments.count} answers of {arguments.model}")


if __name__ == "__main__":
    main()
