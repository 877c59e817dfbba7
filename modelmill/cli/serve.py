"""``modelmill serve``: serves engines over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.engine_options import ImplicitBuildOptions, resolve_or_pull_model
from modelmill.cli.options import CommonArgs, config_field
from modelmill.cli.output import print_note
from modelmill.cli.serve_keys import read_api_admin_policy_keys
from modelmill.core.config import RunConfig, non_default_fields, option_field, path_option_field
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.core.packages import install_command, require_package
from modelmill.core.server_records import register_server

if TYPE_CHECKING:
    from modelmill.serve.catalogue.entries import CatalogueEntry
    from modelmill.serve.engine_client import EngineClient
    from modelmill.serve.server import ServerOptions
    from modelmill.serve.worker_messages import OpenEngine

HELP = "Serve engines over HTTP, for clients of the OpenAI API."
EPILOG = """Without --api-key only requests from this machine are accepted. After SIGTERM running requests finish; a second SIGTERM ends them.

Examples:

  modelmill serve model.engine --port 8000

  modelmill serve large.engine small.engine --served-model-name large --served-model-name small --host 0.0.0.0 --api-key-file keys.txt

  modelmill serve model.engine sam.engine    then open http://127.0.0.1:8000 in a browser

  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d '{"model": "model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'"""  # noqa: E501

LOG_LEVELS = ("debug", "info", "warning", "error")
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill serve``."""

    engines: tuple[Path, ...] = option_field(
        (),
        "engine folders, checkpoints or a hub's org/name (built into the cache first); a folder of "
        "engines is as --models-dir",
        positional=True,
        metavar="ENGINE…",
    )
    models_dir: Path | None = option_field(
        None, "folder of engines that are loaded when a request names them (docs/catalogue.md)"
    )
    catalogue: Path | None = option_field(
        None, "file in JSON or TOML that lists such engines, with names, aliases and idle times"
    )
    memory_budget: int | None = option_field(
        None,
        "with a catalogue: bytes that weights, KV caches and states of all loaded engines may "
        "take, as 8GiB, 8GB or a number; default on a CPU: four fifths of the memory that is free "
        "at the start",
        is_bytes=True,
    )
    sleep_memory: int | None = option_field(
        None,
        "with a catalogue: bytes of host memory for the weights of engines that sleep where they "
        "would be unloaded for others' sake, as 64GiB; they wake up in less time than a load takes",
        is_bytes=True,
    )
    keep_alive: str = option_field(
        "5m", "how long an unused engine of the catalogue stays loaded; 0: not at all, -1: always"
    )
    standby_worker: bool = option_field(
        True, "with a catalogue: keep a process ready, so that engines load sooner"
    )
    watch_models: bool = option_field(
        True, "with a catalogue: notice engines that are added, removed or rebuilt"
    )
    host: str = option_field(
        "127.0.0.1", "address to listen on; other than localhost needs an API key"
    )
    port: int = option_field(8000, "port to listen on; 0: any free port")
    served_model_name: tuple[str, ...] = option_field(
        (),
        "name of each engine in requests (default: its folder's name); of a single engine, several "
        "names",
    )
    alias: tuple[str, ...] = option_field(
        (), "a further name of an engine: ALIAS=NAME (repeatable)", metavar="ALIAS=NAME"
    )
    api_key: tuple[str, ...] = option_field((), "an accepted API key (repeatable)", metavar="KEY")
    api_key_file: Path | None = option_field(None, "file with an API key on each line")
    keys: Path | None = path_option_field(
        "file in JSON or TOML of API keys with name, priority, weight and limits "
        "(docs/api-keys.md)",
        "FILE",
    )
    admin_key: tuple[str, ...] = option_field(
        (), "a key that may also unload, pin and reload models (repeatable)", metavar="KEY"
    )
    admin_key_file: Path | None = option_field(None, "file with an admin key on each line")
    share_cache_across_keys: bool = option_field(
        False,
        "let requests of different API keys share cached prefixes and image embeddings "
        "(visible in cached_tokens)",
    )
    chat_template: str | None = option_field(
        None, "chat template, or a file with one, instead of the engines' own"
    )
    parse_special: bool = option_field(
        False,
        "read special tokens (<|im_start|>, …) in the text of completions and /tokenize where a "
        "request does not say parse_special; only for clients that write whole templates",
    )
    max_waiting: int = option_field(
        1024, "answers that may wait beyond --max-num-seqs; more are rejected with 429"
    )
    max_body_bytes: int = option_field(16 << 20, "largest request body on paths that accept images")
    max_text_body_bytes: int = option_field(4 << 20, "largest request body on paths without images")
    response_store_bytes: int = option_field(
        256 << 20,
        "memory for responses that later requests continue by previous_response_id; 0: none",
    )
    session_dir: Path | None = option_field(
        None, "folder for the KV pages of saved conversations (docs/sessions.md)"
    )
    session_bytes: int = option_field(16 << 30, "bytes that all files in --session-dir may take")
    max_image_pixels: int = option_field(50_000_000, "largest accepted image, in pixels")
    image_cache_bytes: int = option_field(
        64 << 20, "cache for image embeddings, per multimodal or segmentation engine"
    )
    answer_history_bytes: int = option_field(
        32 << 20,
        "memory per engine for the tokens of earlier answers, which later prompts repeat exactly; "
        "0: prompts are what the chat template writes",
    )
    shutdown_timeout: float = option_field(
        30.0, "seconds after SIGTERM in which running answers may finish"
    )
    watchdog_timeout: float = option_field(
        120.0,
        "seconds without a heartbeat after which an engine's worker is killed and restarted; "
        "0: never",
    )
    allowed_origins: tuple[str, ...] = option_field(
        (), "origins whose web pages may call the API (CORS); * for all"
    )
    allowed_hosts: tuple[str, ...] = option_field(
        (), "accepted Host names beside localhost, for a server without an API key"
    )
    log_level: str = option_field(
        "warning",
        "log level of the JSON lines on stderr (info: every request)",
        choices=LOG_LEVELS,
    )
    otlp_endpoint: str | None = option_field(
        None, "URL that receives OpenTelemetry traces over HTTP (docs/observability.md)"
    )
    warm_up: bool = option_field(True, "capture decode graphs before the first request (GPU)")
    ray: bool = option_field(
        False,
        "serve through Ray Serve: replicas behind this server (docs/cluster.md)",
        flags=("--ray",),
    )
    replicas: int = option_field(
        1, "with --ray: number of servers of the same engines; each uses --tp GPUs"
    )
    ray_address: str | None = option_field(
        None, "with --ray: a running Ray cluster (auto, HOST:PORT); default: start one"
    )
    build: ImplicitBuildOptions = config_field(
        ImplicitBuildOptions, "A checkpoint instead of an engine"
    )
    run: RunConfig = config_field(RunConfig, "Engine")


