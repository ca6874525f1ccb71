"""GET /: the web page to chat with the model and to watch the engine, and the page's files.

The files are the same for all users and hold no user's data. They need no key, because a browser
that opens an address cannot bring one. The page's own requests need a key.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parents[1] / "web"
FILES = (
    "index.html",
    "style.css",
    "main.js",
    "api.js",
    "chat.js",
    "render.js",
    "engine.js",
    "queue.js",
    "timeline.js",
    "charts.js",
    "icon.svg",
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PATHS = ("/", *(f"/page/{name}" for name in FILES[1:]))
"""Path of each of FILES."""
# The page has no inline code and loads nothing from other servers. So a model's text is only text
# on the page, and no part of the page's code.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class PageRoute:
    """Route that serves one of the files."""

    def __init__(self, name: str) -> None:
        self._body = (_FOLDER / name).read_bytes()
        self._headers = {**_HEADERS, "content-type": _TYPES[Path(name).suffix]}

    async def __call__(self, http: Request) -> Response:
        """Answer with the file."""
        return Response(self._body, headers=self._headers)


def page_routes() -> dict[str, PageRoute]:
    """Return the route of each file, by its path."""
    return {path: PageRoute(name) for path, name in zip(PATHS, FILES, strict=True)}
