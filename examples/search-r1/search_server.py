"""A search server over a file of passages, ranked by BM25, with the interface of Search-R1's retrieval server.

CORPUS is JSONL with ``{"contents": "..."}``. ``POST /retrieve {"queries": ["..."], "topk": 3}`` answers
``{"result": [[{"document": {...}, "score": 7.1}, ...]]}``, one list a query.

    python3 -m examples.search-r1.search_server outputs/search-r1/data/corpus.jsonl --port 8765
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

_MOST = 100
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


def read_corpus(path: Path) -> list[dict[str, Any]]:
    """The passages.

    Raises:
        ValueError: a line without ``contents``, or none at all; named by file and line.
    """
    documents = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                document = json.loads(line.rstrip())
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
            if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
                raise ValueError(f"{path}:{number}: no string under 'contents'")
            documents.append(document)
    if not documents:
        raise ValueError(f"{path}: no passage in it")
    return documents


def make_app(documents: list[dict[str, Any]]) -> web.Application:
    """The server's two routes, ``POST /retrieve`` and ``GET /health``."""
    index = BM25([document["contents"] for document in documents])

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            queries, k = [str(query) for query in body["queries"]], min(int(body.get("topk", 3)), _MOST)
        except (ValueError, KeyError, TypeError) as error:
            raise web.HTTPBadRequest(text=f"want {{'queries': [str, ...], 'topk': int}}: {error!r}") from error
        result = [[{"document": documents[i], "score": score} for i, score in index.top(q, k)] for q in queries]
        return web.json_response({"result": result})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"documents": len(documents)})

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve), web.get("/health", health)])
    return app


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s")
    parser.add_argument("--port", type=int, default=8765, help="default: %(default)s")
    args = parser.parse_args()
    try:
        web.run_app(make_app(read_corpus(args.corpus)), host=args.host, port=args.port, access_log=None)
    except (OSError, ValueError) as error:
        sys.exit(f"search_server.py: {error}")


if __name__ == "__main__":
    main()
