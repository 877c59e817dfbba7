"""GET /v1/sessions and DELETE /v1/sessions/NAME: the files of saved sessions."""

from __future__ import annotations

import stat
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request

from modelmill.serve.errors import ApiError
from modelmill.serve.kv_session_schema import SESSION_NAME_PATTERN
from modelmill.serve.openai_format import SurrogateSafeJsonResponse
from modelmill.serve.query_parameters import check_query_parameters
from modelmill.serve.routes.common import get_service
from modelmill.serve.routes.kv_sessions import (
    SESSION_SUFFIX,
    key_session_folder,
    missing_session_error,
)

router = APIRouter(dependencies=[Depends(check_query_parameters)])


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> Any:
    """The saved sessions of the request's key, the newest first."""
    folder = key_session_folder(request)
    files = await get_service(request).run_in_thread(_list_session_files, folder)
    return SurrogateSafeJsonResponse({"object": "list", "data": files})


@router.delete("/v1/sessions/{name}")
async def delete(request: Request, name: Annotated[str, Path(pattern=SESSION_NAME_PATTERN)]) -> Any:
    """Delete a saved session; pages that were restored from it stay in the cache."""
    path = key_session_folder(request) / (name + SESSION_SUFFIX)
    try:
        await get_service(request).run_in_thread(path.unlink)
    except FileNotFoundError:
        raise missing_session_error(name) from None
    except OSError as error:
        raise ApiError(
            500, f"the session cannot be deleted: {error.strerror}", "server_error"
        ) from None
    return SurrogateSafeJsonResponse({"name": name, "deleted": True})


def _list_session_files(folder: FilePath) -> list[dict[str, Any]]:
    """Name, size and time of each session file."""
    if not folder.is_dir():
        return []
    saved = [
        (status.st_mtime, path.name.removesuffix(SESSION_SUFFIX), status.st_size)
        for path in folder.glob(f"*{SESSION_SUFFIX}")
        if stat.S_ISREG((status := path.stat()).st_mode)
    ]
    return [
        {"name": name, "bytes": nbytes, "created": int(created)}
        for created, name, nbytes in sorted(saved, reverse=True)
    ]
