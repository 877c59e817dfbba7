"""The registry of ops: which backend's implementation of each op serves a device.

An op is a file ``ops/<op>.py`` with a function of its own name, the torch reference: it defines
what the op
computes. A backend's implementation is a file of the same name in ``ops/cpu``, ``ops/triton`` or
``ops/cuda`` with

* ``available(device_type) -> str | None``: None where it can run, else the reason why it cannot;
* ``run(...)``: the same signature and meaning as the reference;
* optionally ``supports(...) -> bool``: whether these arguments are served; the next backend in the
  order of preference serves the others, at last the reference;
* optionally ``specializations(...)``: arguments with which each of its kernels is met once, where
  kernels are compiled for sizes that change from step to step (``runtime.warmup``);
* optionally ``USES_FALLBACK = True``: ``run`` also takes ``fallback``, the next backend's ``run``,
  for the part of the work that that one serves better.

``select_backends`` picks once, at load; the result is passed in every Step and can be printed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from modelmill.core.errors import UsageError
from modelmill.core.registry import closest_name, find_module
from modelmill.ops.launch_configs import Tuning, filter_supported

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_quant",
    "add_rms_norm_quant",
    "quantize",
    "layer_norm",
    "add_layer_norm",
    "add_layer_norm_quant",
    "rope_cos_sin",
    "rope_cache",
    "paged_attention",
    "silu_mul",
    "silu_mul_quant",
    "gelu_tanh",
    "gelu",
    "gelu_quant",
    "linear_gelu",
    "linear",
    "int8_linear",
    "int4_linear",
    "int8_group_linear",
    "rptq_quant",
    "rptq_linear",
    "w8a8_linear",
    "fp8_linear",
    "argmax",
    "sample",
    "image_attention",
    "upsample_masks",
)
# Fused ops, and the ops that each replaces. Used only where an implementation exists and all that
# it replaces comes from the same backend (or from another where that backend has none of it), so
# that a kernel switched by hand is never bypassed. What decode does not do:
_NOT_IN_DECODE = (
    *(
        "rms_norm_quant",
        "add_rms_norm_quant",
        "silu_mul_quant",
        "quantize",
        "w8a8_linear",
        "fp8_linear",
    ),
    *("rptq_quant", "rptq_linear", "argmax", "sample", "image_attention", "upsample_masks"),
    *(
        "add_layer_norm",
        "add_layer_norm_quant",
        "gelu",
        "gelu_quant",
        "linear_gelu",
        "rope_cos_sin",
    ),
)
FUSED_OPS = {
    "decode": tuple(op for op in OPS if op not in _NOT_IN_DECODE),
    "linear_swiglu": ("linear", "silu_mul"),
    "int8_linear_swiglu": ("int8_linear", "silu_mul"),
    "int4_linear_swiglu": ("int4_linear", "silu_mul"),
    "w8a8_linear_swiglu": ("w8a8_linear", "silu_mul"),
    "linear_add": ("linear", "add_rms_norm"),
    "qkv_rope_cache": ("linear", "rope_cache"),
}
# Fused ops that give None for arguments that they do not serve: the ops that they replace are
# faster than a reference.
_OPTIONAL_FUSED_OPS = (
    "int8_linear_swiglu",
    "int4_linear_swiglu",
    "w8a8_linear_swiglu",
    "linear_add",
    "qkv_rope_cache",
)
BACKENDS = ("cuda", "triton", "cpu")
BACKEND_PREFERENCE = {"cuda": ("cuda", "triton", "torch"), "cpu": ("cpu", "torch")}


@dataclass(frozen=True)
class Ops:
    """The selected callables, one per op; ``backends`` names the backend of each for printing.

    Fused ops: None where no backend has one for their ops. Those in ``_OPTIONAL_FUSED_OPS`` give
    None for arguments that they leave to those.
    """

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rms_norm_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    add_rms_norm_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    layer_norm: Callable[..., torch.Tensor]
    add_layer_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    add_layer_norm_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
    rope_cos_sin: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    rope_cache: Callable[..., torch.Tensor]
    paged_attention: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    silu_mul_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    gelu_tanh: Callable[..., torch.Tensor]
    gelu: Callable[..., torch.Tensor]
    gelu_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    linear_gelu: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    int8_linear: Callable[..., torch.Tensor]
    int4_linear: Callable[..., torch.Tensor]
    int8_group_linear: Callable[..., torch.Tensor]
    rptq_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    rptq_linear: Callable[..., torch.Tensor]
    w8a8_linear: Callable[..., torch.Tensor]
    fp8_linear: Callable[..., torch.Tensor]
    argmax: Callable[..., torch.Tensor]
    sample: Callable[..., torch.Tensor]
    image_attention: Callable[..., torch.Tensor]
    upsample_masks: Callable[..., tuple[Any, torch.Tensor, torch.Tensor, Any]]
    backends: Mapping[str, str]
    decode: Callable[..., torch.Tensor] | None = None
    linear_swiglu: Callable[..., torch.Tensor] | None = None
    int8_linear_swiglu: Callable[..., torch.Tensor | None] | None = None
    int4_linear_swiglu: Callable[..., torch.Tensor | None] | None = None
    w8a8_linear_swiglu: Callable[..., torch.Tensor | None] | None = None
    linear_add: Callable[..., torch.Tensor | None] | None = None
    qkv_rope_cache: Callable[..., torch.Tensor | None] | None = None

    @property
    def fuses_norm_quant(self) -> bool:
        """Whether a norm that puts out 8 bits is faster than the two ops, one after the other."""
        return self.backends["add_rms_norm_quant"] != "torch"

    @property
    def fuses_silu_mul_quant(self) -> bool:
        """The same of SwiGLU's gate."""
        return self.backends["silu_mul_quant"] != "torch"


