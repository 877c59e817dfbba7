"""``modelmill serve --ray``: replicas of a server through Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from modelmill.cli.output import progress
from modelmill.core.config import BuildConfig
from modelmill.core.errors import MissingDependency, UsageError

if TYPE_CHECKING:
    from modelmill.cli.serve import Args
    from modelmill.serve.message import Open
    from modelmill.serve.server import Place


def serve_replicas(args: Args, place: Place, names: Sequence[str], orders: Sequence[Open]) -> int:
    """Serve until SIGTERM or Ctrl-C; 0 after an orderly end. Raises UsageError for flags that do not go together."""
    from modelmill.cli.serve import opened
    from modelmill.serve.logs import to_stderr
    from modelmill.serve.replicas.cluster import Cluster, Shape
    from modelmill.serve.replicas.plan import Plan
    from modelmill.serve.replicas.server import ReplicaServer

    if not args.ray:
        flag = "--replicas" if args.replicas != 1 else "--ray-address"
        raise UsageError(f"{flag} needs --ray: modelmill serve ENGINE --ray --replicas 2")
    if not 1 <= args.replicas <= 1024:
        raise UsageError(f"--replicas must be in 1…1024, not {args.replicas}")
    if ":" in args.run.device:
        raise UsageError(f"--device {args.run.device}: Ray gives each replica its GPUs; give --device cuda")
    if find_spec("ray") is None:
        raise MissingDependency("--ray needs ray; install it with: pip install 'modelmill[serve,ray]'")
    plan = Plan(
        tuple(names),
        tuple(map(_anywhere, orders)),
        args.max_waiting,
        args.max_body_bytes,
        args.log_level,
        args.otlp_endpoint,
        text=args.max_text_body_bytes,
    )
    shape = Shape(args.replicas, args.run.tp, args.run.device, args.ray_address, args.shutdown_timeout)

    async def serve() -> None:
        server = ReplicaServer(Cluster(plan, shape), place)
        doing = f"starting {args.replicas} replicas of {', '.join(names)}"
        await server.run(lambda url: opened(args, url, names, doing))

    with to_stderr(args.log_level):
        asyncio.run(serve())
    return 0


def _anywhere(order: Open) -> Open:
    """``order`` with an engine, and paths that mean the same in another folder; a checkpoint is built now, once."""
    from modelmill.artifact.store import is_engine
    from modelmill.llm import cached_engine

    path, template = Path(order.model), order.template
    if not path.exists():
        raise UsageError(f"{path} does not exist; give an engine folder or a checkpoint")
    if not is_engine(path):
        with progress("building") as told:
            path = cached_engine(path, BuildConfig(**order.build), told)
        order = replace(order, build={})
    if template is not None and len(template) < 1024 and "{" not in template and Path(template).is_file():
        template = str(Path(template).resolve())
    return replace(order, model=str(path.resolve()), template=template)
