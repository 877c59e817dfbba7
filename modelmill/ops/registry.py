"""Registry of ops: selects the backend that implements each op on a device.

An op is a file ``ops/<op>.py`` with a function of the same name, the torch reference. The reference
defines what the op computes. A backend's implementation is a file of the same name in ``ops/cpu``,
``ops/triton`` or ``ops/cuda`` with

* ``available(device_type) -> str | None``: None where it can run, else the reason why it cannot;
* ``run(...)``: same signature and meaning as the reference;
* optionally ``supports(...) -> bool``: whether it can handle these arguments; calls that it does
  not support go to the next backend in order of preference, and finally to the reference;
* optionally ``specializations(...)``: arguments that reach each compiled variant of its kernels
  once, for kernels that are compiled for sizes that change between steps (``runtime.warmup``);
* optionally ``USES_FALLBACK = True``: ``run`` also takes ``fallback``, the next backend's ``run``,
  for the part of the work that is faster there.

``select_backends`` selects once, when an engine is loaded. The result is passed in every Step and
can be printed.
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
# Fused ops, and the ops that each replaces. A fused op is used only if all ops that it replaces
# come from its own backend (or from another one where its backend does not implement them), so that
# a backend chosen by the user for one op is never bypassed. Ops that ``decode`` does not replace:
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
# Fused ops that return None for unsupported arguments: calling the ops that they replace is then
# faster than running the fused op's reference.
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
    """The selected callables, one per op; ``backends`` names the backend of each op.

    A fused op is None where no backend implements it. Those in ``_OPTIONAL_FUSED_OPS`` return None
    for unsupported arguments; the caller then calls the ops that they replace.
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
        """Whether the fused norm with 8-bit output is faster than two separate ops."""
        return self.backends["add_rms_norm_quant"] != "torch"

    @property
    def fuses_silu_mul_quant(self) -> bool:
        """Whether the fused SwiGLU with 8-bit output is faster than two separate ops."""
        return self.backends["silu_mul_quant"] != "torch"


def reference(op: str) -> Callable[..., Any]:
    """The torch reference of an op."""
    return getattr(import_module(f"modelmill.ops.{op}"), op)


def implementations(op: str, backends: Iterable[str] = BACKENDS) -> dict[str, ModuleType]:
    """Implementations of an op by backend; backends whose packages are missing are left out."""
    modules = {backend: implementation(op, backend) for backend in backends}
    return {backend: module for backend, module in modules.items() if module is not None}


def implementation(op: str, backend: str) -> ModuleType | None:
    """One backend's implementation of an op.

    Returns:
        The module, or None if the backend does not implement the op or needs a package that is not
        installed.
    """
    if backend not in BACKENDS:
        return None
    try:
        return find_module(f"modelmill.ops.{backend}", op)
    except ModuleNotFoundError as error:
        # a third-party package may be missing; a modelmill module that fails to import is a bug
        if (error.name or "").startswith("modelmill"):
            raise
        return None


def specializations(op: str, backend: str) -> list[Callable[..., Any]]:
    """The ``specializations`` functions of the selected backend and of its fallbacks."""
    names = BACKENDS[BACKENDS.index(backend) :] if backend in BACKENDS else ()
    modules = implementations(op, names)
    return [
        module.specializations for module in modules.values() if hasattr(module, "specializations")
    ]


def select_backends(
    device: str, overrides: Mapping[str, str] | None = None, tuning: Tuning | None = None
) -> Ops:
    """Select a backend of every op for a device.

    Args:
        device: "cpu", "cuda" or "cuda:1".
        overrides: {op: backend}, backend one of torch, triton, cuda, cpu; "torch" disables a fused
            op.
        tuning: autotuned launch configs for this device, for implementations that take them.

    Raises:
        UsageError: if an op is unknown, or its backend does not implement it or cannot run on the
            device.
    """
    overrides = dict(overrides or {})
    known = (*OPS, *FUSED_OPS)
    for op in overrides:
        if op not in known:
            hint = closest_name(op, list(known))
            raise UsageError(
                f"unknown op {op!r}"
                + (f"; did you mean {hint}?" if hint else f"; known: {', '.join(known)}")
            )
    device_type = torch.device(device).type
    selected: dict[str, Any] = {}
    backends: dict[str, str] = {}
    for op in OPS:
        order = (overrides[op],) if op in overrides else BACKEND_PREFERENCE[device_type]
        selected[op], backends[op] = _pick(op, order, device_type, tuning, forced=op in overrides)
    for op, replaced in FUSED_OPS.items():
        run = _pick_fused(
            op, {o: backends[o] for o in replaced}, device_type, overrides.get(op), tuning
        )
        backends[op] = "torch" if run is None else backends[replaced[0]]
        selected[op] = run
    return Ops(**selected, backends=backends)


