"""tools/web: who may read what is served, and what a page may run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.utils.errors import BadInputError
from tests.served import get, served
from tools.web.server import Server, run_tool

NUM_GPUS = 0


class OneFigure:
    """A site with two pages, and one figure."""

    routes = frozenset({"/api/figure"})

    def __init__(self, directory: Path) -> None:
        (directory / "page.html").write_text('<script nonce="{{nonce}}" src="/page.js"></script>')
        (directory / "page.js").write_text("1")
        self.pages = {"/": directory / "page.html", "/page.js": directory / "page.js"}

    def answer(self, route: str, values: dict[str, str]) -> Any:
        if "refuse" in values:
            raise BadInputError("not that")
        return {"figure": float(values["is"]), "long": "a" * int(values.get("long", 0))}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with served(OneFigure(tmp_path)) as server:
        yield server


def test_nobody_without_the_token_reads_anything(server: Server) -> None:
    other = f"{server.cookie}={server.token[:-1]}"
    for headers in ({}, {"Cookie": other}, {"Cookie": f"other={server.token}"}, {"Cookie": "\x01=;;"}):
        for path in ("/", "/page.js", "/api/figure?is=1", "/nothing", "/?token=", f"/?token={server.token}x"):
            status, _, answer = get(server, path, headers=headers)
            assert (status, "token" in answer) == (403, True)
    assert get(server, "/api/figure?is=1")[2]["figure"] == 1


def test_the_token_of_the_address_becomes_a_cookie(server: Server) -> None:
    path = server.url.partition(f":{server.server_port}")[2]
    status, headers, _ = get(server, f"{path}&a=b", headers={})
    assert (status, headers["Location"]) == (303, "/?a=b")
    cookie, *rest = headers["Set-Cookie"].split("; ")
    assert set(rest) == {"Path=/", "HttpOnly", "SameSite=Lax"}
    assert get(server, "/", headers={"Cookie": cookie})[0] == 200
    assert get(server, f"/api/figure?is=1&token={server.token}", headers={})[0] == 403


def test_two_servers_have_tokens_and_cookies_of_their_own(server: Server, tmp_path: Path) -> None:
    with served(OneFigure(tmp_path)) as other:
        assert other.token != server.token
        assert other.cookie != server.cookie


def test_other_sites_names_are_refused(server: Server) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
        assert get(server, "/api/figure?is=1", host=host)[0] == 403
    for host in ("localhost", "127.0.0.1:80", "[::1]:80"):
        assert get(server, "/api/figure?is=1", host=host)[0] == 200


def test_only_the_pages_own_script_may_run(server: Server) -> None:
    nonces = set()
    for _ in range(2):
        status, headers, page = get(server, "/")
        assert status == 200
        policy = headers["Content-Security-Policy"]
        (nonce,) = re.findall(r"script-src 'nonce-([^']+)'", policy)
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert f'<script nonce="{nonce}"' in page
        nonces.add(nonce)
    assert len(nonces) == 2
    assert get(server, "/page.js")[1]["Content-Type"].startswith("text/javascript")


def test_a_wrong_question_is_told_apart_from_a_defect(server: Server) -> None:
    assert get(server, "/api/figure", refuse=1)[::2] == (400, {"error": "not that"})
    assert get(server, "/api/figure")[::2] == (500, {"error": "KeyError: 'is'"})
    assert get(server, "/api/figure?is=nan")[0] == 500
    assert get(server, "/page.html")[0] == 404


def test_long_answers_are_compressed_for_who_reads_that(server: Server) -> None:
    cookie = {"Cookie": f"{server.cookie}={server.token}"}
    compressed = get(server, "/api/figure?is=1&long=50000", headers=cookie | {"Accept-Encoding": "gzip, br"})
    plain = get(server, "/api/figure?is=1&long=50000", headers=cookie)
    assert int(compressed[1]["Content-Length"]) < 1000 < int(plain[1]["Content-Length"])
    assert compressed[2] == plain[2]


def test_a_tools_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise BadInputError("a\n  b")

    assert run_tool("tool.py", fail) == 2
    assert capsys.readouterr().err == "tool.py: error: a b\n"
