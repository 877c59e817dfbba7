"""``modelmill export``: an engine in the form that another server takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelmill.cli.engine_options import ImplicitBuildOptions
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import print_json, print_note, show_progress
from modelmill.core.config import BuildConfig, RunConfig, non_default_fields, option_field
from modelmill.core.errors import UsageError

HELP = "Write an engine in the form that another server takes (Triton Inference Server)."
EPILOG = """Triton's Python must be able to import modelmill; docs/triton.md says how.

Examples:

  modelmill export triton model.engine -o model_repository/

  modelmill export triton model.engine -o model_repository/ --name chat --copy --max-num-seqs 128"""

EXPORT_FORMATS = ("triton",)


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """form: who is to serve it; engine: a folder or a checkpoint."""

    form: str = option_field(
        help="triton: a model repository of Triton Inference Server",
        positional=True, metavar="FORM",
    )  # fmt: skip
    engine: Path = option_field(
        help="engine folder, or a checkpoint (it is built into the cache first)",
        positional=True,
        metavar="ENGINE",
    )
    out: Path = option_field(
        help="the model repository; a folder NAME is made in it",
        flags=("-o", "--out"),
        metavar="DIR",
    )
    name: str | None = option_field(
        None, "name of the model in Triton (default: the engine's folder's)"
    )
    link: bool = option_field(False, "link to the engine's folder (the default)", flags=("--link",))
    copy: bool = option_field(
        False, "copy the engine's files, so that the repository can be moved", flags=("--copy",)
    )
    chat_template: str | None = option_field(
        None, "chat template, or a file with one, instead of the engine's own"
    )
    max_waiting: int = option_field(
        1024, "requests that may wait beyond --max-num-seqs; more are refused"
    )
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint in an engine's place"
    )
    run: RunConfig = config_field(RunConfig, "Engine")


def run(args: Args) -> int:
    """Write it; 0 when it is there."""
    from modelmill.artifact.store import is_engine_folder
    from modelmill.export.triton_repository import EngineStartOptions, export_triton_repository
    from modelmill.llm import ensure_cached_engine

    if args.form not in EXPORT_FORMATS:
        raise UsageError(
            f"export knows {', '.join(EXPORT_FORMATS)}, not {args.form!r}: modelmill export "
            "triton ENGINE -o DIR"
        )
    if args.link and args.copy:
        raise UsageError("--link and --copy exclude each other; give one")
    if args.max_waiting < 0:
        raise UsageError("--max-waiting must not be negative")
    engine, built = args.engine, non_default_fields(args.build)
    if not is_engine_folder(engine):
        if not engine.exists():
            raise UsageError(f"{engine} does not exist; give an engine folder or a checkpoint")
        with show_progress(f"opening {engine.name}", lines=not args.json) as on_progress:
            engine = ensure_cached_engine(engine, BuildConfig(**built), on_progress)
    elif built:
        raise UsageError(
            f"{', '.join(built)}: decided when an engine is built, and {engine} is already built; "
            "leave it out, or give the checkpoint"
        )
    start = EngineStartOptions(
        non_default_fields(args.run), _inline_template_file(args.chat_template), args.max_waiting
    )
    made = export_triton_repository(
        engine, args.out, name=args.name, copy=args.copy, start_options=start
    )
    if args.json:
        print_json(
            {
                "model": made.name,
                "path": str(made.resolve()),
                "engine": "copy" if args.copy else "link",
            }
        )
    else:
        print_note(f"{made} is ready: tritonserver --model-repository {args.out.resolve()}")
    return 0


def _inline_template_file(source: str | None) -> str | None:
    """A file's text, since the server may run elsewhere; a built-in format's name stays a name."""
    if source is None or source.isidentifier() or "{" in source:
        return source
    try:
        return Path(source).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        from modelmill.text.chat_template_override import list_chat_templates

        raise UsageError(
            f"--chat-template {source}: neither a file nor a template; built in are "
            f"{', '.join(list_chat_templates())}"
        ) from None
