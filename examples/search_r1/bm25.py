"""BM25 over a list of texts, in memory: what a local search server needs and no more."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-cased runs of letters and digits."""
    return _WORD.findall(text.lower())


class BM25:
    """Okapi BM25: Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework", section 3."""

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        """
        Args:
            k1: how soon more occurrences of a word stop counting.
            b: how much long texts are held back, 0 to 1.
        """
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        lengths = []
        for number, text in enumerate(texts):
            counts = Counter(words(text))
            lengths.append(counts.total())
            for word, count in counts.items():
                self._postings[word].append((number, count))
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        self._k1 = k1
        self._damping = [k1 * (1 - b + b * length / mean) for length in lengths]

    def top(self, query: str, k: int) -> list[tuple[int, float]]:
        """Number and score of the best ``k`` texts that share a word with ``query``, best first, ties by number."""
        scores: dict[int, float] = defaultdict(float)
        for word, weight in Counter(words(query)).items():
            postings = self._postings.get(word, ())
            rarity = math.log1p((len(self._damping) - len(postings) + 0.5) / (len(postings) + 0.5))
            for number, count in postings:
                scores[number] += weight * rarity * count * (self._k1 + 1) / (count + self._damping[number])
        return heapq.nsmallest(k, scores.items(), key=lambda entry: (-entry[1], entry[0]))
