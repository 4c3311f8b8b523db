"""GET /docs: Swagger UI, and nothing from another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from tests.fakes.app import App, serving


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with serving(api_key="k") as app:
        yield app


class Links(HTMLParser):
    """Every address in a page, and whatever script or style stands in the page itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline = ""
        self._is_inline = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        self._is_inline = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        self.inline += data.strip() if self._is_inline else ""

    def handle_endtag(self, tag: str) -> None:
        self._is_inline = False


def links(app: App) -> Links:
    parser = Links()
    parser.feed(app.get("/docs/").body.decode())
    return parser


@pytest.mark.row("B: /docs, /api-doc/openapi.json")
def test_the_page_is_where_tgi_has_it(app: App) -> None:
    answer = app.get("/docs")
    assert (answer.status, answer.headers["location"]) == (307, "docs/")
    page = app.get("/docs/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_every_file_of_the_page_is_ours_and_there(app: App) -> None:
    found = links(app)
    assert len(found.addresses) >= 4
    assert found.inline == ""
    for address in found.addresses:
        assert re.fullmatch(r"[a-z0-9.-]+", address), f"{address} is not a plain name beside the page"
        assert app.get(f"/docs/{address}").status == 200


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("swagger-ui.css", "text/css; charset=utf-8"),
        ("swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
        ("start.js", "text/javascript; charset=utf-8"),
        ("favicon-32x32.png", "image/png"),
    ],
)
def test_files_have_their_types_and_may_be_kept(app: App, name: str, media_type: str) -> None:
    answer = app.get(f"/docs/{name}")
    assert answer.headers["content-type"] == media_type
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] in ("no-cache", "public, max-age=86400")
    again = app.get(f"/docs/{name}", {"if-none-match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_the_browser_is_told_to_load_nothing_from_elsewhere(app: App) -> None:
    policy = app.get("/docs/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == "'self'"  # neither inline nor eval
    sources = {source for rule in rules.values() for source in rule.split()}
    assert sources <= {"'none'", "'self'", "data:", "'unsafe-inline'"}


def test_the_start_asks_for_our_document_and_for_no_validator(app: App) -> None:
    script = app.get("/docs/start.js").body.decode()
    assert "validatorUrl: null" in script
    assert 'fetch("../api-doc/openapi.json")' in script
    assert "://" not in script


@pytest.mark.parametrize(
    "name", ["index.html", "swagger-initializer.js", "oauth2-redirect.html", "..%2Fapp.py", "nothing", "a/b"]
)
def test_no_other_file_is_served(app: App, name: str) -> None:
    assert app.get(f"/docs/{name}").status == 404
