"""Registry of ops: selects the backend that implements each op on a device.

The folder is the registry: an op is a file ``ops/<op>.py`` that holds a ``DECLARATION`` and a
function of the file's name, the torch reference. The reference defines what the op computes. A
backend's implementation is a file of the same name in a sub-folder of ``ops/cpu``, ``ops/triton``
or ``ops/cuda`` (attention, gemm_16bit, ...) with

* ``unavailable_reason(device_type) -> str | None``: None where it can run, else why it cannot;
* ``run(...)``: same signature and meaning as the reference; an op with many arguments takes them
  as one ``inputs`` (see ``OpDeclaration``);
* optionally ``supports(...) -> bool``: whether it can handle these arguments; calls that it does
  not support go to the next backend in order of preference, and finally to the reference;
* of an op that declares its ``problem`` optionally ``SUPPORTED_PROBLEMS``, the sizes and dtypes
  that it serves as data, and ``KERNELS``, ranges with functions where it consists of several
  kernels (``ops.kernel_support``); ``supports`` then says what depends on the operands' memory, and
  not on the number of rows;
* optionally ``warmup_sizes(...)``: arguments that reach each compiled variant of its kernels
  once, for kernels that are compiled for sizes that change between steps (``runtime.warmup``).

``select_backends`` selects once, when an engine is loaded. The result is passed in every Step and
can be printed. Weights and modules bind their ops (``ops.bound_op``): the choice among their
implementations is made once for a weight and a class of row counts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from modelmill.core.errors import UsageError
from modelmill.core.module_lookup import (
    import_module_from_subfolders,
    list_module_names,
    most_similar_name,
)
from modelmill.ops.bound_op import OpImplementation, SelectedOp, hook_all_ops, wrap_with_after_call
from modelmill.ops.declaration import OpDeclaration
from modelmill.ops.launch_configs import TunedLaunchConfigs, filter_by_candidates
from modelmill.ops.op_cost import OpCost

BACKENDS_BESIDES_TORCH = ("cuda", "triton", "cpu")
BACKEND_PREFERENCE = {"cuda": ("cuda", "triton", "torch"), "cpu": ("cpu", "torch")}


class Ops:
    """The selected callables, one attribute per op; ``backends`` names the backend of each op.

    A fused op is None where no backend implements it. One that is declared optional returns None
    for unsupported arguments; the caller then calls the ops that it replaces.
    """

    backends: Mapping[str, str]

    def __init__(self, bound: Mapping[str, Callable[..., Any] | None], backends: Mapping[str, str]):
        # attributes of the instance: a call costs one lookup, as with fields written by hand
        vars(self).update(bound, backends=backends)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("ops are bound once: make others with replace()")

    def __getattr__(self, op: str) -> Any:
        # Python asks here only for what is no attribute. Any: op files say what each op returns
        raise AttributeError(f"no op {op!r}; ops: {', '.join(self.__dict__.get('backends', ()))}")

    def replace(
        self,
        bound: Mapping[str, Callable[..., Any] | None],
        backends: Mapping[str, str] | None = None,
    ) -> Ops:
        """A copy in which the ops of ``bound`` are other callables; itself it stays as it is.

        bound: by op; None turns a fused op off. backends: None: those of this one.
        """
        own = {name: run for name, run in vars(self).items() if name != "backends"}
        for op in bound.keys() - own.keys():
            getattr(self, op)  # raises: there is no such op
        return Ops(own | dict(bound), self.backends if backends is None else backends)

    @property
    def fuses_norm_quant(self) -> bool:
        """Whether the fused norm with 8-bit output is faster than two separate ops."""
        return self.backends["add_rms_norm_quant"] != "torch"

    @property
    def fuses_silu_mul_quant(self) -> bool:
        """Whether the fused SwiGLU with 8-bit output is faster than two separate ops."""
        return self.backends["silu_mul_quant"] != "torch"


def op_declarations() -> dict[str, OpDeclaration]:
    """All ops by name, each group in order of their names: first the plain ones, then the fused."""
    found = {}
    for name in list_module_names("modelmill.ops"):
        if name in BACKENDS_BESIDES_TORCH:  # folders of implementations
            continue
        declared = getattr(import_module(f"modelmill.ops.{name}"), "DECLARATION", None)
        if declared is not None:
            found[name] = declared
    return dict(sorted(found.items(), key=lambda item: bool(item[1].fuses)))


def op_names() -> tuple[str, ...]:
    """The names of all ops, those of the fused ones last."""
    return tuple(op_declarations())


def reference(op: str) -> Callable[..., Any]:
    """The torch reference of an op."""
    return getattr(import_module(f"modelmill.ops.{op}"), op)


def count_cost(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> OpCost:
    """The bytes and operations of one call of ``op``; reads lengths and ids from the device.

    Nothing is counted where a fused op declined: the ops that it fuses do the work.
    """
    if result is None:
        return OpCost()
    declaration = op_declarations()[op]
    named = declaration.unpack_inputs(_reference_signature(op).bind(*args, **kwargs).arguments)
    return declaration.cost(named, result)


@functools.cache
def _reference_signature(op: str) -> inspect.Signature:
    return inspect.signature(reference(op))


def adapt_to_named_args(op: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` (an op's reference, ``run`` or ``supports``) taking each argument by its own name.

    So a ``Case`` has them; those that the op takes as its ``inputs`` are packed.
    """
    declaration = op_declarations()[op]
    if declaration.inputs is None:
        return call
    return lambda **args: call(**declaration.pack_named_inputs(args))


