"""The shelf of ops: which variant of each op serves a device.

An op is a file ``ops/<op>.py`` with a function of its own name, the torch reference: it defines what the op
computes. A faster variant is a file of the same name in ``ops/cpu``, ``ops/triton`` or ``ops/cuda`` with

* ``available(device) -> str | None``: None where it can run, else the reason why it cannot;
* ``run(...)``: the same signature and meaning as the reference;
* optionally ``supports(...) -> bool``: whether these arguments are served; the next variant in the order of preference
  serves the others, at last the reference;
* optionally ``forms(...)``: arguments with which each of its kernels is met once, where kernels are compiled for sizes
  that change from step to step (``runtime.warm``);
* optionally ``SHARES = True``: ``run`` also takes ``rest``, the next variant's ``run``, for the part of the work that
  this one serves better.

``resolve`` picks once, at load; the result is passed in every Step and can be printed.
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
from modelmill.core.find import find, nearest
from modelmill.ops.tuning import Tuning, accepted

OPS = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_quant",
    "add_rms_norm_quant",
    "quantize",
    "layer_norm",
    "add_layer_norm",
    "add_layer_norm_quant",
    "rotation",
    "rope_cache",
    "paged_attention",
    "silu_mul",
    "silu_mul_quant",
    "gelu_tanh",
    "gelu",
    "gelu_quant",
    "gelu_linear",
    "linear",
    "int8_linear",
    "int4_linear",
    "int8_group_linear",
    "cluster_quant",
    "clustered_linear",
    "w8a8_linear",
    "fp8_linear",
    "argmax",
    "sample",
    "image_attention",
    "enlarge",
)
# Ops that compute what others do one after another, and those others. Used only where a variant exists and everything
# that it spans comes from the same shelf (or from another where that shelf has none of it), so that a kernel switched
# by hand is never bypassed. What decode does not do:
_ALONE = (
    *("rms_norm_quant", "add_rms_norm_quant", "silu_mul_quant", "quantize", "w8a8_linear", "fp8_linear"),
    *("cluster_quant", "clustered_linear", "argmax", "sample", "image_attention", "enlarge"),
    *("add_layer_norm", "add_layer_norm_quant", "gelu", "gelu_quant", "gelu_linear", "rotation"),
)
SPANS = {
    "decode": tuple(op for op in OPS if op not in _ALONE),
    "gated_linear": ("linear", "silu_mul"),
    "gated_int8_linear": ("int8_linear", "silu_mul"),
    "gated_int4_linear": ("int4_linear", "silu_mul"),
    "gated8_linear": ("w8a8_linear", "silu_mul"),
    "add_linear": ("linear", "add_rms_norm"),
    "rope_linear": ("linear", "rope_cache"),
}
# Spanning ops that give None for arguments that they do not serve: the ops that they span are faster than a reference.
_PARTIAL = ("gated_int8_linear", "gated_int4_linear", "gated8_linear", "add_linear", "rope_linear")
SHELVES = ("cuda", "triton", "cpu")
PREFERENCE = {"cuda": ("cuda", "triton", "torch"), "cpu": ("cpu", "torch")}


@dataclass(frozen=True)
class Ops:
    """The chosen callables, one per op; ``chosen`` names each variant for printing.

    decode, …_linear: None where no variant spans their ops. Those in ``_PARTIAL`` give None for arguments that they
    leave to those.
    """

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rms_norm_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    add_rms_norm_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
    quantize: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    layer_norm: Callable[..., torch.Tensor]
    add_layer_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    add_layer_norm_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
    rotation: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    rope_cache: Callable[..., torch.Tensor]
    paged_attention: Callable[..., torch.Tensor]
    silu_mul: Callable[..., torch.Tensor]
    silu_mul_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    gelu_tanh: Callable[..., torch.Tensor]
    gelu: Callable[..., torch.Tensor]
    gelu_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    gelu_linear: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]
    int8_linear: Callable[..., torch.Tensor]
    int4_linear: Callable[..., torch.Tensor]
    int8_group_linear: Callable[..., torch.Tensor]
    cluster_quant: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    clustered_linear: Callable[..., torch.Tensor]
    w8a8_linear: Callable[..., torch.Tensor]
    fp8_linear: Callable[..., torch.Tensor]
    argmax: Callable[..., torch.Tensor]
    sample: Callable[..., torch.Tensor]
    image_attention: Callable[..., torch.Tensor]
    enlarge: Callable[..., tuple[Any, torch.Tensor, torch.Tensor, Any]]
    chosen: Mapping[str, str]
    decode: Callable[..., torch.Tensor] | None = None
    gated_linear: Callable[..., torch.Tensor] | None = None
    gated_int8_linear: Callable[..., torch.Tensor | None] | None = None
    gated_int4_linear: Callable[..., torch.Tensor | None] | None = None
    gated8_linear: Callable[..., torch.Tensor | None] | None = None
    add_linear: Callable[..., torch.Tensor | None] | None = None
    rope_linear: Callable[..., torch.Tensor | None] | None = None

    @property
    def norms_quantize(self) -> bool:
        """Whether a norm that puts out 8 bits is faster than the two ops, one after the other."""
        return self.chosen["add_rms_norm_quant"] != "torch"

    @property
    def gates_quantize(self) -> bool:
        """The same of SwiGLU's gate."""
        return self.chosen["silu_mul_quant"] != "torch"


