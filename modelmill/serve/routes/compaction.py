"""POST /v1/responses/compact: a conversation with a summary in place of the model's part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request

from modelmill.core.errors import RequestError
from modelmill.request_output_state import RequestOutputState
from modelmill.serve.body_route import BodyRoute
from modelmill.serve.chat_schema import ChatRequest
from modelmill.serve.compaction import compacted_items, fill_message_item_defaults
from modelmill.serve.compaction_plan import UNCHANGED_WARNING, CompactionPlan, Compactor
from modelmill.serve.openai_format import SurrogateSafeJsonResponse, token_usage
from modelmill.serve.reasoning_tokens import count_reasoning_tokens
from modelmill.serve.response_store import input_as_items
from modelmill.serve.response_store_access import previous_response_items, resolve_item_references
from modelmill.serve.responses_schema import CompactRequest
from modelmill.serve.routes import common
from modelmill.serve.routes.chat import make_request_answer_parser
from modelmill.serve.stream import wait_or_disconnect
from modelmill.text.answer_pieces import AnswerPiece, collect_answer
from modelmill.text_processor import TextProcessor

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses/compact")
async def compact(body: CompactRequest, request: Request) -> Any:
    """Summarize a conversation: the items to go on with in place of it."""
    service, engine = await common.acquire_service_and_engine(request, body.model, body.keep_alive)
    engine.check_capacity(1)
    earlier = previous_response_items(request, body.previous_response_id)
    items = [*earlier, *resolve_item_references(request, input_as_items(body.input or []))]
    if not items:
        raise RequestError("input is empty; give items, or previous_response_id")
    compactor = Compactor(engine.text_processor, body, engine.request_limits.max_len)
    plan = await service.run_in_thread(compactor.plan, items, len(earlier))
    if not plan.max_summary_tokens:
        return _response(
            fill_message_item_defaults(items, common.random_id("cmp", "_")), plan.warnings
        )
    (chat, state), handle = await common.prepare_and_submit_requests(
        request,
        engine,
        lambda _: compactor.make_summary_request_and_state(plan),
        get_states=lambda prepared: [prepared[1]],
    )
    await wait_or_disconnect(request, handle)
    return await service.run_in_thread(
        _summarized_response, compactor, plan, items, chat, engine.text_processor, state
    )


def _summarized_response(
    compactor: Compactor,
    plan: CompactionPlan,
    items: Sequence[Any],
    chat: ChatRequest,
    text_processor: TextProcessor,
    state: RequestOutputState,
) -> SurrogateSafeJsonResponse:
    """The response after the summary was written; without it if that is too long."""
    output = state.output.outputs[0]
    summary = strip_thinking(chat, text_processor, state, output.text).strip()
    if not summary:
        raise RequestError(
            "the model wrote no summary, so that the conversation would be lost; keep it as it is, "
            "or allow more max_output_tokens"
        )
    id = common.random_id("cmp", "_")
    compacted = compacted_items(plan.kept, id, summary)
    thinking = _count_thinking(chat, text_processor, state)
    if not compactor.is_shorter(compacted, plan):
        unchanged = fill_message_item_defaults(items, id)
        return _response(unchanged, [UNCHANGED_WARNING], state, reasoning_tokens=thinking)
    warnings = list(plan.warnings)
    is_cut = output.finish_reason == "length"
    if is_cut:
        warnings.append(
            f"the summary was cut at {plan.max_summary_tokens} tokens and may lack its end"
        )
    return _response(
        compacted, warnings, state, reasoning_tokens=thinking, compacted=True, is_cut=is_cut
    )


def _response(
    output: Sequence[Any],
    warnings: Sequence[str],
    state: RequestOutputState | None = None,
    *,
    reasoning_tokens: int = 0,
    compacted: bool = False,
    is_cut: bool = False,
) -> SurrogateSafeJsonResponse:
    """Write the response.

    Args:
        output: the items to go on with.
        warnings: what is lost, or why nothing was done.
        state: the engine's request, if there was one.
        reasoning_tokens: of thinking before the summary.
        compacted: whether the items are others than those of the request.
        is_cut: whether the summary was cut at its limit.
    """
    counts = token_usage([] if state is None else [state])
    fields: dict[str, Any] = {
        "id": common.random_id("resp", "_"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "compacted": compacted,
        "output": list(output),
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        },
    }
    return SurrogateSafeJsonResponse(
        {**fields, **({"warnings": list(warnings)} if warnings else {})}
    )


def strip_thinking(
    chat: ChatRequest, text_processor: TextProcessor, state: RequestOutputState, text: str
) -> str:
    """The text without the thinking of a model whose template has no switch for it."""
    return collect_answer(_parse(chat, text_processor, state, text)).content


def _count_thinking(
    chat: ChatRequest, text_processor: TextProcessor, state: RequestOutputState
) -> int:
    output, whole = state.output.outputs[0], make_request_answer_parser(chat, text_processor, state)
    parser = make_request_answer_parser(chat, text_processor, state)
    if whole is None or parser is None:
        return 0
    pieces = [*whole.push(output.text), *whole.flush()]
    return count_reasoning_tokens(
        pieces, whole.num_thoughts, output.token_ids, parser, state.make_answer_detokenizer()
    )


def _parse(
    chat: ChatRequest, text_processor: TextProcessor, state: RequestOutputState, text: str
) -> list[AnswerPiece]:
    parser = make_request_answer_parser(chat, text_processor, state)
    return [text] if parser is None else [*parser.push(text), *parser.flush()]
