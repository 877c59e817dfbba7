"""Faults planted in our own build path, one at a time: what a wrong model file or a wrong packer
would do.

Each is a patch of modelmill's code, active while the engine is built and while it runs; the
reference of the
acceptance contract reads the checkpoint without that code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.builder import tensor_plan
from modelmill.checkpoint.rename import Rule
from modelmill.core.model_family import checkpoint_tensor_rules
from modelmill.core.module_lookup import import_module_if_exists
from tests.accept.build_and_accept import build_and_accept


@dataclass(frozen=True)
class Fault:
    """name; the layer and the modules one of which must be named; needs_square: only where o_proj
    is square.
    """

    name: str
    layer: int
    modules: tuple[str, ...]
    plant: Callable[[ModuleType], contextlib.AbstractContextManager[Any]]
    needs_square: bool = False


@contextlib.contextmanager
def page_lost_before_decoding() -> Iterator[None]:
    """Each sequence's first page of the prompt is forgotten before its tokens are decoded."""
    real_decode = TeacherForcedScorer._decode

    def late(self: Any, seqs: Any, *more: Any) -> None:
        for seq in seqs:
            for cache in self.runner.kv.k:
                cache[seq.pages[0]] = 0
        real_decode(self, seqs, *more)

    with mock.patch.object(TeacherForcedScorer, "_decode", late):
        yield


# Where a fault sits in one layer only, so that the layer that is named tells something.
LAYER = 1


@contextlib.contextmanager
def plant_fault(fault: Fault, model_type: str) -> Iterator[None]:
    """The fault is in our code for the length of the block."""
    family = import_module_if_exists("modelmill.models", model_type)
    assert family is not None
    with fault.plant(family):
        yield


def faults(model_type: str, *, layer: int = LAYER) -> list[Fault]:
    """The faults that this family can have, those of one layer in ``layer``."""
    gpt2, qwen = model_type == "gpt2", model_type == "qwen"
    block = f"layers.{layer}"
    planted = [
        Fault("the two norms renamed", layer, ("attn_norm",), _rules(_norms_swapped(block))),
        Fault(
            "o_proj x 1.05", layer, ("attn.o_proj",), _scaled(f"{block}.attn.o_proj.weight", 1.05)
        ),
        Fault("eps x 10", 0, ("attn_norm.eps",), _config(lambda c: replace(c, eps=c.eps * 10))),
        Fault("eps / 10", 0, ("attn_norm.eps",), _config(lambda c: replace(c, eps=c.eps / 10))),
        Fault(
            "o_proj transposed",
            layer,
            ("attn.o_proj",),
            _rules(_transpose_rule(f"{block}.attn.o_proj.weight")),
            True,
        ),
    ]
    if not gpt2:
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        planted += [
            Fault(
                "RoPE base x 2",
                0,
                ("attn.rope_cache.q", "attn.rope_cache.k"),
                _config(lambda c: _based(c, 2.0)),
            ),
            Fault(
                "RoPE base / 10",
                0,
                ("attn.rope_cache.q", "attn.rope_cache.k"),
                _config(lambda c: _based(c, 0.1)),
            ),
            Fault(
                "w1 and w2 swapped" if qwen else "gate and up swapped",
                layer,
                gate_up,
                _rules(_reordered(f"{block}.mlp.gate_up_proj.weight", (1, 0))),
            ),
        ]
    if not gpt2 and not qwen:
        planted.append(
            Fault(
                "k renamed v",
                layer,
                ("attn.k_proj", "attn.v_proj"),
                _rules(_reordered(f"{block}.attn.qkv_proj.weight", (0, 2, 1))),
            )
        )
    return planted


def find_fault(family: str, name: str) -> Fault:
    """The fault of that name."""
    return next(fault for fault in faults(family) if fault.name == name)


def assert_names(report: Mapping[str, Any], fault: Fault) -> None:
    """Check that a report of refusal names the fault's layer and module."""
    assert report["layer"] == fault.layer, report["reason"]
    assert report["module"] in fault.modules, report["reason"]


def check_fault_is_named(
    family: str, name: str, checkpoint: Path, out: Path, setting: tuple[str, str, dict[str, Any]]
) -> None:
    """Build with the fault: the engine is refused and the fault named.

    setting: dtype, recipe and further options.
    """
    fault = find_fault(family, name)
    dtype, recipe, options = setting
    with plant_fault(fault, family):
        report, written = build_and_accept(checkpoint, out, dtype, recipe, **options)
    assert not written, f"{dtype} {recipe} {options}"
    assert_names(report, fault)


def _rules(change: Callable[[list[Rule]], list[Rule]]) -> Callable[[ModuleType], Any]:
    """A patch of the family's rename rules."""

    def plant(family: ModuleType) -> Any:
        real_rules = checkpoint_tensor_rules(family).rules
        return mock.patch.object(
            family, "rename_rules", lambda config: change(real_rules(config)), create=True
        )

    return plant


def _config(change: Callable[[Any], Any]) -> Callable[[ModuleType], Any]:
    """A patch of how the family reads its config."""

    def plant(family: ModuleType) -> Any:
        real_config = family.config_from_hf
        return mock.patch.object(family, "config_from_hf", lambda raw: change(real_config(raw)))

    return plant


def _scaled(target: str, factor: float) -> Callable[[ModuleType], Any]:
    """A patch of the builder: one tensor comes out multiplied."""
    return lambda _: change_tensor(target, lambda tensor: tensor * factor)


def change_tensor(
    target: str, change: Callable[[Tensor], Tensor]
) -> contextlib.AbstractContextManager[Any]:
    """A patch of the builder: one tensor comes out as something else."""
    real_apply = tensor_plan.apply_rule

    def apply(resolved: Any, *more: Any) -> Any:
        tensor = real_apply(resolved, *more)
        return change(tensor) if resolved.target == target else tensor

    return mock.patch.object(tensor_plan, "apply_rule", apply)


def _based(config: Any, factor: float) -> Any:
    return replace(config, rope=replace(config.rope, base=config.rope.base * factor))


def _reordered(target: str, order: tuple[int, ...]) -> Callable[[list[Rule]], list[Rule]]:
    def change(rules: list[Rule]) -> list[Rule]:
        return [
            replace(r, sources=tuple(r.sources[i] for i in order)) if r.target == target else r
            for r in rules
        ]

    return change


def _norms_swapped(block: str) -> Callable[[list[Rule]], list[Rule]]:
    other = {"attn_norm": "mlp_norm", "mlp_norm": "attn_norm"}

    def change(rules: list[Rule]) -> list[Rule]:
        out = []
        for rule in rules:
            stem, _, suffix = rule.target.rpartition(".")
            where, _, norm = stem.rpartition(".")
            swapped = where == block and norm in other
            out.append(replace(rule, target=f"{where}.{other[norm]}.{suffix}") if swapped else rule)
        return out

    return change


def _transpose_rule(target: str) -> Callable[[list[Rule]], list[Rule]]:
    """Stored rows become columns: "transpose" where there was "copy", and the other way round
    (GPT-2).
    """

    def change(rules: list[Rule]) -> list[Rule]:
        flip = {"copy": "transpose", "transpose": "copy"}
        return [replace(r, how=flip[r.how]) if r.target == target else r for r in rules]

    return change


FAULTS = [(family, fault.name) for family in ("llama", "gpt2", "qwen") for fault in faults(family)]
"""Every fault: (family, name)."""
