"""``modelmill serve``: engines behind an HTTP API."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.engine_options import CacheBuildOptions, non_default_fields
from modelmill.cli.options import CommonArgs, config
from modelmill.cli.output import print_note
from modelmill.core.config import RunConfig, option
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.core.packages import require

if TYPE_CHECKING:
    from modelmill.serve.engine_client import EngineClient
    from modelmill.serve.server import ServerOptions
    from modelmill.serve.worker_messages import OpenEngine

HELP = "Serve engines over HTTP, for clients of the OpenAI API."
EPILOG = """Without --api-key only this machine is answered. SIGTERM lets running answers finish; a second one ends them.

Examples:

  modelmill serve model.engine --port 8000

  modelmill serve large.engine small.engine --served-model-name large --served-model-name small --host 0.0.0.0 --api-key-file keys.txt

  modelmill serve model.engine sam.engine    then open http://127.0.0.1:8000 in a browser

  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d '{"model": "model", "messages": [{"role": "user", "content": "Hello"}]}'"""  # noqa: E501

LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """engines: folders or checkpoints."""

    engines: tuple[Path, ...] = option(
        (),
        "engine folders, or checkpoints (they are built into the cache first)",
        positional=True,
        metavar="ENGINE…",
    )
    host: str = option("127.0.0.1", "address to listen on; others than this machine's need a key")
    port: int = option(8000, "port to listen on; 0: any that is free")
    served_model_name: tuple[str, ...] = option(
        (), "name of each engine in requests (default: its folder's name)"
    )
    api_key: tuple[str, ...] = option((), "a key that opens the API (repeatable)", metavar="KEY")
    api_key_file: Path | None = option(None, "file with a key on each line")
    share_cache_across_keys: bool = option(
        False,
        "let requests of different API keys share cached prefixes and image embeddings "
        "(cached_tokens tells it)",
    )
    chat_template: str | None = option(
        None, "chat template, or a file with one, instead of the engines' own"
    )
    max_waiting: int = option(
        1024, "answers that may wait beyond --max-num-seqs; more are refused with 429"
    )
    max_body_bytes: int = option(16 << 20, "largest request, of those that may hold pictures")
    max_text_body_bytes: int = option(4 << 20, "largest request to a path that takes no pictures")
    max_image_pixels: int = option(50_000_000, "largest image that is looked at")
    image_cache_bytes: int = option(
        64 << 20, "kept embeddings of images that were seen, for each such engine"
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running answers may take to finish after SIGTERM"
    )
    watchdog_timeout: float = option(
        120.0,
        "seconds without a sign of life after which an engine's worker is ended and started "
        "again; 0: never",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "origins whose web pages may call the API (CORS); * for all"
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "names beside localhost under which a server without a key answers"
    )
    log_level: str = option(
        "warning",
        "what is logged on stderr, as JSON lines (info: every request)",
        choices=LOG_LEVELS,
    )
    otlp_endpoint: str | None = option(
        None, "OpenTelemetry traces go there, over HTTP (docs/observability.md)"
    )
    warm_up: bool = option(True, "record decode graphs before the first request (GPU)")
    ray: bool = option(
        False,
        "serve through Ray Serve: replicas behind this server (docs/cluster.md)",
        flags=("--ray",),
    )
    replicas: int = option(
        1, "with --ray: servers of the same engines; with GPUs each takes --tp of them"
    )
    ray_address: str | None = option(
        None, "with --ray: a running Ray cluster (auto, HOST:PORT); default: one of our own"
    )
    build: CacheBuildOptions = config(CacheBuildOptions, "A checkpoint in an engine's place")
    run: RunConfig = config(RunConfig, "Engine")


def run(args: Args) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 after an orderly end."""
    try:
        from modelmill.serve.json_logs import log_to_stderr
        from modelmill.serve.server import Server
    except ModuleNotFoundError as missing:
        raise MissingDependency(
            f"serve needs {missing.name}; install it with: pip install 'modelmill[serve]'"
        ) from None
    place, names = _server_options(args), _model_names(args)
    if args.ray or args.replicas != 1 or args.ray_address is not None:
        from modelmill.cli.serve_ray import serve_replicas

        return serve_replicas(args, place, names, _open_messages(args))

    gone = next((path for path in args.engines if not path.exists()), None)
    if gone is not None:
        raise UsageError(f"{gone} does not exist; give an engine folder or a checkpoint")

    async def serve() -> None:
        engines = _engines(args, names)
        await Server(engines, place).run(
            lambda url: announce_address(args, url, names, f"loading {', '.join(names)}"),
            lambda engine: print_note(
                "; ".join(filter(None, (f"{engine.name} is ready", engine.kv_cache_summary)))
            ),
        )

    with log_to_stderr(args.log_level):
        asyncio.run(serve())
    return 0


def announce_address(args: Args, url: str, names: Sequence[str], doing: str) -> None:
    """Tell where it listens; with --json as one line on stdout, for scripts that let it choose a
    port.
    """
    print_note(f"listening on {url}; {doing}")
    if args.json:
        print(json.dumps({"url": url, "models": list(names)}), flush=True)