def run(args: Args) -> int:
    """Serve until SIGTERM or Ctrl-C; returns 0 after an orderly shutdown."""
    try:
        import modelmill.serve.server  # noqa: F401  # names what the extra lacks
        from modelmill.serve.json_logs import log_to_stderr
    except ModuleNotFoundError as missing:
        raise MissingDependency(
            f"serve needs {missing.name}; install it with: {install_command('serve')}"
        ) from None
    from modelmill.cli.serve_catalogue import (
        add_catalogue_aliases,
        read_catalogue_entries,
        with_detected_models_dir,
    )
    from modelmill.cli.serve_ray import check_ray_flags, serve_ray_replicas

    check_ray_flags(args)
    args = with_detected_models_dir(args)
    place, names = _make_server_options(args), _always_loaded_model_names(args)
    aliases, on_demand = _parse_aliases(args, names)
    entries = add_catalogue_aliases(read_catalogue_entries(args, [*names, *aliases]), on_demand)
    args = replace(args, engines=tuple(resolve_or_pull_model(path) for path in args.engines))
    if args.ray:
        return serve_ray_replicas(args, place, names, _make_open_messages(args), aliases)

    with log_to_stderr(args.log_level), contextlib.ExitStack() as record:
        asyncio.run(_serve_engines(args, place, names, aliases, entries, record))
    return 0


