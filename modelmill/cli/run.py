"""``modelmill run``: generate from one prompt, or from a file of prompts."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.engine_options import ENGINE_HELP, ImplicitBuildOptions, open_llm
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import is_stdout_reader_gone, print_json, print_note, show_progress
from modelmill.cli.terminal_chat import WordWrapper, terminal_width
from modelmill.core.config import RunConfig, option_field, path_option_field
from modelmill.core.errors import TokenizerError, UsageError
from modelmill.core.types import SamplingParams

if TYPE_CHECKING:
    from modelmill.llm import LLM
    from modelmill.outputs import RequestOutput

HELP = "Run an engine: stream the answer to a prompt, or answer a file of prompts in one batch."
EPILOG = """A prompt goes through the engine's chat template if it has one; --raw continues the text unchanged.

Examples:

  modelmill run model.engine --prompt "What is the capital of France?"

  echo "Once upon a time" | modelmill run model.engine --prompt - --raw --temperature 0

  modelmill run model.engine --file prompts.jsonl --json

  modelmill run minigpt4.engine --image photo.jpg --prompt "Describe it."
"""  # noqa: E501

PROMPT_KEYS = ("messages", "prompt_token_ids", "prompt", "text")
"""Keys of a line of --file; exactly one is allowed."""
UNSUPPORTED_LINE_KEYS = {each.name for each in fields(SamplingParams)} | {
    "image",
    "images",
    "system",
    "cache_salt",
    "max_new_tokens",
}
"""Options that the command line sets for all lines of a file."""

PROGRESS_DELAY_SECONDS = 1.0
"""Seconds without a token before a terminal shows that the first token is pending."""
DEFAULT_MAX_TOKENS = 512
"""Maximum answer length if neither --max-tokens nor the generation_config sets one."""


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Options of ``run``; exactly one of prompt and file."""

    engine: Path = option_field(help=ENGINE_HELP, positional=True, metavar="ENGINE")
    prompt: str | None = option_field(None, "the prompt; - reads it from stdin", flags=("-p",))
    file: Path | None = path_option_field(
        "jsonl of prompt, messages, text or prompt_token_ids, answered in one batch", "FILE.jsonl"
    )
    image: tuple[Path, ...] = option_field(
        (), "picture before the prompt, for engines that read pictures (repeatable)"
    )
    raw: bool = option_field(
        False, "continue the prompt unchanged, without the chat template", flags=("--raw",)
    )
    system: str | None = option_field(None, "system message before the prompt (chat engines)")
    chat_template: str | None = option_field(
        None, "chat template, or a file with one, instead of the engine's own"
    )
    dump: tuple[str, str] | None = option_field(
        None,
        "write the prompt's intermediate tensors of all matching modules to a safetensors file",
        metavar="PATTERN FILE",
    )
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint instead of an engine"
    )
    sampling: SamplingParams = config_field(SamplingParams, "Sampling")
    run: RunConfig = config_field(RunConfig, "Engine")


def run(args: Args) -> int:
    """Generate, and print the speed on stderr as ``N tokens/s``."""
    if (args.prompt is None) == (args.file is None):
        raise UsageError("give one of --prompt TEXT (or - for stdin) and --file FILE.jsonl")
    jobs = (
        _read_prompts_jsonl(args.file)
        if args.file is not None
        else [{"prompt": _read_prompt(args.prompt or "")}]
    )
    llm = open_llm(args.engine, args.build, args.run, chat_template=args.chat_template)
    if args.image and (args.raw or not llm.language.supports_images):
        why = "--raw continues a text" if args.raw else f"{args.engine} has no vision encoder"
        raise UsageError(
            f"--image: {why}; pictures need a multimodal engine (minigpt4) and a conversation"
        )
    params = with_default_max_tokens(args.sampling, llm)
    asks = [_make_llm_input(job, args, llm) for job in jobs]
    if args.dump is not None:
        _dump_module_outputs(llm, asks, *args.dump)
    if args.file is None and not args.json and params.n == 1:
        return _stream_to_stdout(llm, asks[0], params, args.sampling)
    return _generate_and_print_batch(args, llm, asks, params)


