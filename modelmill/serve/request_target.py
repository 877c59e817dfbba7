"""What a request asks for, in the form in which the routes know it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from starlette.types import Scope

from modelmill.serve.path_aliases import canonical_path

METHOD_SCOPE_KEY = "modelmill.method"
"""Scope key of the method that the client sent: a route sees GET in the place of HEAD."""
_ABSOLUTE_FORM = re.compile(rb"https?://([^/]+)(/.*)?", re.IGNORECASE | re.DOTALL)


def normalize_request(scope: Scope) -> Scope:
    """The scope of a request as the routes read it: path of this server, its own name, and method.

    HEAD is GET without the body, on every path (RFC 9110, 9.3.2): who sends the response leaves
    the body out.
    """
    scope = _to_origin_form(scope)
    if (path := canonical_path(scope["path"])) != scope["path"]:
        scope = {**scope, "path": path, "raw_path": path.encode()}
    if scope["method"] == "HEAD":
        scope = {**scope, "method": "GET", METHOD_SCOPE_KEY: "HEAD"}
    return scope


def sent_method(scope: Mapping[str, Any]) -> str:
    """The method that the client sent."""
    method: str = scope.get(METHOD_SCOPE_KEY, scope["method"])
    return method


def _to_origin_form(scope: Scope) -> Scope:
    """The scope with a path where the target is a whole URL, as proxies' clients send it.

    Its host counts then, not that of the header (RFC 9112, 3.2.2). Only what the server saw as a
    URL is one: a raw path alone does not change what is asked for.
    """
    if scope["path"].startswith("/"):
        return scope
    match = _ABSOLUTE_FORM.fullmatch(scope.get("raw_path") or scope["path"].encode())
    if match is None:
        return scope
    path = match[2] or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "headers": [*headers, (b"host", match[1])],
    }
