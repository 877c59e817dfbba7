"""POST /v1/segment: masks of an image."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from modelmill.serve.body_route import BodyRoute
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.errors import ApiError, invalid_request
from modelmill.serve.gil_yielding_json_serializer import dump_json
from modelmill.serve.routes.common import begin_accounting_and_lease_engine, get_service, random_id
from modelmill.serve.segmentation_client import FieldError, ImageNotCached
from modelmill.serve.segmentation_messages import SegmentationResult
from modelmill.serve.segmentation_schema import SegmentRequest, SegmentResponse, inline_blobs
from modelmill.serve.stream import wait_or_disconnect

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/segment", response_model=SegmentResponse, response_model_exclude_none=True)
async def segment(body: SegmentRequest, request: Request) -> Any:
    """Masks for points, boxes, masks or several prompts, or of all objects in an image."""
    service = get_service(request)
    engine = await begin_accounting_and_lease_engine(
        request, service.get_segmentation_engine(body.model)
    )
    try:
        engine.check_accepts_segmentation()
        job = await service.run_in_thread(body.to_job, random_id("seg"))
        result = await wait_or_disconnect(request, engine.submit_segmentation(job))
    except ImageNotCached as error:
        raise ApiError(404, str(error), param="image_id", code="image_not_found") from None
    except FieldError as error:
        raise invalid_request(str(error), error.param) from None
    content = await service.run_in_thread(_response_body, body, engine, result)
    return Response(content, media_type="application/json")


def _response_body(body: SegmentRequest, engine: EngineClient, result: SegmentationResult) -> bytes:
    response = {
        "id": result.id,
        "object": "segmentation",
        "created": int(time.time()),
        "model": body.model or engine.name,
        "image": result.payload["image"],
        "masks": inline_blobs(result.payload["masks"], result.blobs),
        "milliseconds": result.payload["milliseconds"],
    }
    return dump_json(response)
