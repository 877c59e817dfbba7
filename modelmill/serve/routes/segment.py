"""POST /v1/segment: masks of a picture."""

from __future__ import annotations

import json
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelmill.serve.body_route import BodyRoute
from modelmill.serve.engine import Engine
from modelmill.serve.errors import ApiError, invalid
from modelmill.serve.pictures import Found
from modelmill.serve.routes.common import fresh, service_of
from modelmill.serve.segment_schema import SegmentRequest, SegmentResponse, with_blobs
from modelmill.serve.sight import FieldError, UnknownImage
from modelmill.serve.stream import finished

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/segment", response_model=SegmentResponse, response_model_exclude_none=True)
async def segment(body: SegmentRequest, request: Request) -> Any:
    """Masks for points, boxes, a mask, several prompts, or everything; a picture seen before is answered at once."""
    service = service_of(request)
    engine = service.viewer(body.model)
    try:
        engine.check_sees()
        look = await service.aside(body.look, fresh("seg"))
        found = await finished(request, engine.look(look))
    except UnknownImage as error:
        raise ApiError(404, str(error), param="image_id", code="image_not_found") from None
    except FieldError as error:
        raise invalid(str(error), error.param) from None
    content = await service.aside(_told, body, engine, found)
    return Response(content, media_type="application/json")


def _told(body: SegmentRequest, engine: Engine, found: Found) -> bytes:
    told = {
        "id": found.id,
        "object": "segmentation",
        "created": int(time.time()),
        "model": body.model or engine.name,
        "image": found.told["image"],
        "masks": with_blobs(found.told["masks"], found.blobs),
        "milliseconds": found.told["milliseconds"],
    }
    return json.dumps(told, separators=(",", ":")).encode()