def reference(op: str) -> Callable[..., Any]:
    """The torch reference of an op."""
    return getattr(import_module(f"modelmill.ops.{op}"), op)


def variants(op: str, shelves: Iterable[str] = SHELVES) -> dict[str, ModuleType]:
    """Faster variants of an op, by shelf name; those whose packages are absent are left out."""
    found = {shelf: variant(op, shelf) for shelf in shelves}
    return {shelf: module for shelf, module in found.items() if module is not None}


def variant(op: str, shelf: str) -> ModuleType | None:
    """One shelf's variant of an op; None where it has none, or where a package that it needs is absent."""
    if shelf not in SHELVES:
        return None
    try:
        return find(f"modelmill.ops.{shelf}", op)
    except ModuleNotFoundError as absent:
        # a package that is not installed is no fault; a file of ours that cannot be imported is
        if (absent.name or "").startswith("modelmill"):
            raise
        return None


def forms(op: str, chosen: str) -> list[Callable[..., Any]]:
    """``forms`` of the variant that was chosen and of those behind it, where they have any."""
    names = SHELVES[SHELVES.index(chosen) :] if chosen in SHELVES else ()
    offered = variants(op, names)
    return [module.forms for module in offered.values() if hasattr(module, "forms")]


def resolve(device: str, overrides: Mapping[str, str] | None = None, tuning: Tuning | None = None) -> Ops:
    """Pick a variant of every op for ``device`` ("cpu", "cuda", "cuda:1").

    overrides: {op: variant}, variant one of torch, triton, cuda, cpu; for a spanning op torch switches it off. tuning:
    launch sizes chosen for this device, where a variant takes them. Raises UsageError for an unknown op or a variant
    that does not exist or cannot run on the device.
    """
    overrides = dict(overrides or {})
    known = (*OPS, *SPANS)
    for op in overrides:
        if op not in known:
            hint = nearest(op, list(known))
            raise UsageError(
                f"no op is called {op!r}" + (f"; did you mean {hint}?" if hint else f"; known: {', '.join(known)}")
            )
    kind = torch.device(device).type
    picked: dict[str, Any] = {}
    chosen: dict[str, str] = {}
    for op in OPS:
        wanted = (overrides[op],) if op in overrides else PREFERENCE[kind]
        picked[op], chosen[op] = _pick(op, wanted, kind, tuning, forced=op in overrides)
    for op, spanned in SPANS.items():
        found = _pick_span(op, {o: chosen[o] for o in spanned}, kind, overrides.get(op), tuning)
        chosen[op] = "torch" if found is None else chosen[spanned[0]]
        picked[op] = found
    return Ops(**picked, chosen=chosen)