def reference(op: str) -> Callable[..., Any]:
    """The torch reference of an op."""
    return getattr(import_module(f"modelmill.ops.{op}"), op)


def implementations(op: str, backends: Iterable[str] = BACKENDS) -> dict[str, ModuleType]:
    """Faster implementations of an op, by backend; those whose packages are absent are left out."""
    found = {backend: implementation(op, backend) for backend in backends}
    return {backend: module for backend, module in found.items() if module is not None}


def implementation(op: str, backend: str) -> ModuleType | None:
    """One backend's implementation of an op; None where it has none, or where a package that it
    needs is absent.
    """
    if backend not in BACKENDS:
        return None
    try:
        return find_module(f"modelmill.ops.{backend}", op)
    except ModuleNotFoundError as absent:
        # a package that is not installed is no fault; a file of ours that cannot be imported is
        if (absent.name or "").startswith("modelmill"):
            raise
        return None


def specializations(op: str, backend: str) -> list[Callable[..., Any]]:
    """``specializations`` of the backend that was selected and of those behind it, where they have
    any.
    """
    names = BACKENDS[BACKENDS.index(backend) :] if backend in BACKENDS else ()
    offered = implementations(op, names)
    return [
        module.specializations for module in offered.values() if hasattr(module, "specializations")
    ]


def select_backends(
    device: str, overrides: Mapping[str, str] | None = None, tuning: Tuning | None = None
) -> Ops:
    """Select a backend of every op for ``device`` ("cpu", "cuda", "cuda:1").

    overrides: {op: backend}, backend one of torch, triton, cuda, cpu; for a fused op torch switches
    it off. tuning: launch configs chosen for this device, where an implementation takes them.
    Raises UsageError for an unknown op or a backend that does not have it or cannot run on the
    device.
    """
    overrides = dict(overrides or {})
    known = (*OPS, *FUSED_OPS)
    for op in overrides:
        if op not in known:
            hint = closest_name(op, list(known))
            raise UsageError(
                f"no op is called {op!r}"
                + (f"; did you mean {hint}?" if hint else f"; known: {', '.join(known)}")
            )
    device_type = torch.device(device).type
    picked: dict[str, Any] = {}
    backends: dict[str, str] = {}
    for op in OPS:
        preferred = (overrides[op],) if op in overrides else BACKEND_PREFERENCE[device_type]
        picked[op], backends[op] = _pick(op, preferred, device_type, tuning, forced=op in overrides)
    for op, replaced in FUSED_OPS.items():
        run = _pick_fused(
            op, {o: backends[o] for o in replaced}, device_type, overrides.get(op), tuning
        )
        backends[op] = "torch" if run is None else backends[replaced[0]]
        picked[op] = run
    return Ops(**picked, backends=backends)


