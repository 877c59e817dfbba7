"""``modelmill chat``: chats in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.chat_input import (
    read_message,
    read_pipe_line,
    read_terminal_line,
    start_line_editing,
)
from modelmill.cli.chat_model import ChatDelta, ChatModel, ChatSettings, LocalChatModel
from modelmill.cli.chat_tools import (
    ask_tool_results,
    format_tools,
    make_call_message,
    read_tool_definitions,
)
from modelmill.cli.chat_writer import TerminalAnswerWriter
from modelmill.cli.engine_options import ENGINE_HELP, ImplicitBuildOptions, open_llm
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import print_json, print_note
from modelmill.cli.run import (
    InterruptHandler,
    print_speed,
    show_progress_until_first_token,
    warn_if_max_tokens_exceed_context,
    with_default_max_tokens,
)
from modelmill.cli.terminal_chat import hide_typed_keys
from modelmill.core.config import RunConfig, option_field
from modelmill.core.errors import ModelmillError, RequestError, TemplateError, UsageError
from modelmill.core.types import SamplingParams

if TYPE_CHECKING:
    from modelmill.cli.remote_chat import RemoteChatModel
    from modelmill.outputs import RequestOutput
    from modelmill.text.answer_pieces import ParsedAnswer

HELP = "Chat with an engine in the terminal; /help shows the commands."
EPILOG = """Ctrl-C stops the answer, not the program. From a pipe, every line is a turn.

Examples:

  modelmill chat model.engine --system "Answer briefly." --temperature 0.7

  modelmill chat --url http://127.0.0.1:8000

  modelmill chat model.engine --tools tools.json --think on"""

THINK_MODES = ("on", "off", "auto")
_THINKING_BY_MODE = {"on": True, "off": False, "auto": None}
COMMANDS_HELP = """/system TEXT   set the system message (alone: show it)
/image FILE    attach a picture to the next message (engines that read pictures)
/model NAME    go on with another model: a served one with --url (alone: list them), else an
               engine's path or a hub's org/name
/tools FILE    offer the tools of a JSON file in OpenAI's form (alone: list them; off: none).
               You type the result of each call, or @FILE; an empty line leaves it open
