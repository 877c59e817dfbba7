"""``modelmill serve --ray``: replicas of a server through Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from modelmill.cli.output import show_progress
from modelmill.core.config import BuildConfig
from modelmill.core.errors import MissingDependency, UsageError
from modelmill.core.packages import install_command

if TYPE_CHECKING:
    from modelmill.cli.serve import Args
    from modelmill.serve.server import ServerOptions
    from modelmill.serve.worker_messages import OpenEngine


def check_ray_flags(args: Args) -> None:
    """Check the flags of replicas.

    Raises:
        UsageError: flags do not go together.
        MissingDependency: Ray is not installed.
    """
    if not args.ray:
        if args.replicas != 1 or args.ray_address is not None:
            flag = "--replicas" if args.replicas != 1 else "--ray-address"
            raise UsageError(f"{flag} needs --ray: modelmill serve ENGINE --ray --replicas 2")
        return
    if not 1 <= args.replicas <= 1024:
        raise UsageError(f"--replicas must be between 1 and 1024, not {args.replicas}")
    if ":" in args.run.device:
        raise UsageError(
            f"--device {args.run.device}: Ray gives each replica its GPUs; give --device cuda"
        )
    if find_spec("ray") is None:
        raise MissingDependency(
            f"--ray needs ray; install it with: {install_command('serve', 'ray')}"
        )


def serve_ray_replicas(
    args: Args,
    place: ServerOptions,
    names: Sequence[str],
    open_messages: Sequence[OpenEngine],
    aliases: Mapping[str, str],
) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 after an orderly end."""
    from modelmill.cli.serve import register_and_announce_address
    from modelmill.serve.json_logs import log_to_stderr
    from modelmill.serve.replicas.deployment import ReplicaSpec
    from modelmill.serve.replicas.ray_cluster import DeploymentSpec, RayReplicaSet
    from modelmill.serve.replicas.server import RayFrontendServer

    plan = ReplicaSpec(
        tuple(names),
        tuple(map(_build_and_make_message_portable, open_messages)),
        args.max_waiting,
        args.max_body_bytes,
        args.log_level,
        args.otlp_endpoint,
        max_text_body_bytes=args.max_text_body_bytes,
        aliases=tuple(aliases.items()),
    )
    shape = DeploymentSpec(
        args.replicas, args.run.tp, args.run.device, args.ray_address, args.shutdown_timeout
    )

    async def serve() -> None:
        server = RayFrontendServer(RayReplicaSet(plan, shape), place)
        doing = f"starting {args.replicas} replicas of {', '.join(names)}"
        await server.run(lambda url: register_and_announce_address(args, url, names, doing, record))

    with log_to_stderr(args.log_level), contextlib.ExitStack() as record:
        asyncio.run(serve())
    return 0


def _build_and_make_message_portable(message: OpenEngine) -> OpenEngine:
    """Return ``message`` with absolute paths and an engine; a checkpoint is built now, once."""
    from modelmill.artifact.store import is_engine_folder
    from modelmill.llm import ensure_cached_engine

    path, template = Path(message.model), message.chat_template
    if not path.exists():
        raise UsageError(f"{path} does not exist; give an engine folder or a checkpoint")
    if not is_engine_folder(path):
        with show_progress("building") as on_progress:
            path = ensure_cached_engine(path, BuildConfig(**message.build), on_progress)
        message = replace(message, build={})
    if (
        template is not None
        and len(template) < 1024
        and "{" not in template
        and Path(template).is_file()
    ):
        template = str(Path(template).resolve())
    return replace(message, model=str(path.resolve()), chat_template=template)
