"""vLLM's interface of a tool parser, answered by modelmill's parser."""

from __future__ import annotations

from typing import Any

from modelmill.text.answer_pieces import ToolCallDelta
from modelmill.text.chat_format_registry import load_chat_syntax, select_format_variant
from modelmill.text.tag_suffix import find_tag_suffix
from tools.peer_parsers import peer_names
from tools.peer_parsers.loose_text import LooseJson, LooseText
from tools.peer_parsers.peer_parser import PeerInternalError, PeerParser, schemas
from tools.peer_parsers.plain_tokenizer import EncoderTokenizer
from tools.peer_parsers.records import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)

END_OF_TEXT = "</s>"
"""The token that ends an answer, which is no part of the text that modelmill parses."""


COMPARES_NAMES = ("dots", "k2_horizon", "minicpm5")
"""Formats where vLLM, too, takes only declared names for calls."""
OLDER_FORMATS = {"mistral_v13": "mistral_v1"}
"""Formats that vLLM, as modelmill, chooses by the tokenizer."""


class ToolParser:
    """Base of all adapters; a class of vLLM's name is made for each parser.

    Attributes:
        format_name: chat format that stands for it.
    """

    format_name: str | None = None

    def __init__(self, tokenizer: Any = None, tools: Any = None, **_: Any) -> None:
        if self.format_name is None:
            raise PeerInternalError("no chat format stands for this parser")
        if self.format_name in OLDER_FORMATS and not isinstance(tokenizer, EncoderTokenizer):
            self.format_name = OLDER_FORMATS[self.format_name]
        tags = load_chat_syntax(self.format_name).suffixed_tags
        if tags and tokenizer is not None:
            self.format_name += find_tag_suffix(tags, " ".join(tokenizer.get_vocab()))
        self.model_tokenizer = tokenizer
        self._tools = schemas(tools)
        self._parser: PeerParser | None = None
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.streamed_args_for_tool: list[str] = []

    def __getattr__(self, name: str) -> Any:
        """Refuse what is no part of the interface of calls and content."""
        raise PeerInternalError(name)

    @property
    def vocab(self) -> Any:
        """Return the tokenizer's vocabulary."""
        return self.model_tokenizer.get_vocab()

    @property
    def bot_token(self) -> str:
        """Return the mark that begins calls, which Mistral's tests look for in the tokens."""
        calls = load_chat_syntax(str(self.format_name)).calls
        return calls.call[0] or calls.section[0].partition(" ")[0]

    @property
    def bot_token_id(self) -> int:
        """Return the id of that mark."""
        return int(self.vocab[self.bot_token])

    def _make(self, request: Any) -> PeerParser:
        tools = getattr(request, "tools", None)
        known = schemas(tools) if isinstance(tools, list) else {}
        known = known or self._tools
        choice = getattr(request, "tool_choice", None)
        if isinstance(choice, dict) and choice.get("type") == "function":
            # the constraint of a server allows this one only
            name = choice["function"]["name"]
            known = {name: known.get(name)}
        any_name = not known or self.format_name not in COMPARES_NAMES
        options = getattr(request, "chat_template_kwargs", None) or {}
        format_name, _ = select_format_variant(str(self.format_name), None, options)
        return PeerParser(format_name, known, any_name=any_name)

    def extract_tool_calls(
        self, model_output: str, request: Any = None, token_ids: Any = None
    ) -> ExtractedToolCallInformation:
        """Parse a whole answer."""
        if token_ids is not None:
            raise PeerInternalError("the test gives ids of the peer's own encoder")
        answer = self._make(request).whole(model_output.removesuffix(END_OF_TEXT))
        calls = [
            ToolCall(
                id=call.id,
                function=FunctionCall(name=call.name, arguments=LooseJson(call.arguments)),
            )
            for call in answer.calls
        ]
        content = LooseText(answer.content) if answer.content else None
        if content is None and not calls:
            content = LooseText("")
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=content
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str = "",
        current_text: str = "",
        delta_text: str = "",
        *rest: Any,
        request: Any = None,
        **_: Any,
    ) -> DeltaMessage | None:
        """Parse a delta; an empty text before it begins another answer."""
        request = rest[-1] if request is None and rest else request
        begins = not previous_text and current_text == delta_text
        if self._parser is None or begins:
            self._parser = self._make(request)
            self.prev_tool_call_arr, self.streamed_args_for_tool = [], []
        return self._delta(self._parser.push(delta_text.removesuffix(END_OF_TEXT)))

    def finish_streaming(self) -> DeltaMessage | None:
        """End the streamed answer."""
        return None if self._parser is None else self._delta(self._parser.finish())

    def _delta(self, pieces: list[str | ToolCallDelta]) -> DeltaMessage | None:
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = list[DeltaToolCall]()
        for piece in pieces:
            if isinstance(piece, str):
                continue
            function = DeltaFunctionCall(name=piece.name, arguments=LooseJson(piece.arguments))
            if piece.name is not None:
                self.prev_tool_call_arr.append({"name": piece.name, "arguments": ""})
                self.streamed_args_for_tool.append("")
            self._note_arguments(piece.index, piece.arguments)
            calls.append(
                DeltaToolCall(
                    index=piece.index,
                    id=piece.id,
                    type=None if piece.name is None else "function",
                    function=function,
                )
            )
        if not content and not calls:
            return None
        return DeltaMessage(content=LooseText(content) if content else None, tool_calls=calls)

    def _note_arguments(self, index: int, text: str) -> None:
        self.streamed_args_for_tool[index] += text
        arguments = LooseJson(self.streamed_args_for_tool[index])
        self.prev_tool_call_arr[index]["arguments"] = arguments


def parser_class(name: str) -> type[ToolParser]:
    """Return the class that stands for a parser class of vLLM."""
    if name not in _CLASSES:
        _CLASSES[name] = type(name, (ToolParser,), {"format_name": peer_names.VLLM.get(name)})
    return _CLASSES[name]


_CLASSES: dict[str, type[ToolParser]] = {"ToolParser": ToolParser}


class ToolParserManager:
    """vLLM's registry."""

    @staticmethod
    def get_tool_parser(name: str) -> type[ToolParser]:
        """Return the class of a registered parser.

        Raises:
            PeerInternalError: its format is none of modelmill's.
        """
        if name not in peer_names.VLLM_REGISTRY:
            raise PeerInternalError("no chat format stands for this parser")
        return parser_class(peer_names.VLLM_REGISTRY[name])
