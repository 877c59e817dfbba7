"""Runs modules that read no tokens, one at a time on the reference's own inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelmill.accept.finding import Finding
from modelmill.accept.metrics import compare_tensors
from modelmill.accept.reference.stage import ReferenceNorm, ReferenceStage
from modelmill.accept.tolerances_segmentation import ACT_QUANT_STAGE_BOUNDS, stage_bound
from modelmill.artifact.store import Artifact
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext


class StageCheck:
    """The engine's modules, one at a time, and their findings.

    uses_engine_dtype: returns whether a module computes in the engine's dtype; the others use
    float32.
    """

    def __init__(
        self,
        model: nn.Module,
        vision: VisionContext,
        device: str,
        dtype: str,
        uses_engine_dtype: Callable[[str], bool],
    ) -> None:
        self.model = model
        self.vision = vision
        self.device = device
        self.dtype = dtype
        self._uses_engine_dtype = uses_engine_dtype
        self.findings: list[Finding] = []

    def first_failure(self, comes_last: Callable[[Finding], bool]) -> Finding | None:
        """Return the finding to name in the verdict: the first failure, or the eps of its norm.

        comes_last: which failures are named only if there are no others.
        """
        bad = [f for f in self.findings if not f.ok]
        first = min(bad, key=lambda f: (comes_last(f), self.findings.index(f)), default=None)
        eps = next((f for f in bad if first is not None and f.name == f"{first.name}.eps"), None)
        return eps or first

    def check_stages(self, stages: Iterable[ReferenceStage], num_outputs: int = 1) -> list[Tensor]:
        """Compare each stage; return the reference's last outputs.

        They are one per stage, or several of the last.
        """
        kept: list[Tensor] = []
        for stage in stages:
            outputs, weight_format = (
                self.call_module(stage.path, stage.inputs),
                self._act_quant_format(stage.path),
            )
            kept = [*kept, *stage.expected][-num_outputs:]
            parts = ("",) if len(outputs) == 1 else tuple(f".{i}" for i in range(len(outputs)))
            for part, ours, expected in zip(parts, outputs, stage.expected, strict=True):
                self._add_finding(
                    stage.path + part,
                    stage.layer,
                    stage.module + part,
                    ours,
                    expected,
                    weight_format,
                )
        return kept

    def check_norms(self, norms: Sequence[ReferenceNorm]) -> None:
        """Check every norm that the reference has used, on inputs of the size of √eps."""
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
        """Run a module or a method of the engine on the reference's inputs, in its own dtypes."""
        module = _get_submodule(self.model, path)
        forward = module.forward if isinstance(module, nn.Module) else module
        dtype, device = self._dtype_for(path), self.device
        args = [
            x.to(device, dtype if x.is_floating_point() else None) if isinstance(x,
            Tensor) else x for x in inputs
        ]  # fmt: skip
        # a linear layer uses only the ops of a step
        if {"vision", "step"} & set(inspect.signature(forward).parameters):
            args.append(self.vision)
        result = module(*args)
        return result if isinstance(result, tuple) else (result,)

    def _dtype_for(self, path: str) -> torch.dtype:
        return getattr(torch, self.dtype) if self._uses_engine_dtype(path) else torch.float32

    def _act_quant_format(self, path: str) -> str:
        """Return the weight format that rounds the activations below a module, or "none"."""
        module = _get_submodule(self.model, path)
        below: list[Any] = list(module.modules()) if isinstance(module, nn.Module) else []
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
    module: Any = model
    for part in path.split("."):
        children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
        module = children[part] if part in children else getattr(module, part)
    return module


def make_report(
    artifact: Artifact,
    backends: Mapping[str, str],
    first: Finding | None,
    findings: Sequence[Finding],
    *,
    verdict: str,
    reason: str,
    whole_ok: bool,
    whole: Mapping[str, Any],
) -> dict[str, Any]:
    """Make the acceptance report of an engine.

    Args:
        artifact: The engine.
        backends: By op.
        first: The finding that the verdict names.
        findings: All findings.
        verdict: What is wrong.
        reason: The same with its figures and what to do.
        whole_ok: Whether the checks of the whole model passed.
        whole: Their results, by the report's keys.
    """
    build = artifact.manifest.build
    return {
        "accepted": first is None and whole_ok,
        "verdict": verdict,
        "reason": reason,
        "layer": None if first is None else first.layer,
        "module": None if first is None else first.module,
        "dtype": build["dtype"],
        "quantization": build["quantization"],
        "kernels": dict(backends),
        "bytes": artifact.nbytes(),
        **whole,
        "layers": [finding_to_json(f) for f in findings],
    }


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """Return the finding as the report's JSON object."""
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
    """Round to a few digits, so that a report does not depend on the last bit.

    Infinities become text for JSON.
    """
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
