"""``modelmill pull``: fetch a checkpoint by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from modelmill.cli.options import CommonArgs
from modelmill.cli.output import print_json, print_note, show_progress
from modelmill.core import disk_errors
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import option_field
from modelmill.core.errors import CheckpointError

HELP = "Fetch a checkpoint: the demo model by its short name, or any model of the Hugging Face hub."
EPILOG = """Examples:

  modelmill pull smollm2

  modelmill pull Qwen/Qwen3-0.6B -o models"""


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """name: smollm2, org/name, or org/name:file.gguf."""

    name: str = option_field(
        help="smollm2, a hub's org/name, or org/name:file.gguf", positional=True, metavar="NAME"
    )
    output: Path | None = option_field(
        None, "folder to put it in; default: the cache", flags=("-o", "--output"), metavar="FOLDER"
    )


def run(args: Args) -> int:
    """Print the path of what was fetched: the file or folder to give to the other commands."""
    from modelmill.checkpoint.pull import pull
    from modelmill.core.env import cache_dir

    folder = args.output or cache_dir() / "models"
    with show_progress(f"pulling {args.name}", lines=True) as on_progress:
        try:
            path = pull(args.name, folder, on_progress)
        except OSError as error:
            if error.errno not in disk_errors.USER_FIXABLE_ERRNOS:
                raise
            other = (
                "choose another -o"
                if args.output
                else "name a folder with -o, or another cache in MODELMILL_CACHE"
            )
            raise CheckpointError(f"cannot write {folder}: {error.strerror}; {other}") from None
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    count = sum(each.stat().st_size for each in files)
    if args.json:
        print_json({"name": args.name, "path": str(path), "bytes": count})
    else:
        print_note(f"{args.name}: {format_bytes(count)}")
        print(path)
    return 0