async def _serve_engines(
    args: Args,
    place: ServerOptions,
    names: Sequence[str],
    aliases: Mapping[str, str],
    entries: Sequence[CatalogueEntry],
    record: contextlib.ExitStack,
) -> None:
    """Serve the engines that are always loaded and those of the catalogue."""
    from modelmill.cli.serve_catalogue import make_catalogue_manager_and_watch
    from modelmill.serve.server import Server
    from modelmill.serve.standby_worker import StandbyLauncher

    engines = {engine.name: engine for engine in _make_engine_clients(args, names)}
    by_name = engines | {alias: engines[name] for alias, name in aliases.items()}
    manager, launcher, watch = None, None, None
    if entries:
        launcher = StandbyLauncher() if args.standby_worker else None
        weights = [_estimate_engine_bytes(path) for path in args.engines]
        always = list(zip(engines.values(), weights, strict=True))
        manager, watch = make_catalogue_manager_and_watch(args, entries, always, launcher)
        by_name |= manager.engine_clients_by_name()
    doing = [f"loading {', '.join(names)}"] if names else []
    doing += [f"models loaded on demand: {len(entries)}"] if entries else []
    shown = [*names, *(entry.name for entry in entries)]
    try:
        if launcher is not None:
            await launcher.refill()
        await Server([*engines.values()], place, by_name, manager, watch).run(
            lambda url: register_and_announce_address(args, url, shown, "; ".join(doing), record),
            lambda engine: print_note(
                "; ".join((f"{engine.name} is ready", *engine.memory_summary_lines))
            ),
        )
    finally:
        if launcher is not None:
            await launcher.close()


def register_and_announce_address(
    args: Args, url: str, names: Sequence[str], doing: str, record: contextlib.ExitStack
) -> None:
    """Print the address; with --json also as one JSON line on stdout, for scripts with --port 0.

    record: keeps the server's record, for ``modelmill ps``, until it is closed.
    """
    record.enter_context(register_server(url, names))
    print_note(f"listening on {url}; {doing}")
    if args.json:
        print(json.dumps({"url": url, "models": list(names)}), flush=True)


def _make_server_options(args: Args) -> ServerOptions:
    from modelmill.serve.server import ServerOptions
    from modelmill.serve.service import ServiceLimits
    from modelmill.serve.traces import RequestTracer, collector_url

    if not 0 <= args.port < 65536:
        raise UsageError(f"--port must be between 0 and 65535, not {args.port}")
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
    sizes = (args.image_cache_bytes, args.response_store_bytes, args.answer_history_bytes)
    if args.max_image_pixels < 1 or min(sizes) < 0:
        raise UsageError(
            "--max-image-pixels must be at least 1, --image-cache-bytes, --response-store-bytes "
            "and --answer-history-bytes not negative"
        )
    keys, admin_keys, policies = read_api_admin_policy_keys(args)
    if not (keys or policies) and args.host not in LOOPBACK_HOSTS:
        raise UsageError(
            f"--host {args.host} opens the API to others; give --api-key or --api-key-file as well"
        )
    limits = ServiceLimits(
        api_keys=keys,
        admin_keys=admin_keys,
        key_policies=policies,
        max_body_bytes=args.max_body_bytes,
        max_text_body_bytes=args.max_text_body_bytes,
        allowed_origins=args.allowed_origins,
        allowed_hosts=tuple(map(str.lower, args.allowed_hosts)),
        share_cache=args.share_cache_across_keys,
        response_store_bytes=args.response_store_bytes,
        session_dir=_make_session_dir(args),
        session_bytes=args.session_bytes,
    )
    if args.otlp_endpoint is not None:
        collector_url(args.otlp_endpoint)
        # machines of another cluster have their own packages
        if args.ray and args.ray_address is None:
            require_package("--otlp-endpoint", "opentelemetry", "otel")
    # with Ray the replicas export the traces
    traces = (
        None
        if args.otlp_endpoint is None or args.ray
        else RequestTracer.for_endpoint(args.otlp_endpoint)
    )
    return ServerOptions(args.host, args.port, args.shutdown_timeout, limits, traces)


def _make_session_dir(args: Args) -> Path | None:
    """Return the folder of saved sessions, which is made if it is missing."""
    if args.session_bytes < 1:
        raise UsageError(f"--session-bytes must be at least 1, not {args.session_bytes}")
    if args.session_dir is None:
        return None
    if args.ray:
        raise UsageError("--session-dir is not for --ray, whose replicas have caches of their own")
    try:
        args.session_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--session-dir {args.session_dir}: {error.strerror}") from None
    return args.session_dir.resolve()