def backend_serves_args(op: str, backend: str, *args: Any, **named: Any) -> bool:
    """Whether a backend's implementation serves these arguments.

    Args:
        op: name of the op.
        backend: a backend that implements it.
        *args: arguments as the op takes them.
        **named: instead, each argument by its own name, as a ``Case`` has them.
    """
    module, declaration = implementation(op, backend), op_declarations()[op]
    assert module is not None, f"{backend} implements {op}"
    kwargs = declaration.pack_named_inputs(named) if named else {}
    if declaration.problem is None:
        return not hasattr(module, "supports") or bool(module.supports(*args, **kwargs))
    args = declaration.to_positional_args(args, kwargs)
    alone = [OpImplementation.from_backend_module(module, module.run)]
    return (
        SelectedOp(op, declaration, alone, _never_called_op).select_function(*args)
        is not _never_called_op
    )


def _never_called_op(*_: Any) -> None:
    """What an op does that no implementation serves; never called."""


def implementations(
    op: str, backends: Iterable[str] = BACKENDS_BESIDES_TORCH
) -> dict[str, ModuleType]:
    """Implementations of an op by backend; backends whose packages are missing are left out."""
    modules = {backend: implementation(op, backend) for backend in backends}
    return {backend: module for backend, module in modules.items() if module is not None}


def implementation(op: str, backend: str) -> ModuleType | None:
    """One backend's implementation of an op.

    Returns:
        The module, or None if the backend does not implement the op or needs a package that is not
        installed.
    """
    if backend not in BACKENDS_BESIDES_TORCH:
        return None
    try:
        return import_module_from_subfolders(f"modelmill.ops.{backend}", op)
    except ModuleNotFoundError as error:
        # a third-party package may be missing; a modelmill module that fails to import is a bug
        if (error.name or "").startswith("modelmill"):
            raise
        return None


def warmup_size_functions(op: str, backend: str) -> list[Callable[..., Any]]:
    """The ``warmup_sizes`` functions of the selected backend and of its fallbacks."""
    names = (
        BACKENDS_BESIDES_TORCH[BACKENDS_BESIDES_TORCH.index(backend) :]
        if backend in BACKENDS_BESIDES_TORCH
        else ()
    )
    modules = implementations(op, names)
    return [module.warmup_sizes for module in modules.values() if hasattr(module, "warmup_sizes")]


