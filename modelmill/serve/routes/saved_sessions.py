"""GET /v1/sessions and DELETE /v1/sessions/NAME: the files of saved sessions."""

from __future__ import annotations

import stat
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from modelmill.serve.errors import ApiError
from modelmill.serve.openai_format import Utf8JsonResponse
from modelmill.serve.routes.common import get_service
from modelmill.serve.routes.sessions import SUFFIX, missing_session_error, owner_folder
from modelmill.serve.session_schema import SESSION_NAME

router = APIRouter()


@router.get("/v1/sessions")
async def list_sessions(request: Request) -> Any:
    """The saved sessions of the request's key, the newest first."""
    folder = owner_folder(request)
    files = await get_service(request).run_in_thread(_saved_files, folder)
    return Utf8JsonResponse({"object": "list", "data": files})


@router.delete("/v1/sessions/{name}")
async def delete(request: Request, name: Annotated[str, Path(pattern=SESSION_NAME)]) -> Any:
    """Delete a saved session; pages that were restored from it stay in the cache."""
    path = owner_folder(request) / (name + SUFFIX)
    try:
        await get_service(request).run_in_thread(path.unlink)
    except FileNotFoundError:
        raise missing_session_error(name) from None
    except OSError as error:
        raise ApiError(
            500, f"the session cannot be deleted: {error.strerror}", "server_error"
        ) from None
    return Utf8JsonResponse({"name": name, "deleted": True})


def _saved_files(folder: FilePath) -> list[dict[str, Any]]:
    """Name, size and time of each session file."""
    if not folder.is_dir():
        return []
    saved = [
        (status.st_mtime, path.name.removesuffix(SUFFIX), status.st_size)
        for path in folder.glob(f"*{SUFFIX}")
        if stat.S_ISREG((status := path.stat()).st_mode)
    ]
    return [
        {"name": name, "bytes": nbytes, "created": int(created)}
        for created, name, nbytes in sorted(saved, reverse=True)
    ]
