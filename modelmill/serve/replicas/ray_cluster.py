"""Starts, calls, watches, replaces and stops replicas with Ray and Ray Serve.

Ray's calls block on other processes, so all methods except ``call_replica`` and ``metrics_pages``
must run on a thread.
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


class RayReplicaSet:
    """The replicas of one server. Implements ``proxy.ReplicaSet``."""

    def __init__(self, replica_spec: ReplicaSpec, deployment: DeploymentSpec) -> None:
        self._replica_spec, self._deployment = replica_spec, deployment
        # servers with the same names on one cluster share their replicas
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
        """Join or start Ray, and deploy the replicas.

        Raises:
            ModelmillError: the cluster cannot be joined, or has too few GPUs.
        """
        # Ray reads these when it is imported. The first keeps a local cluster on the loopback
        # interface.
        if self._deployment.address is None:
            env.set_env_defaults(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token")
        env.set_env_defaults(RAY_USAGE_STATS_ENABLED="0", RAY_COLOR_PREFIX="0", RAY_DEDUP_LOGS="0")
        import ray
        from ray import serve

        options: dict[str, Any] = {
            "address": self._deployment.address or "local",
            "logging_level": "ERROR",
        }
        if self._deployment.address is None:
            options["include_dashboard"] = False
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = (
                str(error).strip().splitlines()[0][:200]
                if str(error).strip()
                else type(error).__name__
            )
            raise ModelmillError(
                f"Ray cannot be joined at {options['address']}: {reason}"
            ) from None
        self._choose_gpus_per_replica(ray.cluster_resources().get("GPU", 0))
        serve.start(proxy_location="Disabled", logging_config=_quiet_logging_config())
        self._deploy()

    def _choose_gpus_per_replica(self, num_gpus: float) -> None:
        """Choose the GPUs per replica.

        Args:
            num_gpus: of the cluster.

        Raises:
            ModelmillError: they are too few.
        """
        deployment = self._deployment
        self._gpus_per_replica = deployment.gpus_per_replica(num_gpus)
        if self._gpus_per_replica * deployment.num_replicas > num_gpus:
            requested = f"{deployment.num_replicas} replicas of {self._gpus_per_replica} GPUs each"
            raise ModelmillError(
                f"{requested} do not fit: the cluster has {num_gpus:g}; lower --replicas or --tp"
            )
        if not self._gpus_per_replica and deployment.address is None:
            self._replica_spec = self._replica_spec.with_memory_share(deployment.num_replicas)

    def restart_replicas(self) -> None:
        """Replace the replicas one by one; each drains within ``drain_timeout``."""
        self._replica_spec = replace(
            self._replica_spec, generation=self._replica_spec.generation + 1
        )
        self._deploy()

    def _deploy(self) -> None:
        from ray import serve

        from modelmill.serve.replicas.replica import Replica

        deployment = serve.deployment(Replica).options(
            name="Replica",
            num_replicas=self._deployment.num_replicas,
            # the engine limits its queue itself, with 429
            max_ongoing_requests=1 << 20,
            ray_actor_options={"num_cpus": 0, "num_gpus": self._gpus_per_replica},
            graceful_shutdown_timeout_s=max(self._deployment.drain_timeout, 0.1),
            graceful_shutdown_wait_loop_s=0.5,
            health_check_period_s=2,
            health_check_timeout_s=30,
            logging_config=_quiet_logging_config(),
            request_router_config=_router_config(),
        )
        target = serve.RunTarget(
            deployment.bind(self._replica_spec), name=self._app_name, route_prefix=None
        )
        (self._handle,) = serve.run_many([target], wait_for_applications_running=False)

    def refresh_state(self) -> None:
        """Get the state of the replicas from Serve.

        Raises:
            ModelmillError: they cannot be started, or Ray is gone.
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
        server_status = (
            "ok"
            if running
            else "loading"
            if status in ("DEPLOYING", "NOT_STARTED")
            else "unavailable"
        )
        self._state = {
            "status": server_status,
            "replicas": {"running": running, "target": self._deployment.num_replicas},
            "serve": status,
        }

    def stop(self) -> None:
        """End the replicas, and Ray if this process started it."""
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
        """The state at the last ``refresh_state``."""
        return dict(self._state)

    async def call_replica(
        self, head: dict[str, Any], body: bytes, prefix: Sequence[str], avoid: Sequence[str]
    ) -> AsyncGenerator[Any]:
        """See ``Replica.call``."""
        caller = self._handle.options(stream=True, method_name="call")
        response = caller.remote(head, body, prefix=tuple(prefix), avoid=tuple(avoid))
        try:
            async for part in response:
                yield part
        finally:
            # a response that has ended cannot be cancelled
            with contextlib.suppress(Exception):
                response.cancel()

    async def metrics_pages(self) -> list[tuple[str, bytes]]:
        """Metrics of all replicas; empty if one does not answer within two seconds."""
        if self._handle is None:
            return []
        try:
            return list(await self._handle.broadcast("metrics_page").results_async(timeout_s=2))
        except Exception as error:
            _log.warning("no metrics", extra={"data": {"error": type(error).__name__}})
            return []


def _router_config() -> Any:
    from ray.serve.config import RequestRouterConfig

    return RequestRouterConfig(
        request_router_class="modelmill.serve.replicas.router:PrefixAwareRouter"
    )


def _quiet_logging_config() -> dict[str, Any]:
    """Silence Serve's own logs: the server has its own."""
    return {"log_level": "ERROR", "enable_access_log": False}


def _failure_reason(app: Any) -> str:
    """One line saying why a replica could not start."""
    message = " ".join(each.message for each in app.deployments.values()) or app.message
    lines = [
        line.strip() for line in message.splitlines() if "Error" in line or "modelmill" in line
    ]
    return (lines[-1] if lines else " ".join(message.split()))[-300:]
