"""Runs modules that read no tokens, one at a time on the reference's own inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelmill.accept.error_metrics import compare_tensors
from modelmill.accept.reference.vision_reference import ReferenceNorm, ReferenceStage
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.tolerances_segmentation import encoder_formats_with_act_quant, stage_bound
from modelmill.artifact.manifest import Manifest
from modelmill.artifact.store import Artifact
from modelmill.core.model_family import read_family_options
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.nn.layer_spec import LinearSpec, layer_spec
from modelmill.nn.layer_stack import locate_module_in_stacks, vision_encoder_stacks
from modelmill.nn.linear import Linear
from modelmill.nn.vision_context import VisionContext

ACCEPTED_VERDICT = "rounding differences only"
"""The verdict where every difference is within its tolerance."""


class VisionStageCheck:
    """The engine's modules, one at a time, and their findings.

    A module computes in the engine's dtype, or in float32 where its tensors stay float32.
    """

    def __init__(
        self, model: nn.Module, vision: VisionContext, device: str, manifest: Manifest
    ) -> None:
        self.model = model
        self.vision = vision
        self.device = device
        self.dtype = manifest.build["dtype"]
        self.findings: list[ToleranceCheckResult] = []
        self._family = read_family_options(
            import_module_if_exists("modelmill.models", manifest.model_type)
        )
        self._compared: dict[str, str] = {}
        self._linears: dict[str, str] = {}
        self._declared: dict[str, str] = {}
        self._wholes: set[str] = set()
        for stack in vision_encoder_stacks(model):
            for index, layer in enumerate(model.get_submodule(stack.path).children()):
                self._collect_declared_module_names(f"{stack.path}.{index}", layer)

    def _collect_declared_module_names(self, path: str, layer: nn.Module) -> None:
        """Note what a layer's spec says about the reference."""
        spec = layer_spec(layer)
        spec.check_module_tree(layer)
        for module in spec.modules:
            if module.reference:
                names = self._linears if isinstance(module, LinearSpec) else self._declared
                names[f"{path}.{module.path}"] = module.reference[0]
        wholes = {f"{path}.{each.path}".rstrip("."): each.reference for each in spec.composites}
        self._declared |= wholes
        self._wholes |= wholes.keys()

    def contains_compared_modules(self, finding: ToleranceCheckResult) -> bool:
        """Return whether a finding is of a module that contains others that are compared."""
        return finding.name in self._wholes

    def check_declared_modules_compared(self) -> None:
        """Compare what was compared inside the layers with what their specs declare.

        Linear layers may be compared as parts of a whole only.

        Raises:
            ValueError: if they differ.
        """
        compared = set(self._compared.items())
        undeclared = compared - self._declared.items() - self._linears.items()
        wrong = {
            pair for pair in undeclared if locate_module_in_stacks(self.model, pair[0]) is not None
        }
        wrong |= self._declared.items() - compared
        if wrong:
            names = ", ".join(f"{path} as {name}" for path, name in sorted(wrong))
            raise ValueError(f"the reference and the layers' specs differ in {names}")

    def failure_for_verdict(
        self, comes_last: Callable[[ToleranceCheckResult], bool]
    ) -> ToleranceCheckResult | None:
        """Return the finding to name in the verdict: the first failure, or the eps of its norm.

        comes_last: which failures are named only if there are no others.
        """
        bad = [f for f in self.findings if not f.is_within_bound]
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
            self._compared[stage.path] = stage.module
            parts = ("",) if len(outputs) == 1 else tuple(f".{i}" for i in range(len(outputs)))
            for part, ours, expected in zip(parts, outputs, stage.expected, strict=True):
                row = compare_tensors(stage.path + part, ours, expected)
                bound = stage_bound(self._module_dtype_name(stage.path), weight_format)
                self.findings.append(
                    ToleranceCheckResult(row.name, stage.layer, stage.module + part, row, bound)
                )
        return kept

    def check_norm_eps(self, norms: Sequence[ReferenceNorm]) -> None:
        """Check every norm that the reference has used, on inputs of the size of √eps."""
        for norm in norms:
            width = len(norm.weight)
            shape = (1, width, 4, 4) if norm.channels_first else (16, width)
            x = torch.randn(shape, generator=torch.Generator().manual_seed(17)) * norm.eps**0.5
            x = x.to(self._module_dtype(norm.path)).float()
            self._compared[norm.path] = norm.module
            [ours] = self.call_module(norm.path, (x,))
            row = compare_tensors(f"{norm.path}.eps", ours, norm(x))
            bound = stage_bound(self._module_dtype_name(norm.path))
            self.findings.append(
                ToleranceCheckResult(row.name, norm.layer, f"{norm.module}.eps", row, bound)
            )

    def call_module(self, path: str, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Run a module or a method of the engine on the reference's inputs, in its own dtypes."""
        module = _get_submodule_or_method(self.model, path)
        forward = module.forward if isinstance(module, nn.Module) else module
        dtype, device = self._module_dtype(path), self.device
        args = [
            x.to(device, dtype if x.is_floating_point() else None) if isinstance(x,
            Tensor) else x for x in inputs
        ]  # fmt: skip
        # a linear layer uses only the ops of a step
        if {"vision", "step"} & set(inspect.signature(forward).parameters):
            args.append(self.vision)
        result = module(*args)
        return result if isinstance(result, tuple) else (result,)

    def _module_dtype_name(self, path: str) -> str:
        return "float32" if self._family.is_kept_in_float32(f"{path}.weight") else self.dtype

    def _module_dtype(self, path: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._module_dtype_name(path))
        return dtype

    def _act_quant_format(self, path: str) -> str:
        """Return the weight format that rounds the activations below a module, or "none"."""
        module = _get_submodule_or_method(self.model, path)
        below: list[Any] = list(module.modules()) if isinstance(module, nn.Module) else []
        formats = {module.weight.format for module in below if isinstance(module, Linear)}
        return next(iter(sorted(formats & encoder_formats_with_act_quant())), "none")


def _get_submodule_or_method(model: nn.Module, path: str) -> Any:
    module: Any = model
    for part in path.split("."):
        children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
        module = children[part] if part in children else getattr(module, part)
    return module


def make_acceptance_report(
    artifact: Artifact,
    backends: Mapping[str, str],
    first: ToleranceCheckResult | None,
    findings: Sequence[ToleranceCheckResult],
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
        "layers": [tolerance_check_to_json(f) for f in findings],
    }


def tolerance_check_to_json(finding: ToleranceCheckResult) -> dict[str, Any]:
    """Return the finding as the report's JSON object."""
    row, bound = finding.metrics, finding.bound
    numbers = {
        "max_abs": row.max_abs, "mean_abs": row.mean_abs, "median_abs": row.median_abs,
        "max_rel": row.max_rel,
        "rel_l2": row.rel_l2, "cosine": row.cosine, "gain": row.gain,
        "tolerance": finding.max_abs_tolerance,
        "tolerance_rel_l2": bound.rel_l2, "tolerance_gain": bound.gain_deviation_limit(row),
    }  # fmt: skip
    rounded = {
        name: round_significant_digits(value, 9 if name in ("cosine", "gain") else 4)
        for name, value in numbers.items()
    }
    if math.isfinite(row.output_gain_std):
        rounded["output_gain"] = round_significant_digits(row.output_gain, 9)
    return {
        "name": finding.name,
        "layer": finding.layer,
        "module": finding.module,
        **rounded,
        "ok": finding.is_within_bound,
    }


def round_significant_digits(value: Any, digits: int = 4) -> Any:
    """Round to a few digits, so that a report does not depend on the last bit.

    Infinities become text for JSON.
    """
    if isinstance(value, bool) or not isinstance(value, float):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