def beating(ops: Ops, beat: Callable[[], None]) -> Ops:
    """The same ops; ``beat`` is called after each call of one, so that who watches a long step sees that it goes on."""

    def after(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = run(*args, **kwargs)
            beat()
            return result

        return call

    covered: dict[str, Any] = {name: after(run) for name, run in vars(ops).items() if callable(run)}
    return replace(ops, **covered)


def _pick_span(
    op: str, spanned: Mapping[str, str], kind: str, wanted: str | None, tuning: Tuning | None
) -> Callable[..., Any] | None:
    """The variant of a spanning op where all that it spans comes from its shelf; None leaves the work to those ops.

    spanned: the variants of those. wanted "torch" switches it off. Raises UsageError where another shelf is wanted and
    cannot serve.
    """
    if wanted == "torch":
        return None
    shelf = _shelf_of(spanned)
    offered = variant(op, shelf or "torch")
    reason = "no such variant" if offered is None else offered.available(kind)
    if reason is None and offered is not None and wanted in (None, shelf):
        plain = (lambda *_, **__: None) if op in _PARTIAL else reference(op)
        order = PREFERENCE[kind]
        for behind in reversed(_usable(op, order[order.index(shelf) + 1 :], kind, forced=False).values()):
            plain = _guarded(behind, _tuned(op, behind, tuning), plain)
        return _guarded(offered, _tuned(op, offered, tuning), plain)
    if wanted is not None:
        raise UsageError(f"--kernel {op}={wanted} cannot be used on {kind}: it needs what it spans from the same shelf")
    return None


def _shelf_of(spanned: Mapping[str, str]) -> str | None:
    """The shelf that the first of these ops comes from, where the others do, too, or that shelf has none of them."""
    shelf = next(iter(spanned.values()))
    strays = [op for op, chosen in spanned.items() if chosen != shelf]
    same = all(spanned[op] != "torch" and variant(op, shelf) is None for op in strays)
    return shelf if same and shelf != "torch" else None


def _pick(
    op: str, wanted: tuple[str, ...], kind: str, tuning: Tuning | None, *, forced: bool
) -> tuple[Callable[..., Any], str]:
    """The first variant that can run, and its name; what it does not serve goes to those behind it."""
    serve, chosen = reference(op), "torch"
    behind: Callable[..., Any] | None = None
    for name, module in reversed(_usable(op, wanted, kind, forced=forced).items()):
        run = _tuned(op, module, tuning)
        if behind is not None and getattr(module, "SHARES", False):
            run = functools.partial(run, rest=behind)
        serve, chosen, behind = _guarded(module, run, serve), name, run
    return serve, chosen


def _usable(op: str, wanted: tuple[str, ...], kind: str, *, forced: bool) -> dict[str, ModuleType]:
    """The variants that can run on ``kind``, best first; behind a forced one come those less preferred."""
    found: dict[str, ModuleType] = {}
    for name in wanted:
        if name == "torch":
            break
        module = variant(op, name)
        reason = "no such variant" if module is None else module.available(kind)
        if module is not None and reason is None:
            found[name] = module
        elif forced:
            raise UsageError(
                f"--kernel {op}={name} cannot be used on {kind}: {reason}; there are torch, {', '.join(variants(op))}"
            )
    order, best = PREFERENCE[kind], next(iter(found), None)
    if forced and best in order:
        found |= _usable(op, order[order.index(best) + 1 :], kind, forced=False)
    return found


def _tuned(op: str, module: ModuleType, tuning: Tuning | None) -> Callable[..., Any]:
    """``module.run`` with the launch sizes that this device's tuning names."""
    run: Callable[..., Any] = module.run
    chosen = None if tuning is None else accepted(module, tuning.choices.get(op, {}))
    return functools.partial(run, chosen=chosen) if chosen else run


def _guarded(module: ModuleType, run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, and ``plain`` where the variant does not support the arguments."""
    supports = getattr(module, "supports", None)
    if supports is None:
        return run

    @functools.wraps(module.run)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if supports(*args, **kwargs) else plain(*args, **kwargs)

    return choose