def with_default_max_tokens(params: SamplingParams, llm: LLM) -> SamplingParams:
    """Set max_tokens if it is unset: an answer must not continue until the context is full."""
    if params.max_tokens is not None or llm.language.generation_defaults.has_max_length:
        return params
    return replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens or 0))


def _read_prompt(source: str) -> str:
    if source == "-":
        return sys.stdin.read().rstrip("\n")
    # command line bytes that are not UTF-8 arrive as lone surrogates, which no tokenizer accepts
    return source.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _read_prompts_jsonl(path: Path) -> list[dict[str, Any]]:
    from modelmill.eval.datasets import read_numbered_jsonl

    jobs = []
    for number, value in read_numbered_jsonl(path):
        prompt_keys = [key for key in PROMPT_KEYS if key in value]
        # other keys of a data set are ignored; keys that would change the answer are errors
        unread = sorted(set(value) & UNSUPPORTED_LINE_KEYS)
        if not prompt_keys:
            raise UsageError(f"{path}, line {number}: has none of {', '.join(PROMPT_KEYS)}")
        if len(prompt_keys) > 1:
            raise UsageError(
                f"{path}, line {number}: has {' and '.join(prompt_keys)}; give only one of them"
            )
        if unread:
            raise UsageError(
                f"{path}, line {number}: nothing reads {', '.join(map(repr, unread))}; "
                "set these options on the command line, for all lines"
            )
        jobs.append(value)
    if not jobs:
        raise UsageError(f"{path} holds no prompts")
    return jobs


def _make_llm_input(job: dict[str, Any], args: Args, llm: LLM) -> Any:
    """Make LLM's input for one job: messages for its chat template, or a raw prompt.

    Raises:
        UsageError: if the job is invalid, or a flag does not apply to it.
    """
    prompt_key = next(key for key in PROMPT_KEYS if key in job)
    text = job[prompt_key]
    if prompt_key == "messages":
        _reject_chat_flags(args, "messages")
        if not isinstance(text, list):
            raise UsageError('messages must be a list of {"role": …, "content": …}')
        return text
    if prompt_key == "prompt_token_ids":
        _reject_chat_flags(args, "prompt_token_ids")
        return {"prompt_token_ids": text}
    if not isinstance(text, str):
        raise UsageError(f"a prompt must be text, not {type(text).__name__}")
    if args.raw or prompt_key != "prompt" or llm.chat_format is None:
        _reject_chat_flags(
            args, "a text to be continued (text, --raw, or an engine without a chat template)"
        )
        return {"prompt": text}
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": make_user_content(text, args.image)}]


def _reject_chat_flags(args: Args, what: str) -> None:
    """Reject --system and --image for a prompt that is not made into a conversation.

    Raises:
        UsageError: if one of them is set.
    """
    for name, is_set in (("--system", args.system is not None), ("--image", bool(args.image))):
        if is_set:
            raise UsageError(
                f"{name} goes before a prompt in a conversation, not before {what}; put it there"
            )


def make_user_content(text: str, images: Sequence[Path]) -> Any:
    """Make the content of a user message: the images, if any, then the text."""
    if not images:
        return text
    return [
        *({"type": "image", "image": image} for image in images),
        {"type": "text", "text": text},
    ]


@contextlib.contextmanager
def show_progress_until_first_token(llm: Any) -> Iterator[Callable[[], None]]:
    """Show progress until the first token; the caller calls the yielded function when it arrives.

    A GPU's kernels are compiled on first use, which may take longer than the whole answer.
    """
    on_gpu = str(getattr(getattr(llm, "engine_core", None), "device", "")).startswith("cuda")
    label = "first token (kernels are compiled at their first use)" if on_gpu else "first token"
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(show_progress(label, lines=True, delay=PROGRESS_DELAY_SECONDS))
        yield waiting.close


