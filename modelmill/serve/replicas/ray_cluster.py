"""Ray and Ray Serve, as far as replicas need them: started, asked, watched, replaced one after
another, stopped.

Ray's calls wait for other processes, so all of them but ``call_replica`` and ``metrics_pages``
belong on a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from modelmill.core import env, log
from modelmill.core.errors import ModelmillError
from modelmill.serve.replicas.deployment import DeploymentSpec, ReplicaSpec

_log = log.get_logger("serve.cluster")


class RayCluster:
    """The replicas of one server. Implements ``proxy.ReplicaSet``."""

    def __init__(self, replica_spec: ReplicaSpec, deployment: DeploymentSpec) -> None:
        self._replica_spec, self._deployment = replica_spec, deployment
        # servers of the same names on one cluster share their replicas; others do not meet
        self._app_name = (
            "modelmill-" + hashlib.sha256("\n".join(replica_spec.names).encode()).hexdigest()[:12]
        )
        self._handle: Any = None
        self._gpus_per_replica = 0
        self._state: dict[str, Any] = {
            "status": "loading",
            "replicas": {"running": 0, "target": deployment.num_replicas},
        }

    # -- on a thread

    def start(self) -> None:
        """Join or start Ray, and ask for the replicas.

        Raises ModelmillError where there is no such cluster.
        """
        # Ray reads these when it is imported. The first keeps a cluster of our own on the loopback
        # interface.
        if self._deployment.address is None:
            env.set_defaults(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token")
        env.set_defaults(RAY_USAGE_STATS_ENABLED="0", RAY_COLOR_PREFIX="0", RAY_DEDUP_LOGS="0")
        import ray
        from ray import serve

        how: dict[str, Any] = {
            "address": self._deployment.address or "local",
            "logging_level": "ERROR",
        }
        if self._deployment.address is None:
            how["include_dashboard"] = False
        try:
            ray.init(**how)
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = (
                str(error).strip().splitlines()[0][:200]
                if str(error).strip()
                else type(error).__name__
            )
            raise ModelmillError(f"Ray cannot be joined at {how['address']}: {first}") from None
        self._assign_gpus(ray.cluster_resources().get("GPU", 0))
        serve.start(proxy_location="Disabled", logging_config=_quiet_logging())
        self._deploy()

    def _assign_gpus(self, num_gpus: float) -> None:
        """num_gpus: of the cluster. Raises ModelmillError where they are too few."""
        shape = self._deployment
        self._gpus_per_replica = shape.gpus_per_replica(num_gpus)
        if self._gpus_per_replica * shape.num_replicas > num_gpus:
            wanted = f"{shape.num_replicas} replicas of {self._gpus_per_replica} GPUs each"
            raise ModelmillError(
                f"{wanted} do not fit: the cluster has {num_gpus:g}; lower --replicas or --tp"
            )
        if not self._gpus_per_replica and shape.address is None:
            self._replica_spec = self._replica_spec.split_for_replicas(shape.num_replicas)

    def restart_replicas(self) -> None:
        """Replace the replicas one after another; each finishes what it answers, within
        ``drain_timeout``.
        """
        self._replica_spec = replace(
            self._replica_spec, generation=self._replica_spec.generation + 1
        )
        self._deploy()

    def _deploy(self) -> None:
        from ray import serve

        from modelmill.serve.replicas.replica import Replica

        made = serve.deployment(Replica).options(
            name="Replica",
            num_replicas=self._deployment.num_replicas,
            # how much waits is the engine's to say, with 429
            max_ongoing_requests=1 << 20,
            ray_actor_options={"num_cpus": 0, "num_gpus": self._gpus_per_replica},
            graceful_shutdown_timeout_s=max(self._deployment.drain_timeout, 0.1),
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=2,
            health_check_timeout_s=30,
            logging_config=_quiet_logging(),
            request_router_config=_router_config(),
        )
        wanted = serve.RunTarget(
            made.bind(self._replica_spec), name=self._app_name, route_prefix=None
        )
        (self._handle,) = serve.run_many([wanted], wait_for_applications_running=False)

    def refresh_state(self) -> None:
        """Ask Serve how the replicas are.

        Raises ModelmillError where they cannot be started, or Ray is gone.
        """
        from ray import serve

        app = serve.status().applications.get(self._app_name)
        running = (
            0
            if app is None
            else sum(each.replica_states.get("RUNNING", 0) for each in app.deployments.values())
        )
        status = "unavailable" if app is None else app.status.value
        if status == "DEPLOY_FAILED" and running == 0:
            raise ModelmillError(f"no replica can be started: {_failure_reason(app)}")
        told = (
            "ok"
            if running
            else "loading"
            if status in ("DEPLOYING", "NOT_STARTED")
            else "unavailable"
        )
        self._state = {
            "status": told,
            "replicas": {"running": running, "target": self._deployment.num_replicas},
            "serve": status,
        }

    def stop(self) -> None:
        """End the replicas, and Ray where it is ours."""
        import ray
        from ray import serve

        with contextlib.suppress(Exception):
            if self._deployment.address is None:
                serve.shutdown()
            else:
                serve.delete(self._app_name)
        ray.shutdown()

    # -- on the proxy's event loop

    def state(self) -> dict[str, Any]:
        """As of the last look."""
        return dict(self._state)

    async def call_replica(
        self, head: dict[str, Any], body: bytes, prefix: Sequence[str], avoid: Sequence[str]
    ) -> AsyncGenerator[Any]:
        """See ``Replica.call``."""
        caller = self._handle.options(stream=True, method_name="call")
        told = caller.remote(head, body, prefix=tuple(prefix), avoid=tuple(avoid))
        try:
            async for part in told:
                yield part
        finally:
            # of one that has ended there is nothing to cancel
            with contextlib.suppress(Exception):
                told.cancel()

    async def metrics_pages(self) -> list[tuple[str, bytes]]:
        """Of the replicas that answer within two seconds, or none."""
        if self._handle is None:
            return []
        try:
            return list(await self._handle.broadcast("page").results_async(timeout_s=2))
        except Exception as error:
            _log.warning("no metrics", extra={"data": {"error": type(error).__name__}})
            return []


def _router_config() -> Any:
    from ray.serve.config import RequestRouterConfig

    return RequestRouterConfig(
        request_router_class="modelmill.serve.replicas.router:PrefixAwareRouter"
    )


def _quiet_logging() -> dict[str, Any]:
    """What Serve itself says, we say in our own logs."""
    return {"log_level": "ERROR", "enable_access_log": False}


def _failure_reason(app: Any) -> str:
    """One line of what a replica said when it could not start."""
    told = " ".join(each.message for each in app.deployments.values()) or app.message
    lines = [line.strip() for line in told.splitlines() if "Error" in line or "modelmill" in line]
    return (lines[-1] if lines else " ".join(told.split()))[-300:]
