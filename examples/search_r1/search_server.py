"""A search server over a file of passages, with the interface of Search-R1's retrieval server.

CORPUS is JSONL with ``{"contents": "..."}``. ``POST /retrieve {"queries": ["..."], "topk": 3}`` answers
``{"result": [[{"document": {...}, "score": 7.1}, ...]]}``, one list a query.

    python3 -m examples.search_r1.search_server outputs/search_r1/data/corpus.jsonl --port 8765
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from examples.search_r1.bm25 import BM25

_MOST = 100


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
