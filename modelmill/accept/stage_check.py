"""Modules that read no tokens, one at a time on the reference's own inputs, so that a fault names
itself.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelmill.accept.finding import Finding
from modelmill.accept.metrics import compare_tensors
from modelmill.accept.reference.stage import ReferenceNorm, ReferenceStage
from modelmill.accept.tolerances_segmentation import ACT_QUANT_STAGE_BOUNDS, stage_bound
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext


class StageCheck:
    """The engine's modules, one at a time, and what was found.

    uses_engine_dtype: which modules compute in the engine's dtype; the others do in float32.
    """

    def __init__(
        self,
        model: nn.Module,
        vision: VisionContext,
        device: str,
        dtype: str,
        uses_engine_dtype: Callable[[str], bool],
    ) -> None:
        self.model, self.vision, self.device, self.dtype = model, vision, device, dtype
        self._uses_engine_dtype = uses_engine_dtype
        self.findings: list[Finding] = []

    def check_stages(self, stages: Iterable[ReferenceStage], num_outputs: int = 1) -> list[Tensor]:
        """Compare each; returns the reference's last outputs, one a stage or several of the
        last.
        """
        kept: list[Tensor] = []
        for stage in stages:
            outputs, kind = (
                self.call_module(stage.path, stage.inputs),
                self._act_quant_format(stage.path),
            )
            kept = [*kept, *stage.expected][-num_outputs:]
            parts = ("",) if len(outputs) == 1 else tuple(f".{i}" for i in range(len(outputs)))
            for part, ours, expected in zip(parts, outputs, stage.expected, strict=True):
                self._add_finding(
                    stage.path + part, stage.layer, stage.module + part, ours, expected, kind
                )
        return kept

    def check_norms(self, norms: Sequence[ReferenceNorm]) -> None:
        """Every norm that the reference has used, on inputs of the size of √eps."""
        for norm in norms:
            width = len(norm.weight)
            shape = (1, width, 4, 4) if norm.channels_first else (16, width)
            x = torch.randn(shape, generator=torch.Generator().manual_seed(17)) * norm.eps**0.5
            x = x.to(self._dtype_for(norm.path)).float()
            self._add_finding(
                f"{norm.path}.eps",
                norm.layer,
                f"{norm.module}.eps",
                self.call_module(norm.path, (x,))[0],
                norm(x),
            )

    def call_module(self, path: str, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """A module or a method of the engine on the reference's inputs, in the engine's types."""
        found = _get_submodule(self.model, path)
        forward = found.forward if isinstance(found, nn.Module) else found
        dtype, device = self._dtype_for(path), self.device
        args = [
            x.to(device, dtype if x.is_floating_point() else None) if isinstance(x,
            Tensor) else x for x in inputs
        ]  # fmt: skip
        # a linear layer asks a step for its ops and nothing else
        if {"vision", "step"} & set(inspect.signature(forward).parameters):
            args.append(self.vision)
        result = found(*args)
        return result if isinstance(result, tuple) else (result,)

    def _dtype_for(self, path: str) -> torch.dtype:
        return getattr(torch, self.dtype) if self._uses_engine_dtype(path) else torch.float32

    def _act_quant_format(self, path: str) -> str:
        """How the matrices below a module round its activations: "none", or the kind of weight that
        does.
        """
        found = _get_submodule(self.model, path)
        below: list[Any] = list(found.modules()) if isinstance(found, nn.Module) else []
        formats = {module.weight.format for module in below if isinstance(module, Linear)}
        return next(iter(sorted(formats & set(ACT_QUANT_STAGE_BOUNDS))), "none")

    def _add_finding(
        self,
        name: str,
        layer: int | None,
        module: str,
        ours: Tensor,
        expected: Tensor,
        weight_format: str = "none",
    ) -> None:
        dtype = self.dtype if self._uses_engine_dtype(name) else "float32"
        row = compare_tensors(name, ours, expected)
        self.findings.append(Finding(name, layer, module, row, stage_bound(dtype, weight_format)))


def _get_submodule(model: nn.Module, path: str) -> Any:
    found: Any = model
    for part in path.split("."):
        children = dict(found.named_children()) if isinstance(found, nn.Module) else {}
        found = children[part] if part in children else getattr(found, part)
    return found


def finding_to_json(finding: Finding) -> dict[str, Any]:
    row, bound = finding.metrics, finding.bound
    numbers = {
        "max_abs": row.max_abs, "mean_abs": row.mean_abs, "median_abs": row.median_abs,
        "max_rel": row.max_rel,
        "rel_l2": row.rel_l2, "cosine": row.cosine, "gain": row.gain,
        "tolerance": finding.max_abs_tolerance,
        "tolerance_rel_l2": bound.rel_l2, "tolerance_gain": bound.gain,
    }  # fmt: skip
    rounded = {
        name: round_digits(value, 9 if name in ("cosine", "gain") else 4)
        for name, value in numbers.items()
    }
    return {
        "name": finding.name,
        "layer": finding.layer,
        "module": finding.module,
        **rounded,
        "ok": finding.ok,
    }


def round_digits(value: Any, digits: int = 4) -> Any:
    """Numbers to a few digits, so that a report does not depend on the last bit; infinities as text
    for JSON.
    """
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