def warn_if_max_tokens_exceed_context(
    llm: Any, explicit_options: SamplingParams, outputs: Sequence[RequestOutput]
) -> None:
    """Print one line on stderr if the context is too short for the requested length."""
    longest, prompts = (
        llm.engine_core.max_model_len,
        [len(answer.prompt_token_ids) for answer in outputs],
    )
    room = longest - max(prompts)
    for name, tokens in (
        ("--max-tokens", explicit_options.max_tokens),
        ("--min-tokens", explicit_options.min_tokens),
    ):
        short = sum(tokens is not None and prompt + tokens > longest for prompt in prompts)
        if tokens is None or not short:
            continue
        whose = "the answer ends" if len(prompts) == 1 else f"{short} of {len(prompts)} answers end"
        took = "the prompt takes" if len(prompts) == 1 else "the longest prompt takes"
        print_note(
            f"{name} {tokens}: {whose} after at most {room} tokens, since the engine's context is "
            f"{longest} tokens and {took} {max(prompts)}"
        )
        return


def _stream_to_stdout(
    llm: LLM, prompt: Any, params: SamplingParams, explicit_options: SamplingParams
) -> int:
    began = time.perf_counter()
    answer: RequestOutput | None = None
    wrapped = WordWrapper(terminal_width) if sys.stdout.isatty() else None
    with InterruptHandler() as interrupt, show_progress_until_first_token(llm) as came:
        stream = llm.stream(prompt, params)
        for delta in stream:
            if answer is None:
                came()
                print_sampling_defaults(llm, params)
                warn_if_max_tokens_exceed_context(llm, explicit_options, [delta.output])
            answer = delta.output
            text = delta.text or _format_ids_without_tokenizer(llm, delta.token_ids)
            sys.stdout.write(text if wrapped is None else wrapped.feed(text))
            sys.stdout.flush()
            if interrupt.requested or is_stdout_reader_gone():
                stream.close()  # type: ignore[attr-defined]
                break
    sys.stdout.write("\n" if wrapped is None else f"{wrapped.flush()}\n")
    sys.stdout.flush()
    if answer is not None:
        print_speed([answer], time.perf_counter() - began)
    return 130 if interrupt.requested else 0


def _format_ids_without_tokenizer(llm: LLM, ids: tuple[int, ...]) -> str:
    """Format ids as text for an ids-only engine; empty for others."""
    return "".join(f"{id} " for id in ids) if llm.tokenizer is None else ""


def _generate_and_print_batch(args: Args, llm: LLM, asks: list[Any], params: SamplingParams) -> int:
    print_sampling_defaults(llm, params)
    began = time.perf_counter()
    answers: dict[int, RequestOutput] = {}
    # one batch for raw prompts and one for conversations: their stop tokens differ
    for chat in (False, True):
        indices = [index for index, ask in enumerate(asks) if isinstance(ask, list) == chat]
        if indices:
            generate = llm.chat if chat else llm.generate
            results = generate(
                [asks[index] for index in indices], params, progress=False if args.json else None
            )
            answers.update(zip(indices, results, strict=True))
    seconds = time.perf_counter() - began
    ordered = [answers[index] for index in range(len(asks))]
    warn_if_max_tokens_exceed_context(llm, args.sampling, ordered)
    if args.json:
        replies = [output_to_json(answer, seconds) for answer in ordered]
        print_json(replies if args.file is not None else replies[0])
    else:
        for answer in ordered:
            for output in answer.outputs:
                head = f"── {answer.prompt!r:.60}\n" if len(ordered) > 1 and answer.prompt else ""
                print(f"{head}{output.text or ' '.join(map(str, output.token_ids))}\n")
    print_speed(ordered, seconds)
    return 0