def _server_options(args: Args) -> ServerOptions:
    from modelmill.serve.server import ServerOptions
    from modelmill.serve.service import ServiceLimits
    from modelmill.serve.traces import Traces, collector_url

    if not 0 <= args.port < 65536:
        raise UsageError(f"--port must be in 0…65535, not {args.port}")
    if args.shutdown_timeout < 0 or args.max_waiting < 0:
        raise UsageError("--shutdown-timeout and --max-waiting must not be negative")
    for flag, size in (("body", args.max_body_bytes), ("text-body", args.max_text_body_bytes)):
        if not 1024 <= size < 1 << 31:
            raise UsageError(
                f"--max-{flag}-bytes must be between 1024 and {(1 << 31) - 1}, not {size}"
            )
    if not (args.watchdog_timeout == 0 or 0.1 <= args.watchdog_timeout < float("inf")):
        raise UsageError(
            "--watchdog-timeout must be 0 (never) or at least 0.1 seconds, not "
            f"{args.watchdog_timeout:g}"
        )
    if args.max_image_pixels < 1 or args.image_cache_bytes < 0:
        raise UsageError("--max-image-pixels must be at least 1, --image-cache-bytes not negative")
    # spaces around a key are none of it: of what a client sends they are taken off too
    keys = (*map(str.strip, args.api_key), *_read_keys(args.api_key_file))
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        raise UsageError("an API key must be printable ASCII and not empty")
    if not keys and args.host not in LOOPBACK_HOSTS:
        raise UsageError(
            f"--host {args.host} opens the API to others; give --api-key or --api-key-file as well"
        )
    limits = ServiceLimits(
        api_keys=keys,
        max_body_bytes=args.max_body_bytes,
        max_text_body_bytes=args.max_text_body_bytes,
        allowed_origins=args.allowed_origins,
        allowed_hosts=tuple(map(str.lower, args.allowed_hosts)),
        share_cache=args.share_cache_across_keys,
    )
    if args.otlp_endpoint is not None:
        collector_url(args.otlp_endpoint)
        # another cluster's machines have packages of their own
        if args.ray and args.ray_address is None:
            require("--otlp-endpoint", "opentelemetry", "otel")
    # with replicas, they tell the traces
    traces = (
        None if args.otlp_endpoint is None or args.ray else Traces.export_to(args.otlp_endpoint)
    )
    return ServerOptions(args.host, args.port, args.shutdown_timeout, limits, traces)


def _read_keys(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        raise UsageError(f"--api-key-file {file} cannot be read") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file {file} holds no key")
    return keys


def _model_names(args: Args) -> list[str]:
    """A name for each engine."""
    if not args.engines:
        raise UsageError(
            "give at least one ENGINE, for example: modelmill serve model.engine --port 8000"
        )
    names = list(args.served_model_name) or [served_name(path) for path in args.engines]
    if not all(name.strip() for name in names):
        raise UsageError("--served-model-name must not be empty")
    if len(names) != len(args.engines):
        raise UsageError(
            f"{len(names)} --served-model-name for {len(args.engines)} engines; give one for "
            "each, or none"
        )
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UsageError(
            f"two engines would be served as {double}; give --served-model-name for each"
        )
    return names


def served_name(path: Path) -> str:
    """The name of an engine's folder as it was given: a link's own, not that of what it points
    to.
    """
    return Path(os.path.abspath(path)).name.removesuffix(".engine")


def _engines(args: Args, names: Sequence[str]) -> list[EngineClient]:
    from modelmill.serve.engine_client import EngineClient

    return [
        EngineClient(name, order, max_waiting=args.max_waiting)
        for name, order in zip(names, _open_messages(args), strict=True)
    ]


def _open_messages(args: Args) -> list[OpenEngine]:
    """How each engine is opened, with its part of the memory."""
    from modelmill.serve.budget import segment_engine_bytes, split_kv_budget
    from modelmill.serve.worker_messages import OpenEngine

    weights = [_engine_bytes(path) for path in args.engines]
    views = [_is_segmentation_engine(path) for path in args.engines]
    run = non_default_fields(split_kv_budget(args.run, views.count(False)))
    orders = []
    for place, path in enumerate(args.engines):
        later = tuple(
            size for size, view in zip(weights[place + 1 :], views[place + 1 :]) if not view
        )
        # one that has loaded holds its weights already; what it works with it may have given back
        aside = sum(
            segment_engine_bytes(size if at > place else 0, args.image_cache_bytes)
            for at, (size, view) in enumerate(zip(weights, views))
            if view and at != place
        )
        order = OpenEngine(
            str(path), _build_overrides(args, path), run, args.warm_up, args.chat_template, later,
            views[:place].count(False),
            aside, args.image_cache_bytes, args.max_image_pixels, args.watchdog_timeout,
        )  # fmt: skip
        orders.append(order)
    return orders


def _is_segmentation_engine(path: Path) -> bool:
    """Whether it is an engine that segments images; a checkpoint counts as one that writes text."""
    try:
        return (
            json.loads((path / "manifest.json").read_text("utf-8")).get("engine_type")
            == "segmentation"
        )
    except (OSError, ValueError, AttributeError):
        return False  # its worker tells what is wrong with it


def _build_overrides(args: Args, path: Path) -> dict[str, Any]:
    """A recipe is for checkpoints; beside them, engines may stand as they are."""
    mixed = len(args.engines) > 1 and (path / "manifest.json").is_file()
    return {} if mixed else non_default_fields(args.build)


def _engine_bytes(path: Path) -> int:
    """Bytes of an engine, about."""
    if path.is_file():
        return path.stat().st_size
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else 0
    )
