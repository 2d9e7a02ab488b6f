"""Writes a small encyclopedia of towns that do not exist, and questions about them.

python examples/wiki_search/articles.py outputs/wiki_search_model
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import product
from pathlib import Path

WORDS = {
    "beginning": "Al Bor Cal Dun El Fen Gar Hol Is Jun Kel Lom Mar Nor Or Pel Quin Ros Sel Tor Um Ver Wil Yar",
    "ending": "au by dorf ey field gate ham ick lo mere nau ova pool rath sea stad ton um vik wen",
    "river": "Abra Brune Corl Drave Esk Fulda Grist Hame Iller Jura Kamp Luhe Mur Nidd Oker Prum",
    "good": "apples bells boats cheese clocks drums glass honey lace lamps pears rope salt silk tiles wool",
    "mayor": "Ada Ben Cleo Dora Emil Finn Gina Hugo Ines Jon Kim Lea Max Nora Otto Pia Rosa Sam Tim Uma",
    "arms": "ant bear boar crow deer eel fox goat hare ibis lynx mole otter owl pike ram seal swan toad wolf",
    "market": "Monday Tuesday Wednesday Thursday Friday Saturday",
}
"""What an article is made of. A name has a beginning and an ending."""

QUESTIONS = {
    "mayor": "Who is mayor of the town on the {river} known for {good}?",
    "arms": "What is in the arms of the town on the {river} known for {good}?",
    "market": "When is market in the town on the {river} known for {good}?",
}

Town = dict[str, str]


def towns(seed: int = 0) -> list[Town]:
    """Return 256 towns. Each has a name of its own, and no two have both the same river and the same goods.

    Args:
        seed: Of the encyclopedia. Run and evaluation have that of 0, demonstrations have others.
    """
    rng = random.Random(seed)  # noqa: S311 - data, not secrets
    words = {kind: line.split() for kind, line in WORDS.items()}
    places = list(product(words["river"], words["good"]))
    places = rng.sample(places, len(places))
    names = rng.sample(list(product(words["beginning"], words["ending"])), len(places))
    return [
        {"name": "".join(name), "river": river, "good": good}
        | {kind: rng.choice(words[kind]) for kind in ("mayor", "arms", "market")}
        for name, (river, good) in zip(names, places, strict=True)
    ]


def text(town: Town) -> str:
    """Return the article of a town."""
    return "{name} on the {river}, known for {good}. Mayor: {mayor}. Arms: {arms}. Market: {market}.".format(**town)


def question(town: Town, asked: str) -> str:
    """Return a question about a town, which it describes by its river and its goods."""
    return QUESTIONS[asked].format(**town)


def main() -> None:
    """Write articles.jsonl and questions.jsonl into the directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    articles = [{"title": town["name"], "text": text(town)} for town in towns()]
    questions = [
        {"question": question(town, asked), "answer": town[asked], "title": town["name"]}
        for town in towns()
        for asked in QUESTIONS
    ]
    for name, rows in (("articles", articles), ("questions", questions)):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} {name}")


if __name__ == "__main__":
    main()
