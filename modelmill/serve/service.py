"""State shared by all routes: the served engines by name, and the limits."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from modelmill.core.errors import UsageError
from modelmill.serve.access.key_limits import KeyUsage
from modelmill.serve.access.key_policy import KeyPolicy
from modelmill.serve.access.request_accounting import RequestAccounting
from modelmill.serve.catalogue.managed_model import ManagedModel
from modelmill.serve.catalogue.manager import ModelManager
from modelmill.serve.engine_client import EngineClient
from modelmill.serve.engine_state import EngineState
from modelmill.serve.errors import ApiError, invalid_request
from modelmill.serve.json_scan import JsonLimits
from modelmill.serve.metrics import ServerMetrics
from modelmill.serve.response_store import DEFAULT_STORE_BYTES, ResponseStore
from modelmill.serve.segmentation_messages import SEGMENTATION_ENGINE_TYPE
from modelmill.serve.traces import RequestTracer

T = TypeVar("T")
INTERNAL_SCOPE_KEY = "modelmill.internal"
"""Scope key that marks a request which the server sends to itself (``warmup``)."""
TENANT_SCOPE_KEY = "modelmill.tenant"
"""Scope key of the tenant: an opaque id derived from the API key, never the key."""
OWNER_SCOPE_KEY = "modelmill.owner"
"""Scope key of the owner of stored responses; also where tenants share their caches."""
ADMIN_SCOPE_KEY = "modelmill.admin"
"""Scope key: whether the request may administer models."""
POLICY_SCOPE_KEY = "modelmill.policy"
"""Scope key of the policy of the request's key."""
PRIORITY_SCOPE_KEY = "modelmill.priority"
"""Scope key of the field ``priority`` of the request."""
REQUEST_FIELDS_SET_SCOPE_KEY = "modelmill.fields_set"
"""Scope key of the names of the fields in the request's body."""
ACCOUNTING_SCOPE_KEY = "modelmill.use"
"""Scope key of what the request uses of its key's limits, which ends with it."""
LEASES_SCOPE_KEY = "modelmill.leases"
"""Scope key of the request's leases of engines, which are released when it has ended."""


DEFAULT_SESSION_DIR_BYTES = 16 << 30
MAX_IGNORED_JSON_VALUES = 1 << 20
MIN_LARGE_BODY_BYTES, MAX_QUEUED_BODIES_OF_MAX_SIZE = 1 << 20, 4
"""Bodies above this size use their own queue; how many of the largest size may wait in a queue."""


