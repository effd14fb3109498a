"""Make a corpus, questions that only the corpus answers, and demonstrations that sometimes search.

OUTPUT gets ``corpus.jsonl`` (100 passages, "Station 47 is in Oslo."), ``sft.jsonl``, ``train.jsonl`` and
``eval.jsonl``, whose questions are about other stations than those of train.jsonl.

Two of three demonstrations search, and the others guess. So the warmed-up model knows both ways, and reinforcement
learning has something to find out: which of them pays.

    python3 -m examples.search-r1.make_data outputs/search-r1/data
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from examples.making_data import make_data
from slime.files.storage import write_text

CITIES = ["Athens", "Berlin", "Cairo", "Delhi", "Essen", "Fargo", "Genoa", "Hanoi", "Izmir", "Jaffa", "Kyoto", "Lyon",
          "Milan", "Nice", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Tunis"]  # fmt: skip
_NUM_EVAL = 20
_NUM_DEMONSTRATIONS = 8000
_GUESSES = 1 / 3


def question(station: int) -> list[dict[str, str]]:
    """The chat messages that ask for a station's city."""
    return [{"role": "user", "content": f"Where is station {station}?"}]


def demonstration(station: int, city: str, rng: random.Random) -> list[tuple[str, bool]]:
    """A response in parts, each with whether it is the model's; some are guesses."""
    if rng.random() < _GUESSES:
        return [(f"<answer>{rng.choice(CITIES)}</answer>", True)]
    return [
        (f"<search>station {station}</search>", True),
        (f"\n<information>1. Station {station} is in {city}.</information>\n", False),
        (f"<answer>{city}</answer>", True),
    ]


def write(output: Path, seed: int) -> None:
    """Write the four files."""
    rng = random.Random(seed)
    stations = rng.sample(range(100), 100)
    city_of = {station: rng.choice(CITIES) for station in stations}
    held_out, known = stations[:_NUM_EVAL], stations[_NUM_EVAL:]

    def rows(of: list[int]) -> list[dict[str, Any]]:
        return [{"prompt": question(station), "label": city_of[station]} for station in of]

    def demonstrated() -> dict[str, Any]:
        # Any station in any city: the corpus is for searching, not for learning by heart.
        station, city = rng.randrange(100), rng.choice(CITIES)
        return {"prompt": question(station), "metadata": {"demonstration": demonstration(station, city, rng)}}

    files = {
        "corpus": [{"id": s, "contents": f"Station {s} is in {city_of[s]}."} for s in sorted(stations)],
        "train": rows(known),
        "eval": rows(held_out),
        "sft": [demonstrated() for _ in range(_NUM_DEMONSTRATIONS)],
    }
    for name, lines in files.items():
        write_text("output", output / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    make_data(__doc__, write)