def with_heartbeat(ops: Ops, on_op: Callable[[], None]) -> Ops:
    """The same ops; ``on_op`` is called after each op call, as a sign of life in long steps."""

    def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            on_op()
            return result

        return call

    wrapped: dict[str, Any] = {name: wrap(run) for name, run in vars(ops).items() if callable(run)}
    return replace(ops, **wrapped)


def _pick_fused(
    op: str,
    replaced: Mapping[str, str],
    device_type: str,
    requested: str | None,
    tuning: Tuning | None,
) -> Callable[..., Any] | None:
    """Select the implementation of a fused op; None means that the replaced ops are called instead.

    Args:
        op: a fused op.
        replaced: {op: backend} of the ops that it replaces; all must come from its backend.
        device_type: "cuda" or "cpu".
        requested: backend requested by the user, "torch" to disable the fused op, None for
            automatic.
        tuning: autotuned launch configs or None.

    Raises:
        UsageError: if the requested backend cannot be used.
    """
    if requested == "torch":
        return None
    backend = _common_backend(replaced)
    module = implementation(op, backend or "torch")
    reason = "no such implementation" if module is None else module.available(device_type)
    if reason is None and module is not None and requested in (None, backend):
        fallback = (lambda *_, **__: None) if op in _OPTIONAL_FUSED_OPS else reference(op)
        order = BACKEND_PREFERENCE[device_type]
        usable = _usable_backends(op, order[order.index(backend) + 1 :], device_type, forced=False)
        for lower in reversed(usable.values()):
            fallback = _with_fallback(lower, _with_launch_configs(op, lower, tuning), fallback)
        return _with_fallback(module, _with_launch_configs(op, module, tuning), fallback)
    if requested is not None:
        raise UsageError(
            f"--kernel {op}={requested} cannot be used on {device_type}: "
            "it needs the ops that it replaces from the same backend"
        )
    return None


def _common_backend(replaced: Mapping[str, str]) -> str | None:
    """The backend of the first of these ops, if the others have the same one.

    Another op may come from a different backend only if the common backend does not implement it.
    """
    backend = next(iter(replaced.values()))
    others = [op for op, other in replaced.items() if other != backend]
    same = all(replaced[op] != "torch" and implementation(op, backend) is None for op in others)
    return backend if same and backend != "torch" else None


def _pick(
    op: str, preferred: tuple[str, ...], device_type: str, tuning: Tuning | None, *, forced: bool
) -> tuple[Callable[..., Any], str]:
    """Select the first implementation that can run.

    Returns:
        (callable, backend); unsupported arguments go to the lower-preference implementations.
    """
    selected, backend = reference(op), "torch"
    lower: Callable[..., Any] | None = None
    for name, module in reversed(
        _usable_backends(op, preferred, device_type, forced=forced).items()
    ):
        run = _with_launch_configs(op, module, tuning)
        if lower is not None and getattr(module, "USES_FALLBACK", False):
            run = functools.partial(run, fallback=lower)
        selected, backend, lower = _with_fallback(module, run, selected), name, run
    return selected, backend


def _usable_backends(
    op: str, preferred: tuple[str, ...], device_type: str, *, forced: bool
) -> dict[str, ModuleType]:
    """The implementations that can run on ``device_type``, in order of preference.

    A forced backend is followed by the backends of lower preference.
    """
    usable: dict[str, ModuleType] = {}
    for name in preferred:
        if name == "torch":
            break
        module = implementation(op, name)
        reason = "no such implementation" if module is None else module.available(device_type)
        if module is not None and reason is None:
            usable[name] = module
        elif forced:
            raise UsageError(
                f"--kernel {op}={name} cannot be used on {device_type}: {reason}; "
                f"choose one of torch, {', '.join(implementations(op))}"
            )
    order, first = BACKEND_PREFERENCE[device_type], next(iter(usable), None)
    if forced and first in order:
        usable |= _usable_backends(op, order[order.index(first) + 1 :], device_type, forced=False)
    return usable


def _with_launch_configs(op: str, module: ModuleType, tuning: Tuning | None) -> Callable[..., Any]:
    """``module.run`` with this device's autotuned launch configs bound, if there are any."""
    run: Callable[..., Any] = module.run
    configs = None if tuning is None else filter_supported(module, tuning.configs.get(op, {}))
    return functools.partial(run, configs=configs) if configs else run


def _with_fallback(
    module: ModuleType, run: Callable[..., Any], fallback: Callable[..., Any]
) -> Callable[..., Any]:
    """``run`` where the implementation supports the arguments, else ``fallback``."""
    supports = getattr(module, "supports", None)
    if supports is None:
        return run

    @functools.wraps(module.run)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if supports(*args, **kwargs) else fallback(*args, **kwargs)

    return choose