def _always_loaded_model_names(args: Args) -> list[str]:
    """Return a name for each engine that is always loaded."""
    if not args.engines and (args.models_dir is not None or args.catalogue is not None):
        if args.served_model_name:
            raise UsageError("--served-model-name is for ENGINE arguments; use a catalogue's names")
        return []
    if not args.engines:
        raise UsageError(
            "give at least one ENGINE, for example: modelmill serve model.engine --port 8000"
        )
    primary = args.served_model_name[:1] if len(args.engines) == 1 else args.served_model_name
    names = list(primary) or [default_served_name(path) for path in args.engines]
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


def _parse_aliases(args: Args, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return further names → the name of their engine: of those that stay loaded, and others."""
    aliases: dict[str, str] = {}
    on_demand: dict[str, str] = {}
    has_catalogue = args.models_dir is not None or args.catalogue is not None
    pairs = [(name, names[0]) for name in args.served_model_name[1:] if len(names) == 1]
    for entry in args.alias:
        alias, separator, name = entry.partition("=")
        if not separator or not alias.strip():
            raise UsageError(f"--alias {entry}: give it as ALIAS=NAME")
        pairs.append((alias, name))
    for alias, name in pairs:
        if name not in names and not has_catalogue:
            raise UsageError(
                f"--alias: no engine is served as {name}; there are {', '.join(names)}"
            )
        if alias in names or alias in {*aliases, *on_demand} or not alias.strip():
            raise UsageError(f"--alias: the name {alias!r} is taken; give another")
        (aliases if name in names else on_demand)[alias] = name
    return aliases, on_demand


def default_served_name(path: Path) -> str:
    """Return the engine's folder name as given: a link's name, not its target's."""
    return Path(os.path.abspath(path)).name.removesuffix(".engine")


def _make_engine_clients(args: Args, names: Sequence[str]) -> list[EngineClient]:
    from modelmill.serve.engine_client import EngineClient

    return [
        EngineClient(name, order, max_waiting=args.max_waiting)
        for name, order in zip(names, _make_open_messages(args), strict=True)
    ]


def _make_open_messages(args: Args) -> list[OpenEngine]:
    """Make the message that opens each engine, with its part of the memory."""
    from modelmill.serve.memory_budget import segmentation_engine_bytes, with_kv_budget_share
    from modelmill.serve.worker_messages import OpenEngine

    weights = [_estimate_engine_bytes(path) for path in args.engines]
    segmenting = [_is_segmentation_engine(path) for path in args.engines]
    run = non_default_fields(with_kv_budget_share(args.run, segmenting.count(False)))
    messages = []
    for index, path in enumerate(args.engines):
        later = tuple(
            size
            for size, segments in zip(weights[index + 1 :], segmenting[index + 1 :])
            if not segments
        )
        # a loaded engine already occupies its weights, but may have released its workspace
        other_bytes = sum(
            segmentation_engine_bytes(size if other > index else 0, args.image_cache_bytes)
            for other, (size, segments) in enumerate(zip(weights, segmenting))
            if segments and other != index
        )
        message = OpenEngine(
            str(path), _get_build_config_overrides(args, path), run, args.warm_up,
            args.chat_template, later, segmenting[:index].count(False),
            other_bytes, args.image_cache_bytes, args.max_image_pixels, args.watchdog_timeout,
            args.answer_history_bytes, args.parse_special,
        )  # fmt: skip
        messages.append(message)
    return messages


def _is_segmentation_engine(path: Path) -> bool:
    """Whether it is a segmentation engine; a checkpoint counts as a language engine."""
    try:
        return (
            json.loads((path / "manifest.json").read_text("utf-8")).get("engine_type")
            == "segmentation"
        )
    except (OSError, ValueError, AttributeError):
        return False  # its worker reports the error


def _get_build_config_overrides(args: Args, path: Path) -> dict[str, Any]:
    """Return the build options of a checkpoint; none for an engine beside other engines."""
    mixed = len(args.engines) > 1 and (path / "manifest.json").is_file()
    return {} if mixed else non_default_fields(args.build)


def _estimate_engine_bytes(path: Path) -> int:
    """Return the approximate bytes of an engine."""
    if path.is_file():
        return path.stat().st_size
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if path.is_dir()
        else 0
    )
