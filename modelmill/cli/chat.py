"""``modelmill chat``: chats in the terminal."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.chat_input import keep_history, pipe_line, read_message, terminal_line
from modelmill.cli.engine_options import ENGINE_HELP, CacheBuildOptions, open_llm
from modelmill.cli.options import CommonArgs, config
from modelmill.cli.output import emit_json, print_note
from modelmill.cli.run import (
    InterruptHandler,
    note_speed,
    wait_for_first_token,
    warn_max_tokens,
    with_max_tokens,
)
from modelmill.cli.terminal_chat import WordWrapper, hide_typed_keys, terminal_width
from modelmill.core.config import RunConfig, option
from modelmill.core.errors import ModelmillError, RequestError, TemplateError, UsageError
from modelmill.core.types import SamplingParams

if TYPE_CHECKING:
    from modelmill.cli.remote_chat import RemoteChat
    from modelmill.llm import LLM
    from modelmill.outputs import RequestOutput

HELP = "Chat with an engine in the terminal; /help shows the commands."
EPILOG = """Ctrl-C stops the answer, not the program. From a pipe, every line is a turn.

Examples:

  modelmill chat model.engine --system "Answer briefly." --temperature 0.7

  modelmill chat --url http://127.0.0.1:8000"""

COMMANDS = """/system TEXT   set the system message (alone: show it)
/image FILE    attach a picture to the next message (engines that read pictures)
/model NAME    with --url: go on with another served model (alone: list them)
/reset         forget the conversation
/save FILE     write the conversation as JSON (/save! FILE replaces a file)
/help          this list
/exit          leave (also Ctrl-D)
A line that ends in \\ goes on; \"\"\" begins and ends a message of several lines."""


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Options of ``chat``: an engine with a chat template, or the URL of a server."""

    engine: Path | None = option(
        None, ENGINE_HELP + "; none with --url", positional=True, metavar="ENGINE"
    )
    url: str | None = option(None, "chat with a server that has OpenAI's API instead")
    model: str | None = option(
        None, "with --url: model to use (default: the first that the server lists)"
    )
    api_key: str | None = option(None, "with --url: API key of the server")
    system: str | None = option(None, "system message at the beginning")
    image: tuple[Path, ...] = option(
        (), "picture of the first message, for engines that read pictures (repeatable)"
    )
    stream: bool = option(True, "show the answer while it is generated")
    chat_template: str | None = option(
        None, "chat template, or a file with one, instead of the engine's own"
    )
    build: CacheBuildOptions = config(CacheBuildOptions, "A checkpoint instead of an engine")
    sampling: SamplingParams = config(SamplingParams, "Sampling", exclude=("n", "num_beams"))
    run: RunConfig = config(RunConfig, "Engine")


def run(args: Args) -> int:
    """Chat until /exit or the end of the input.

    With --json only the conversation is printed, at the end.
    """
    if (args.engine is None) == (args.url is None):
        raise UsageError("give one of ENGINE and --url URL")
    llm, params = _open_remote(args) if args.engine is None else _open_local(args, args.engine)
    talk = ChatSession(
        llm,
        params,
        args.system,
        stream=args.stream,
        silent=args.json,
        explicit_options=args.sampling,
    )
    for image in args.image:
        talk.attach_image(image)
    typed = sys.stdin.isatty()
    if typed:
        keep_history()
        if not args.json:
            print_note(f"{args.engine or args.url}: /help for commands, Ctrl-D to leave")
    while talk.handle_line(read_message(terminal_line) if typed else pipe_line()):
        pass
    if args.json:
        emit_json({"messages": talk.messages})
    return 0


def _open_local(args: Args, engine: Path) -> tuple[LLM, SamplingParams]:
    """Open an engine in this process."""
    llm = open_llm(engine, args.build, args.run, chat_template=args.chat_template)
    if llm.chat_format is None:
        raise UsageError(
            f"{engine} has no chat template; give one with --chat-template, or use modelmill run "
            "--prompt"
        )
    return llm, with_max_tokens(args.sampling, llm)


def _open_remote(args: Args) -> tuple[RemoteChat, SamplingParams]:
    """Connect to a server."""
    from modelmill.cli.remote_chat import RemoteChat
    from modelmill.eval.openai_client import OpenAIClient

    return RemoteChat(
        OpenAIClient.from_url(args.url or "", args.api_key), args.model
    ), args.sampling


class ChatSession:
    """A conversation: its messages, changed by each line of the user."""

    def __init__(
        self,
        llm: LLM | RemoteChat,
        params: SamplingParams,
        system: str | None,
        *,
        stream: bool = True,
        silent: bool = False,
        explicit_options: SamplingParams | None = None,
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
        """
        self.llm, self.params = llm, params
        self.stream, self.silent = stream, silent
        self.messages: list[dict[str, Any]] = []
        self._attached_images: list[str] = []
        self._saved_paths: set[Path] = set()
        # the context length of a server's engine is not known
        self._explicit_options = explicit_options if hasattr(llm, "engine_core") else None
        if system is not None:
            self._set_system(system)

    def handle_line(self, line: str | None) -> bool:
        """Run a command or answer a message; False ends the conversation."""
        if line is None:
            return False
        if not line.strip():
            return True
        if line.startswith("/"):
            return self._command(*_split(line))
        self._answer_line(line)
        return True

    def _command(self, name: str, rest: str) -> bool:
        if name in ("exit", "quit"):
            return False
        if name == "help":
            self._print(COMMANDS)
        elif name == "reset":
            self.messages = [each for each in self.messages if each["role"] == "system"]
            self._print("(forgotten)")
        elif name == "system" and rest:
            self._set_system(rest)
            self._print("(system message set)")
        elif name == "system":
            self._print(
                next(
                    (each["content"] for each in self.messages if each["role"] == "system"),
                    "(none)",
                )
            )
        elif name == "image":
            self._attach_file(rest)
        elif name == "model":
            self._choose_model(rest)
        elif name in ("save", "save!"):
            self._save(rest, replace=name == "save!")
        else:
            self._print(f"there is no command /{name}; /help shows them")
        return True

    def attach_image(self, image: Path) -> None:
        """Attach an image to the next message.

        Raises:
            RequestError: if the file is not an image.
            UsageError: if the engine reads no images.
        """
        from modelmill.vision.image_input import to_data_url

        text_processor = getattr(self.llm, "text_processor", None)
        if text_processor is not None and not text_processor.reads_images:
            raise UsageError(f"{text_processor.path} has no vision encoder: it takes text only")
        self._attached_images.append(to_data_url(image))

    def _attach_file(self, name: str) -> None:
        try:
            self.attach_image(Path(name).expanduser())
            self._print(f"({name} goes with the next message)")
        except UsageError as error:
            print_note(str(error))

    def _choose_model(self, name: str) -> None:
        """Go on with another model of the server; without a name list them."""
        from modelmill.cli.remote_chat import RemoteChat

        if not isinstance(self.llm, RemoteChat):
            self._print("/model needs a server: modelmill chat --url")
            return
        try:
            names = self.llm.models()
        except ModelmillError as error:
            print_note(str(error))
            return
        if not name:
            lines = (f"{'*' if each == self.llm.model else ' '} {each}" for each in names)
            self._print("\n".join(lines))
        elif name in names:
            self.llm.choose_model(name)
            self._print(f"({name} answers from now on)")
        else:
            self._print(f"the server has no {name}; it has {', '.join(names)}")

    def _set_system(self, text: str) -> None:
        rest = [each for each in self.messages if each["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest]

    def _save(self, name: str, replace: bool) -> None:
        """Write the conversation; overwrite only files of this session, or with ``replace``."""
        if not name:
            self._print("/save needs a file name")
            return
        file = Path(name).expanduser()
        try:
            over = replace or file.resolve() in self._saved_paths
            with file.open("w" if over else "x", encoding="utf-8") as sink:
                sink.write(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n")
            self._saved_paths.add(file.resolve())
            self._print(f"(saved to {name})")
        except FileExistsError:
            self._print(f"{name} exists; /save! {name} replaces it")
        except OSError as error:
            self._print(f"cannot write {name}: {error.strerror}")

    def _answer_line(self, line: str) -> None:
        """Answer one line; an invalid one prints its error and changes nothing."""
        shown: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": url}} for url in self._attached_images
        ]
        self._attached_images = []
        content = [*shown, {"type": "text", "text": line}] if shown else line
        trial = [*self.messages, {"role": "user", "content": content}]
        forgotten = 0
        while True:
            try:
                text = self._stream_answer(trial)
                break
            except RequestError as error:
                # most likely too long: without the oldest turns it may fit
                if not _forget_oldest(trial):
                    print_note(str(error))
                    return
                forgotten += 1
            except TemplateError as error:
                print_note(str(error))
                return
        if forgotten:
            print_note(
                "the conversation is longer than the engine's context; oldest turns forgotten: "
                f"{forgotten}"
            )
        self.messages = [*trial, {"role": "assistant", "content": text}]

    def _stream_answer(self, messages: list[dict[str, Any]]) -> str:
        began = time.perf_counter()
        parts: list[str] = []
        answer: RequestOutput | None = None
        wrapped = WordWrapper(terminal_width if sys.stdout.isatty() else lambda: sys.maxsize)
        with (
            InterruptHandler() as interrupt,
            hide_typed_keys(),
            wait_for_first_token(self.llm) as came,
        ):
            stream: Any = self.llm.stream(messages, self.params)
            for delta in stream:
                if answer is None:
                    if self.stream:
                        came()
                    self._warn_max_tokens(delta.output)
                answer = delta.output
                parts.append(delta.text)
                if self.stream:
                    self._write(wrapped.feed(delta.text))
                if interrupt.requested:
                    stream.close()
                    break
        if not self.stream:
            self._write(wrapped.feed("".join(parts)))
        self._write(wrapped.flush() + (" [stopped]\n" if interrupt.requested else "\n"))
        if answer is not None and not self.silent:
            note_speed([answer], time.perf_counter() - began)
        return "".join(parts)

    def _warn_max_tokens(self, answer: RequestOutput) -> None:
        """Warn once; the space left for answers shrinks with every turn."""
        if self._explicit_options is not None and len(answer.prompt_token_ids) + (
            self._explicit_options.max_tokens or 0
        ) > (
            self.llm.engine_core.max_model_len  # type: ignore[union-attr]
        ):
            warn_max_tokens(self.llm, self._explicit_options, [answer])
            self._explicit_options = None

    def _write(self, text: str) -> None:
        if not self.silent:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _print(self, text: str) -> None:
        if self.silent:
            print_note(text)
        else:
            print(text)


def _forget_oldest(messages: list[dict[str, Any]]) -> bool:
    """Drop the oldest question and its answer; False if only the newest question is left."""
    turns = [place for place, each in enumerate(messages) if each["role"] != "system"]
    if len(turns) < 3:
        return False
    del messages[turns[0] : turns[0] + 2]
    return True


def _split(line: str) -> tuple[str, str]:
    name, _, rest = line[1:].partition(" ")
    return name.strip().lower(), rest.strip()