@dataclass(frozen=True)
class ServiceLimits:
    """Limits and access rules of the HTTP server.

    Attributes:
        api_keys: accepted keys; empty: no authentication.
        admin_keys: keys that may also administer models; without any, requests may do so only where
            there are no API keys either.
        key_policies: further API keys, with a name, a priority, a share and limits.
        max_body_bytes: of a request that may contain images.
        max_text_body_bytes: of a request that may not.
        body_timeout: seconds in which a body must arrive.
        allowed_origins: origins of browser pages that may send requests (CORS).
        allowed_hosts: host names accepted by a server without keys, beside addresses and localhost.
        share_cache: whether requests of different keys share cached prefixes and image embeddings.
            ``cached_tokens`` and response times reveal cache hits.
        response_store_bytes: memory for responses that later requests continue; 0: none.
        session_dir: folder of saved sessions; None: none are saved.
        session_bytes: that all files in it may take.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    key_policies: tuple[KeyPolicy, ...] = ()
    max_body_bytes: int = 16 << 20
    max_text_body_bytes: int = 4 << 20
    body_timeout: float = 60.0
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    share_cache: bool = False
    response_store_bytes: int = DEFAULT_STORE_BYTES
    session_dir: Path | None = None
    session_bytes: int = DEFAULT_SESSION_DIR_BYTES


@dataclass
class Service:
    """The served engines and everything that routes share.

    Attributes:
        engines: by every name they are served under, in order.
        draining: new requests are refused.
        traces: receives one span per request; None: no tracing.
        catalogue: loads engines for requests; None: all engines are always loaded.
    """

    engines: Mapping[str, EngineClient]
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    draining: bool = False
    num_active: int = 0
    traces: RequestTracer | None = None
    catalogue: ModelManager | None = None

    def __post_init__(self) -> None:
        self.response_store = ResponseStore(self.limits.response_store_bytes)
        self._key_usages = {
            policy: KeyUsage(policy, self.metrics.keys) for policy in self.limits.key_policies
        }
        for policy in self.limits.key_policies:
            self.metrics.keys.add_key(policy.name)
        # threads: tokenizers release the GIL, chat templates wait for another process
        for engine in self.unique_engines:
            self._attach_metrics(engine)
        if self.catalogue is not None:
            self.catalogue.set_replace_callback(self._replace_engine)
            self.catalogue.set_removed_callback(self.metrics.remove_model)
            self.catalogue.set_metrics(self.metrics.loads)
        self._text_pool = ThreadPoolExecutor(4, thread_name_prefix="modelmill-text")
        # one thread each, because parsing holds the GIL for some milliseconds. Large bodies have
        # their own queue, so that they do not delay small requests
        self._small_body_pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-body")
        self._large_body_pool = ThreadPoolExecutor(1, thread_name_prefix="modelmill-large-body")
        self._parsing_bytes = {self._small_body_pool: 0, self._large_body_pool: 0}

    def add_model(self, model: ManagedModel) -> None:
        """Serve a model of the catalogue under its names from now on.

        Raises:
            UsageError: a name is taken.
        """
        names = (model.name, *model.entry.aliases)
        double = next((name for name in names if name in self.engines), None)
        if double is not None:
            raise UsageError(f"another engine is served as {double}; rename the folder")
        self._attach_metrics(model.engine)
        self.engines = {**self.engines, **dict.fromkeys(names, model.engine)}

    def remove_model(self, model: ManagedModel) -> None:
        """Serve a model of the catalogue no longer."""
        self.engines = {
            name: each for name, each in self.engines.items() if each is not model.engine
        }

    def begin_accounting(self, policy: KeyPolicy, priority: int | None) -> RequestAccounting:
        """Count a request of a key; raises as ``RequestAccounting``."""
        return RequestAccounting(policy, self._key_usages.get(policy), priority)

    def increment_active_requests(self) -> None:
        """Count one more request that runs."""
        self.num_active += 1

    def decrement_active_requests(self) -> None:
        """Count one request less that runs."""
        self.num_active -= 1

    def start_draining(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    @property
    def unique_engines(self) -> list[EngineClient]:
        """Every engine once, in order."""
        return list(dict.fromkeys(self.engines.values()))

    @property
    def always_loaded_engines(self) -> list[EngineClient]:
        """The engines that are loaded from the start to the end, in order."""
        if self.catalogue is None:
            return self.unique_engines
        return [
            each
            for each in self.unique_engines
            if self.catalogue.find_model_by_client(each) is None
        ]

    def _attach_metrics(self, engine: EngineClient) -> None:
        engine.set_metrics(self.metrics.for_engine(engine.name), self.metrics.segment)

    def _replace_engine(self, old: EngineClient, new: EngineClient) -> None:
        """Serve ``new`` under the names of ``old`` from now on."""
        self._attach_metrics(new)
        self.engines = {name: new if each is old else each for name, each in self.engines.items()}

    @property
    def is_ready(self) -> bool:
        """Whether every engine accepts requests, or waits to be loaded for one."""
        return not self.draining and all(
            engine.state is EngineState.READY for engine in self.always_loaded_engines
        )

    def get_engine(self, name: str) -> EngineClient:
        """Return the engine of that name.

        Raises:
            ApiError: 404, there is no such engine.
        """
        if not self.engines:
            raise ApiError(404, "no model is served now; add an engine to --models-dir",
                param="model", code="model_not_found")  # fmt: skip
        engine = self.engines.get(name)
        if engine is None:
            known = ", ".join(self.engines)
            raise ApiError(404, f"there is no model {name[:100]!r} here; there are {known}",
                param="model",
                           code="model_not_found")  # fmt: skip
        return engine

    def only_model_name(self) -> str:
        """Return the name of the only model that generates text, for requests without one.

        Raises:
            ApiError: 400, there are several.
        """
        engines = [
            each for each in self.unique_engines if each.engine_type != SEGMENTATION_ENGINE_TYPE
        ]
        if len(engines) > 1:
            raise _model_required_error(engines)
        return (engines or self.unique_engines)[0].name if self.engines else ""

    def get_segmentation_engine(self, name: str | None) -> EngineClient:
        """Return the engine of that name; for None the only one that segments.

        While none is open, the first that is not open yet stands for it.

        Raises:
            ApiError: no such engine, or several.
        """
        if name is not None:
            return self.get_engine(name)
        by_type: dict[str | None, list[EngineClient]] = {}
        for engine in self.unique_engines:
            by_type.setdefault(engine.engine_type, []).append(engine)
        segmenting = by_type.get(SEGMENTATION_ENGINE_TYPE, [])
        if len(segmenting) > 1:
            raise _model_required_error(segmenting)
        engines = segmenting or by_type.get(None)
        if not engines:
            raise invalid_request("no engine that segments images is served here", "model")
        return engines[0]

    async def run_in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run text processing on a thread, so that the event loop continues."""
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, work, *args)

    async def parse_in_thread(self, work: Callable[..., T], data: bytearray, *args: Any) -> T:
        """Parse a body on the thread of its size class, one body at a time.

        A body that still waits is dropped when its task is cancelled.

        Args:
            work: called with ``data`` and ``args``.
            data: the body.
            *args: further arguments of ``work``.

        Raises:
            ApiError: 503, the queue holds as many bytes as MAX_QUEUED_BODIES_OF_MAX_SIZE bodies of
                the largest size.
        """
        size, pool = (
            len(data),
            self._small_body_pool if len(data) <= MIN_LARGE_BODY_BYTES else self._large_body_pool,
        )
        if (
            self._parsing_bytes[pool]
            and self._parsing_bytes[pool] + size
            > MAX_QUEUED_BODIES_OF_MAX_SIZE * self.limits.max_body_bytes
        ):
            raise ApiError(
                503, "too many large requests are being read; try again soon",
                "service_unavailable_error", None,
                "busy", {"Retry-After": "1"},
            )  # fmt: skip
        self._parsing_bytes[pool] += size
        future = pool.submit(work, data, *args)
        loop = asyncio.get_running_loop()
        # its bytes count until the thread has finished, even if the request was cancelled
        future.add_done_callback(
            lambda _: _call_soon_unless_closed(
                loop, lambda: self._release_parsing_bytes(pool, size)
            )
        )
        return await asyncio.wrap_future(future)

    def _release_parsing_bytes(self, pool: ThreadPoolExecutor, size: int) -> None:
        self._parsing_bytes[pool] -= size

    def json_limits(self, unused: bool = False) -> JsonLimits:
        """Limits of a JSON body: enough values for the longest prompt of token ids, and some more.

        Args:
            unused: whether the body may contain many values that are ignored.
        """
        longest = max(
            (
                engine.engine_info.max_model_len
                for engine in self.unique_engines
                if engine.engine_info is not None
            ),
            default=0,
        )
        return JsonLimits(
            max_values=(MAX_IGNORED_JSON_VALUES if unused else JsonLimits.max_values) + longest
        )

    def close(self) -> None:
        """Stop the threads and the exporter of traces."""
        for pool in (self._text_pool, self._small_body_pool, self._large_body_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            self.traces.close()


def _model_required_error(engines: Sequence[EngineClient]) -> ApiError:
    """The error of a request that leaves out which of several models answers."""
    known = ", ".join(each.name for each in engines)
    return invalid_request(f"model: field required; there are {known}", "model")


def _call_soon_unless_closed(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(call)


def tenant_cache_salt(tenant: str, salt: str | None) -> str | None:
    """Return a request's cache_salt, combined with its tenant so that caches are separate per key.

    Args:
        tenant: "" without keys.
        salt: the ``cache_salt`` of the request.
    """
    if not tenant:
        return salt
    return hashlib.sha256(f"{tenant}\0{salt or ''}".encode("utf-8", "surrogatepass")).hexdigest()