def output_to_json(request_output: RequestOutput, seconds: float) -> dict[str, Any]:
    """Convert an answer for ``--json``; ``seconds``: the batch's time, if it has none itself."""
    outputs = []
    for output in request_output.outputs:
        completion: dict[str, Any] = {
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
        }
        if output.stop_reason is not None:
            completion["stop_reason"] = output.stop_reason
        if output.score is not None:
            completion["score"] = output.score
        if output.logprobs is not None:
            completion["logprobs"] = [_logprobs_to_json(each) for each in output.logprobs]
        outputs.append(completion)
    count = sum(len(output.token_ids) for output in request_output.outputs)
    total = request_output.seconds or seconds
    reply: dict[str, Any] = {
        "outputs": outputs,
        "prompt_token_ids": list(request_output.prompt_token_ids),
        "timing": {
            "seconds": total,
            "first_token_seconds": request_output.first_token_seconds,
            "output_tokens": count,
            "prompt_tokens": len(request_output.prompt_token_ids),
            "cached_tokens": request_output.cached_tokens,
            "tokens_per_s": _decode_rate(
                [request_output], total, _first_token_time(request_output)
            ),
        },
    }
    if request_output.prompt_logprobs is not None:
        reply["prompt_logprobs"] = [
            None if each is None else _logprobs_to_json(each)
            for each in request_output.prompt_logprobs
        ]
    return reply


def _logprobs_to_json(entry: Any) -> dict[str, Any]:
    return {str(id): {"logprob": each.logprob, "rank": each.rank} for id, each in entry.items()}


def _first_token_time(output: RequestOutput) -> float | None:
    """Return the time to first token; None for beam search, whose tokens arrive at the end."""
    return None if output.outputs[0].score is not None else output.first_token_seconds


def _decode_rate(outputs: Sequence[RequestOutput], seconds: float, first: float | None) -> float:
    """Return tokens per second without each answer's first token, if ``first`` is known."""
    counts = [len(output.token_ids) for answer in outputs for output in answer.outputs]
    later = sum(max(count - 1, 0) for count in counts)
    if first is not None and later and seconds > first:
        return later / (seconds - first)
    return sum(counts) / seconds if seconds else 0.0


def print_sampling_defaults(llm: LLM, params: SamplingParams) -> None:
    """Print the engine's sampling defaults on stderr if they apply."""
    if params.temperature is None and params.num_beams == 1:
        print_note(f"sampling: {llm.language.generation_defaults.summary_line()}")


def print_speed(outputs: list[RequestOutput], seconds: float) -> None:
    """Print one line on stderr, with ``N tokens/s``.

    Of one answer whose first token came at an unknown time there is none: of a server that sent the
    text at once.
    """
    count = sum(len(output.token_ids) for answer in outputs for output in answer.outputs)
    first = _first_token_time(outputs[0]) if len(outputs) == 1 else None
    prompt = sum(len(answer.prompt_token_ids) for answer in outputs)
    ends_together = len(outputs) > 1 or outputs[0].outputs[0].score is not None
    rate = ""
    if first is not None or ends_together:
        rate = f"{_decode_rate(outputs, seconds, first):.1f} tokens/s"
    head = f"first token after {first:.2f} s, " if first is not None else ""
    if not count and not prompt:  # a server counts them at the end, before which it was stopped
        print_note(f"{head}{seconds:.2f} s in all")
        return
    rate_text = f": {head}{rate}" if rate else ""
    print_note(f"{prompt} prompt + {count} answer tokens in {seconds:.2f} s{rate_text}")


def _dump_module_outputs(llm: LLM, asks: list[Any], pattern: str, file: str) -> None:
    from modelmill.eval.activation_dump import dump_module_outputs

    if len(asks) != 1:
        raise UsageError("--dump takes one prompt; leave --file out")
    tensors = dump_module_outputs(
        llm.engine_core, _encode_prompt(llm, asks[0]), pattern, Path(file)
    )
    print_note(f"{len(tensors) - 1} tensors written to {file}")


def _encode_prompt(llm: LLM, ask: Any) -> list[int]:
    if isinstance(ask, list):
        return list(llm.chat_request(ask, None).request.prompt)
    if "prompt_token_ids" in ask:
        return list(ask["prompt_token_ids"])
    if llm.tokenizer is None:
        raise TokenizerError(
            f"{llm.path} is an ids-only engine (no tokenizer); give prompt_token_ids in --file"
        )
    return llm.tokenizer.encode(ask["prompt"])


class InterruptHandler:
    """Within the context the first Ctrl-C sets ``requested``, the second raises.

    So a step is never interrupted.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous_handler: Any = None

    def __enter__(self) -> InterruptHandler:
        import signal
        import threading

        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        import signal

        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)

    def _on_signal(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
