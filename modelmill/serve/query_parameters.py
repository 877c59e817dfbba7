"""Query parameters: those of a path, and those that are accepted and change nothing.

Where a request has a body, its fields are there, and the query is not read. Elsewhere an unknown
parameter is an error, as an unknown field of a body is.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from modelmill.serve.errors import invalid_request

IGNORED_QUERY_PARAMETERS = {
    "api-version": "there is one version; clients of Azure send it",
    "beta": "Anthropic's clients send it with their header anthropic-beta",
    "client_version": "Codex sends its own",
    "include": "a stored response has what the request that made it included",
    "include[]": "as include",
    "include_obfuscation": "stored responses are not streamed",
}
"""Parameters that are accepted and change nothing, with the reason."""


async def check_query_parameters(request: Request) -> None:
    """Refuse what a route does not read; a dependency of routes without a body.

    Raises:
        ApiError: 400, a parameter is unknown.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute), "a route of the app depends on this"
    known = {field.alias: field.field_info.description for field in route.dependant.query_params}
    for name in request.query_params:
        if name not in known and name not in IGNORED_QUERY_PARAMETERS:
            shown = (each + (f" ({when})" if when else "") for each, when in known.items())
            takes = f"takes {', '.join(shown)}" if known else "takes none"
            raise invalid_request(
                f"{name[:60]}: unknown query parameter; this path {takes}", name[:60]
            )