def with_heartbeat(ops: Ops, on_op: Callable[[], None]) -> Ops:
    """The same ops; ``on_op`` is called after each call of one, so that who watches a long step
    sees that it goes on."""

    def after(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            on_op()
            return result

        return call

    covered: dict[str, Any] = {name: after(run) for name, run in vars(ops).items() if callable(run)}
    return replace(ops, **covered)


def _pick_fused(
    op: str,
    replaced: Mapping[str, str],
    device_type: str,
    requested: str | None,
    tuning: Tuning | None,
) -> Callable[..., Any] | None:
    """The implementation of a fused op where all that it replaces comes from its backend; None
    leaves the work to those.

    replaced: the backends of those ops. requested "torch" switches it off. Raises UsageError where
    another backend is requested and cannot serve.
    """
    if requested == "torch":
        return None
    backend = _common_backend(replaced)
    offered = implementation(op, backend or "torch")
    reason = "no such implementation" if offered is None else offered.available(device_type)
    if reason is None and offered is not None and requested in (None, backend):
        fallback = (lambda *_, **__: None) if op in _OPTIONAL_FUSED_OPS else reference(op)
        order = BACKEND_PREFERENCE[device_type]
        rest = _usable_backends(op, order[order.index(backend) + 1 :], device_type, forced=False)
        for behind in reversed(rest.values()):
            fallback = _with_fallback(behind, _with_launch_configs(op, behind, tuning), fallback)
        return _with_fallback(offered, _with_launch_configs(op, offered, tuning), fallback)
    if requested is not None:
        raise UsageError(
            f"--kernel {op}={requested} cannot be used on {device_type}: "
            "it needs the ops that it replaces from the same backend"
        )
    return None


def _common_backend(replaced: Mapping[str, str]) -> str | None:
    """The backend that the first of these ops comes from, where the others do, too, or that backend
    has none of them."""
    backend = next(iter(replaced.values()))
    others = [op for op, other in replaced.items() if other != backend]
    same = all(replaced[op] != "torch" and implementation(op, backend) is None for op in others)
    return backend if same and backend != "torch" else None


def _pick(
    op: str, preferred: tuple[str, ...], device_type: str, tuning: Tuning | None, *, forced: bool
) -> tuple[Callable[..., Any], str]:
    """The first implementation that can run, and its backend; what it does not serve goes to those
    behind it.
    """
    serve, backend = reference(op), "torch"
    behind: Callable[..., Any] | None = None
    for name, module in reversed(
        _usable_backends(op, preferred, device_type, forced=forced).items()
    ):
        run = _with_launch_configs(op, module, tuning)
        if behind is not None and getattr(module, "USES_FALLBACK", False):
            run = functools.partial(run, fallback=behind)
        serve, backend, behind = _with_fallback(module, run, serve), name, run
    return serve, backend


def _usable_backends(
    op: str, preferred: tuple[str, ...], device_type: str, *, forced: bool
) -> dict[str, ModuleType]:
    """The implementations that can run on ``device_type``, best first; behind a forced one come
    those less preferred."""
    found: dict[str, ModuleType] = {}
    for name in preferred:
        if name == "torch":
            break
        module = implementation(op, name)
        reason = "no such implementation" if module is None else module.available(device_type)
        if module is not None and reason is None:
            found[name] = module
        elif forced:
            raise UsageError(
                f"--kernel {op}={name} cannot be used on {device_type}: {reason}; "
                f"there are torch, {', '.join(implementations(op))}"
            )
    order, best = BACKEND_PREFERENCE[device_type], next(iter(found), None)
    if forced and best in order:
        found |= _usable_backends(op, order[order.index(best) + 1 :], device_type, forced=False)
    return found


def _with_launch_configs(op: str, module: ModuleType, tuning: Tuning | None) -> Callable[..., Any]:
    """``module.run`` with the launch configs that this device's tuning names."""
    run: Callable[..., Any] = module.run
    configs = None if tuning is None else filter_supported(module, tuning.configs.get(op, {}))
    return functools.partial(run, configs=configs) if configs else run


def _with_fallback(
    module: ModuleType, run: Callable[..., Any], fallback: Callable[..., Any]
) -> Callable[..., Any]:
    """``run``, and ``fallback`` where the implementation does not support the arguments."""
    supports = getattr(module, "supports", None)
    if supports is None:
        return run

    @functools.wraps(module.run)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if supports(*args, **kwargs) else fallback(*args, **kwargs)

    return choose