def select_backends(
    device: str,
    overrides: Mapping[str, str] | None = None,
    tuning: TunedLaunchConfigs | None = None,
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
    declared = op_declarations()
    for op in overrides:
        if op not in declared:
            hint = most_similar_name(op, list(declared))
            raise UsageError(
                f"unknown op {op!r}"
                + (f"; did you mean {hint}?" if hint else f"; known: {', '.join(declared)}")
            )
    device_type = torch.device(device).type
    selected: dict[str, Any] = {}
    backends: dict[str, str] = {}
    for op, declaration in declared.items():  # the plain ones first
        if declaration.fuses:
            replaced = {name: backends[name] for name in declaration.fuses}
            backend = _fused_op_backend(op, replaced, device_type, overrides)
            run = _select_fused_op_or_none(
                op, declaration, backend, device_type, overrides.get(op), tuning
            )
            selected[op] = run
            backends[op] = "torch" if run is None or backend is None else backend
            continue
        order = (overrides[op],) if op in overrides else BACKEND_PREFERENCE[device_type]
        usable = _usable_backends(op, order, device_type, forced=op in overrides)
        modules = list(usable.values())
        selected[op] = _chain_implementations(op, declaration, modules, reference(op), tuning)
        backends[op] = next(iter(usable), "torch")
    return Ops(selected, backends)


def with_heartbeat(ops: Ops, on_op: Callable[[], None]) -> Ops:
    """The same ops; ``on_op`` is called after each op call, as a sign of life in long steps."""
    return ops.replace(hook_all_ops(vars(ops), lambda run: wrap_with_after_call(run, on_op)))


def _select_fused_op_or_none(
    op: str,
    declaration: OpDeclaration,
    backend: str | None,
    device_type: str,
    requested: str | None,
    tuning: TunedLaunchConfigs | None,
) -> Callable[..., Any] | None:
    """Select the implementation of a fused op; None means that the replaced ops are called instead.

    Args:
        op: a fused op.
        declaration: its declaration.
        backend: that may compute it, or None.
        device_type: "cuda" or "cpu".
        requested: backend requested by the user, "torch" to disable the fused op, None for
            automatic.
        tuning: autotuned launch configs or None.

    Raises:
        UsageError: if the requested backend cannot be used.
    """
    if requested == "torch":
        return None
    module = implementation(op, backend or "torch")
    reason = "no such implementation" if module is None else module.unavailable_reason(device_type)
    if reason is None and module and backend and requested in (None, backend):
        fallback = (lambda *_, **__: None) if declaration.optional else reference(op)
        order = BACKEND_PREFERENCE[device_type]
        lower = _usable_backends(op, order[order.index(backend) + 1 :], device_type, forced=False)
        return _chain_implementations(op, declaration, [module, *lower.values()], fallback, tuning)
    if requested is not None:
        raise UsageError(
            f"--kernel {op}={requested} cannot be used on {device_type}: "
            "it needs the ops that it replaces from the same backend"
        )
    return None


def _fused_op_backend(
    op: str, replaced: Mapping[str, str], device_type: str, overrides: Mapping[str, str]
) -> str | None:
    """The backend that may compute a fused op, or None.

    The common backend of the ops that it replaces; or one that has the fused op and none of them,
    where their backends were not chosen by the user.

    Args:
        op: a fused op.
        replaced: {op: backend} of the ops that it replaces.
        device_type: "cuda" or "cpu".
        overrides: backends that the user chose, by op.
    """
    common = _common_backend_of_unfused_ops(replaced)
    if common is not None and implementation(op, common) is not None:
        return common
    for backend in BACKEND_PREFERENCE[device_type]:
        if implementation(op, backend) is not None and all(
            name not in overrides and other != "torch" and implementation(name, backend) is None
            for name, other in replaced.items()
        ):
            return backend
    return common


def _common_backend_of_unfused_ops(unfused: Mapping[str, str]) -> str | None:
    """The backend of the first of these ops, if the others have the same one.

    Another op may come from a different backend only if the common backend does not implement it.
    """
    backend = next(iter(unfused.values()))
    others = [op for op, other in unfused.items() if other != backend]
    same = all(unfused[op] != "torch" and implementation(op, backend) is None for op in others)
    return backend if same and backend != "torch" else None


def _chain_implementations(
    op: str,
    declaration: OpDeclaration,
    modules: Sequence[ModuleType],
    fallback: Callable[..., Any],
    tuning: TunedLaunchConfigs | None,
) -> Callable[..., Any]:
    """One callable of the implementations in order of preference, and of what serves the rest."""
    runs = [_with_launch_configs(op, module, tuning) for module in modules]
    if declaration.problem is not None and modules and _is_conditional(modules[0]):
        implementations = map(OpImplementation.from_backend_module, modules, runs)
        return SelectedOp(op, declaration, list(implementations), fallback)
    selected = fallback
    for module, run in zip(reversed(modules), reversed(runs), strict=True):
        selected = _with_fallback(module, run, selected)
    return selected


def _is_conditional(module: ModuleType) -> bool:
    """Whether an implementation serves some arguments only."""
    return any(hasattr(module, name) for name in ("supports", "SUPPORTED_PROBLEMS", "KERNELS"))


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
        reason = (
            "no such implementation" if module is None else module.unavailable_reason(device_type)
        )
        if module is not None and reason is None:
            usable[name] = module
        elif forced:
            others = [
                other
                for other, each in implementations(op).items()
                if each.unavailable_reason(device_type) is None
            ]
            raise UsageError(
                f"--kernel {op}={name} cannot be used on {device_type}: {reason}; "
                f"choose one of {', '.join(['torch', *others])}"
            )
    order, first = BACKEND_PREFERENCE[device_type], next(iter(usable), None)
    if forced and first in order:
        usable |= _usable_backends(op, order[order.index(first) + 1 :], device_type, forced=False)
    return usable


def _with_launch_configs(
    op: str, module: ModuleType, tuning: TunedLaunchConfigs | None
) -> Callable[..., Any]:
    """``module.run`` with this device's autotuned launch configs bound, if there are any."""
    run: Callable[..., Any] = module.run
    configs = None if tuning is None else filter_by_candidates(module, tuning.configs.get(op, {}))
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
