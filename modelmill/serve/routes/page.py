"""The web page at /: static files of this package, nothing from other hosts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)
PAGE_DIR = Path(__file__).resolve().parent.parent / "page"
CONTENT_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
# only this server's scripts, styles and fonts, no requests to other hosts, no framing; no text
# becomes HTML or a script: the page makes elements one by one, and so do its libraries
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; "
    "require-trusted-types-for 'script'; trusted-types 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}


def _find_page_files_by_path() -> dict[str, Path]:
    """Map request paths to files. Read once: only these files are ever sent."""
    files = sorted(file for file in PAGE_DIR.rglob("*") if file.suffix in CONTENT_TYPES)
    paths = [file.relative_to(PAGE_DIR).as_posix() for file in files]
    return {
        "/" if path == "index.html" else f"/page/{path}": file for path, file in zip(paths, files)
    }


PAGE_FILES = _find_page_files_by_path()
PAGE_PATHS = tuple(path.encode() for path in PAGE_FILES)
"""Paths that need no key."""


async def _serve_page_file(request: Request) -> Response:
    file = PAGE_FILES[request.url.path]
    content = file.read_bytes()
    headers = {**SECURITY_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=CONTENT_TYPES[file.suffix])


for _path in PAGE_FILES:
    router.add_api_route(_path, _serve_page_file, methods=["GET"])
