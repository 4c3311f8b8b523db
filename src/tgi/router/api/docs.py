"""GET /docs/: Swagger UI over our document, from the files of the `swagger-ui-bundle` package.

Nothing is loaded from another host, which the page's policy also tells the browser. Knows no route but its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tgi.router.api.openapi import cached, etag_of

HTML, SCRIPT, STYLE, IMAGE = "text/html", "text/javascript", "text/css", "image/png"

BUNDLED = {"swagger-ui.css": STYLE, "swagger-ui-bundle.js": SCRIPT, "favicon-32x32.png": IMAGE}

PAGE = """\
<!DOCTYPE html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <title>Text Generation Inference</title>
    <link rel="stylesheet" href="swagger-ui.css">
    <link rel="icon" type="image/png" href="favicon-32x32.png">
  </head>
  <body>
    <div id="ui"></div>
    <script src="swagger-ui-bundle.js"></script>
    <script src="start.js"></script>
  </body>
</html>
"""

# The package's Swagger UI refuses a document that calls itself newer than 3.0, though it draws what we use of 3.1.
START = """\
"use strict";
fetch("../api-doc/openapi.json")
  .then((answer) => answer.json())
  .then((document) => {
    const servers = [{ url: new URL("..", location.href).href.replace(/\\/$/, "") }];
    SwaggerUIBundle({
      spec: { ...document, openapi: "3.0.3", servers },
      dom_id: "#ui",
      deepLinking: true,
      validatorUrl: null,
    });
  });
"""

# Swagger UI draws its icons from data: addresses and sets styles in its markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str
    cache_control: str


async def redirect(request: Request) -> Response:
    """To the page by a relative address: it also holds behind a proxy that serves us under a path."""
    return RedirectResponse("docs/", 307)


async def page(request: Request) -> Response:
    response = _answer(request, "")
    response.headers["content-security-policy"] = POLICY
    response.headers["referrer-policy"] = "no-referrer"
    return response


async def asset(request: Request) -> Response:
    return _answer(request, request.path_params["name"])


def _answer(request: Request, name: str) -> Response:
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    return cached(request, file.content, file.etag, file.media_type, file.cache_control)


@cache
def _files() -> Mapping[str, File]:
    """Read when somebody first looks; 1.2 MB."""
    from swagger_ui_bundle import swagger_ui_path

    files = {"": _file(PAGE.encode(), HTML, "no-cache"), "start.js": _file(START.encode(), SCRIPT, "no-cache")}
    for name, media_type in BUNDLED.items():
        files[name] = _file((swagger_ui_path / name).read_bytes(), media_type, f"public, max-age={DAY_S}")
    return files


def _file(content: bytes, media_type: str, cache_control: str) -> File:
    return File(content, media_type, etag_of(content), cache_control)