/think on|off|auto [TOKENS]  think before the answer or not, for at most so many tokens
/reset         forget the conversation
/save FILE     write the conversation as JSON (/save! FILE replaces a file)
/help          this list
/exit          leave (also Ctrl-D)
A line that ends in \\ goes on; \"\"\" begins and ends a message of several lines."""


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Options of ``chat``: an engine with a chat template, or the URL of a server."""

    engine: Path | None = option_field(
        None, ENGINE_HELP + "; none with --url", positional=True, metavar="ENGINE"
    )
    url: str | None = option_field(None, "chat with a server that has OpenAI's API instead")
    model: str | None = option_field(
        None, "with --url: model to use (default: the first that the server lists)"
    )
    api_key: str | None = option_field(None, "with --url: API key of the server")
    system: str | None = option_field(None, "system message at the beginning")
    image: tuple[Path, ...] = option_field(
        (), "picture of the first message, for engines that read pictures (repeatable)"
    )
    tools: Path | None = option_field(
        None, "JSON file of tool definitions in OpenAI's form; you type the results of calls"
    )
    think: str = option_field(
        "auto", "thinking before an answer; auto: as the model does", choices=THINK_MODES
    )
    think_tokens: int | None = option_field(None, "maximum tokens of the thinking")
    stream: bool = option_field(True, "show the answer while it is generated")
    chat_template: str | None = option_field(
        None, "chat template, or a file with one, instead of the engine's own"
    )
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint instead of an engine"
    )
    sampling: SamplingParams = config_field(SamplingParams, "Sampling", exclude=("n", "num_beams"))
    run: RunConfig = config_field(RunConfig, "Engine")


def run(args: Args) -> int:
    """Chat until /exit or the end of the input.

    With --json only the conversation is printed, at the end.
    """
    if (args.engine is None) == (args.url is None):
        raise UsageError("give one of ENGINE and --url URL")
    _check_think_tokens(args.think_tokens)
    settings = ChatSettings(
        () if args.tools is None else read_tool_definitions(args.tools),
        _THINKING_BY_MODE[args.think],
        args.think_tokens,
    )
    typed = sys.stdin.isatty()
    llm, params = (
        _open_remote_chat(args) if args.engine is None else _open_local_chat(args, args.engine)
    )
    talk = ChatSession(
        llm,
        params,
        args.system,
        stream=args.stream,
        silent=args.json,
        explicit_options=args.sampling,
        settings=settings,
        read_result=lambda prompt: (
            read_message(read_terminal_line, prompt) if typed else read_pipe_line()
        ),
        open_engine=None if args.engine is None else lambda path: _open_local_chat(args, path),
    )
    for image in args.image:
        talk.attach_image(image)
    if typed:
        start_line_editing()
        if not args.json:
            name = args.engine if isinstance(llm, LocalChatModel) else f"{llm.model} at {args.url}"
            print_note(f"{name}: /help for commands, Ctrl-D to leave")
    while talk.handle_line(read_message(read_terminal_line) if typed else read_pipe_line()):
        pass
    if args.json:
        print_json({"messages": talk.messages})
    return 0


def _check_think_tokens(tokens: int | None) -> None:
    if tokens is not None and tokens < 1:
        raise UsageError(f"--think-tokens must be at least 1, not {tokens}")


def _open_local_chat(args: Args, engine: Path) -> tuple[LocalChatModel, SamplingParams]:
    """Open an engine in this process."""
    llm = open_llm(engine, args.build, args.run, chat_template=args.chat_template)
    if llm.chat_format is None:
        from modelmill.text.chat_template_override import list_chat_templates

        raise UsageError(
            f"{engine} has no chat template; give one with --chat-template "
            f"({', '.join(list_chat_templates())} or a file), or use modelmill run --prompt"
        )
    return LocalChatModel(llm), with_default_max_tokens(args.sampling, llm)


def _open_remote_chat(args: Args) -> tuple[RemoteChatModel, SamplingParams]:
    """Connect to a server."""
    from modelmill.cli.remote_chat import RemoteChatModel
    from modelmill.eval.openai_client import OpenAIClient

    return RemoteChatModel(
        OpenAIClient.from_url(args.url or "", args.api_key), args.model
    ), args.sampling


class ChatSession:
    """A conversation: its messages, changed by each line of the user."""

    def __init__(
        self,
        llm: ChatModel,
        params: SamplingParams,
        system: str | None,
        *,
        stream: bool = True,
        silent: bool = False,
        explicit_options: SamplingParams | None = None,
        settings: ChatSettings | None = None,
        read_result: Callable[[str], str | None] = lambda _: None,
        open_engine: Callable[[Path], tuple[LocalChatModel, SamplingParams]] | None = None,
    ) -> None:
        """Start a conversation.

        Args:
            llm: an engine in this process, or a server.
            params: of every answer.
            system: system message.
            stream: print the answer while it is generated.
            silent: print nothing on stdout.
            explicit_options: the fields of ``params`` that the user set; if the context is too
                short for them, one warning is printed.
            settings: tools and thinking.
            read_result: reads the result of a call; None: there is none.
            open_engine: opens the engine of /model; None: a server's models.
        """
        self.llm, self.params = llm, params
        self.stream, self.silent = stream, silent
        self.settings = settings or ChatSettings()
        self.messages: list[dict[str, Any]] = []
        self._read_result, self._open_engine = read_result, open_engine
        self._attached_images: list[str] = []
        self._saved_paths: set[Path] = set()
        # the context length of a server's engine is not known
        self._explicit_options = explicit_options if isinstance(llm, LocalChatModel) else None
        if system is not None:
            self._set_system_message(system)

    def handle_line(self, line: str | None) -> bool:
        """Run a command or answer a message; False ends the conversation."""
        if line is None:
            return False
        if not line.strip():
            return True
        if line.startswith("/"):
            return self._run_command(*_split_command(line))
        self._answer_line(line)
        return True

    def _run_command(self, name: str, rest: str) -> bool:
        if name in ("exit", "quit"):
            return False
        if name == "help":
            self._print_notice(COMMANDS_HELP)
        elif name == "reset":
            self.messages = [each for each in self.messages if each["role"] == "system"]
            self._print_notice("(forgotten)")
        elif name == "system" and rest:
            self._set_system_message(rest)
            self._print_notice("(system message set)")
        elif name == "system":
            self._print_notice(
                next(
                    (each["content"] for each in self.messages if each["role"] == "system"),
                    "(none)",
                )
            )
        elif name == "image":
            self._attach_image_file(rest)
        elif name in ("model", "tools", "think"):
            self._run_settings_command(name, rest)
        elif name in ("save", "save!"):
            self._save_conversation(rest, replace=name == "save!")
        else:
            self._print_notice(f"there is no command /{name}; /help shows them")
        return True

    def attach_image(self, image: Path) -> None:
        """Attach an image to the next message.

        Raises:
            RequestError: if the file is not an image.
            UsageError: if the engine reads no images.
        """
        from modelmill.vision.image_input import image_file_to_data_url

        if isinstance(self.llm, LocalChatModel) and not self.llm.supports_images:
            raise UsageError(f"{self.llm.llm.path} has no vision encoder: it takes text only")
        self._attached_images.append(image_file_to_data_url(image))

    def _attach_image_file(self, name: str) -> None:
        try:
            self.attach_image(Path(name).expanduser())
            self._print_notice(f"({name} goes with the next message)")
        except UsageError as error:
            print_note(str(error))

    def _run_settings_command(self, name: str, rest: str) -> None:
        """Run /model, /tools or /think; an error changes nothing."""
        change = {
            "model": self._switch_model,
            "tools": self._set_tools,
            "think": self._set_thinking,
        }
        try:
            self._print_notice(change[name](rest))
        except ModelmillError as error:
            print_note(str(error))

    def _switch_model(self, name: str) -> str:
        """Go on with another engine, or model of the server; without a name list these."""
        from modelmill.cli.remote_chat import RemoteChatModel

        if isinstance(self.llm, RemoteChatModel):
            names = self.llm.models()
            if not name:
                lines = (f"{'*' if each == self.llm.model else ' '} {each}" for each in names)
                return "\n".join(lines)
            if name not in names:
                return f"the server has no {name}; it has {', '.join(names)}"
            self.llm.choose_model(name)
            return f"({name} answers from now on)"
        if self._open_engine is None or not isinstance(self.llm, LocalChatModel):
            return "/model needs a server: modelmill chat --url"
        if not name:
            return f"* {self.llm.llm.path}"
        former = self.llm.llm
        self.llm, self.params = self._open_engine(Path(name).expanduser())
        former.close()
        return f"({name} answers from now on)"

    def _set_tools(self, name: str) -> str:
        """Offer the tools of a file, none, or list them."""
        if name == "off":
            self.settings = replace(self.settings, tools=())
            return "(no tools)"
        if name:
            self.settings = replace(
                self.settings, tools=read_tool_definitions(Path(name).expanduser())
            )
        return format_tools(self.settings.tools)

    def _set_thinking(self, rest: str) -> str:
        """Set whether and how long the model thinks, or show it."""
        mode, _, tokens = rest.partition(" ")
        if rest and (mode not in _THINKING_BY_MODE or not (tokens == "" or tokens.isdecimal())):
            raise UsageError("/think takes on, off or auto, and a maximum of tokens: /think on 512")
        if rest:
            budget = int(tokens) if tokens else None
            _check_think_tokens(budget)
            if _THINKING_BY_MODE[mode] and isinstance(self.llm, LocalChatModel):
                self.llm.check_thinking()
            self.settings = replace(
                self.settings, thinks=_THINKING_BY_MODE[mode], thinking_budget=budget
            )
        mode = next(
            name for name, thinks in _THINKING_BY_MODE.items() if thinks is self.settings.thinks
        )
        limit = self.settings.thinking_budget
        return f"(thinking: {mode}" + (f", at most {limit} tokens)" if limit else ")")

    def _set_system_message(self, text: str) -> None:
        rest = [each for each in self.messages if each["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest]

    def _save_conversation(self, name: str, replace: bool) -> None:
        """Write the conversation; overwrite only files of this session, or with ``replace``."""
        if not name:
            self._print_notice("/save needs a file name")
            return
        file = Path(name).expanduser()
        if file.is_dir():
            self._print_notice(f"{name} is a folder; give a file's name")
            return
        try:
            over = replace or file.resolve() in self._saved_paths
            with file.open("w" if over else "x", encoding="utf-8") as sink:
                sink.write(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n")
            self._saved_paths.add(file.resolve())
            self._print_notice(f"(saved to {name})")
        except FileExistsError:
            self._print_notice(f"{name} exists; /save! {name} replaces it")
        except OSError as error:
            self._print_notice(f"cannot write {name}: {error.strerror}")

    def _answer_line(self, line: str) -> None:
        """Answer one line; an invalid one prints its error and changes nothing."""
        shown: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}} for url in self._attached_images
        ]
        self._attached_images = []
        content = [*shown, {"type": "text", "text": line}] if shown else line
        trial: list[dict[str, Any]] | None = [*self.messages, {"role": "user", "content": content}]
        while trial is not None:
            answered = self._answer_dropping_oldest_turns(trial)
            if answered is None:
                return
            self.messages, results = answered
            trial = None if results is None else [*self.messages, *results]

    def _answer_dropping_oldest_turns(
        self, trial: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None] | None:
        """Answer a conversation, without its oldest turns if it is too long.

        Returns:
            The conversation with the answer, and the results of its calls if there are any; None
            if it cannot be answered.
        """
        forgotten = 0
        while True:
            try:
                answer = self._stream_answer(trial)
                break
            except RequestError as error:
                # most likely too long: without the oldest turns it may fit
                if not _drop_oldest_turn(trial):
                    print_note(str(error))
                    return None
                forgotten += 1
            except (TemplateError, UsageError) as error:
                print_note(str(error))
                return None
        if forgotten:
            print_note(
                "the conversation is longer than the engine's context; oldest turns forgotten: "
                f"{forgotten}"
            )
        if not answer.calls:
            return [*trial, {"role": "assistant", "content": answer.content}], None
        called = [*trial, make_call_message(answer.content, answer.calls)]
        results = ask_tool_results(answer.calls, self._read_result, print_note)
        if results is None:
            print_note("the calls stay without results")
        return called, results

    def _stream_answer(self, messages: list[dict[str, Any]]) -> ParsedAnswer:
        began = time.perf_counter()
        output: RequestOutput | None = None
        writer = TerminalAnswerWriter(self._write_answer_text)
        with (
            InterruptHandler() as interrupt,
            hide_typed_keys(),
            show_progress_until_first_token(self.llm) as came,
        ):
            stream: Any = self.llm.stream(messages, self.params, self.settings)
            delta: ChatDelta
            for delta in stream:
                if output is None:
                    if self.stream:
                        came()
                    self._warn_if_max_tokens_exceed_context(delta.output)
                output = delta.output
                writer.add(delta.pieces, shown=self.stream)
                if interrupt.requested:
                    stream.close()
                    break
        answer = writer.finish_and_collect_answer(stopped=interrupt.requested, shown=self.stream)
        if output is not None and not self.silent:
            print_speed([output], time.perf_counter() - began)
        return answer

    def _warn_if_max_tokens_exceed_context(self, answer: RequestOutput) -> None:
        """Warn once; the space left for answers shrinks with every turn."""
        if self._explicit_options is None or not isinstance(self.llm, LocalChatModel):
            return
        length = len(answer.prompt_token_ids) + (self._explicit_options.max_tokens or 0)
        if length > self.llm.engine_core.max_model_len:
            warn_if_max_tokens_exceed_context(self.llm, self._explicit_options, [answer])
            self._explicit_options = None

    def _write_answer_text(self, text: str) -> None:
        if not self.silent:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _print_notice(self, text: str) -> None:
        if self.silent:
            print_note(text)
        else:
            print(text)


def _drop_oldest_turn(messages: list[dict[str, Any]]) -> bool:
    """Drop the oldest question and its answer; False if only the newest question is left."""
    questions = [place for place, each in enumerate(messages) if each["role"] == "user"]
    if len(questions) < 2:
        return False
    del messages[questions[0] : questions[1]]
    return True


def _split_command(line: str) -> tuple[str, str]:
    name, _, rest = line[1:].partition(" ")
    return name.strip().lower(), rest.strip()
