"""Decides a build: resolves every "auto", accounts for every tensor and computes the memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

import modelmill
from modelmill.artifact.manifest import PACKING
from modelmill.builder import memory_plan
from modelmill.builder.auto_precision import AUTO, AutoPrecisionResult, resolve_auto_precision
from modelmill.builder.calibration_data import CalibrationSource, find_calibration
from modelmill.builder.config_keys import check_unread_keys
from modelmill.builder.keep_quantized import resolve_keep
from modelmill.builder.memory_plan import BuildMemory
from modelmill.builder.multimodal_calibration import hash_images, reads_images
from modelmill.builder.resolve_options import check_generation_config, find_family, resolve_options
from modelmill.builder.segmentation import (
    LANGUAGE,
    check_segmentation_options,
    engine_type_for,
    segmentation_memory,
    with_config,
)
from modelmill.builder.tensor_plan import (
    PlannedTensor,
    plan_tensor,
    plan_tensors,
    quantization_for,
    quantized_modules,
    resolve_rename_rules,
)
from modelmill.builder.tied_head import resolve_tied_head
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import ResolvedRule
from modelmill.core import memory_limits
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import BuildConfig, to_dict
from modelmill.core.config_view import ConfigView
from modelmill.core.errors import UsageError
from modelmill.core.generation_defaults import GenerationDefaults, read_generation
from modelmill.core.progress import Progress
from modelmill.nn.kv import QUANTIZED_KV_DTYPES as KV_DTYPES
from modelmill.nn.kv import KVShape, kv_cache_dtype
from modelmill.nn.layer_stack import kv_shape, layer_stacks
from modelmill.ops import registry
from modelmill.quant.mixed_precision import MixedPrecisionRecipe
from modelmill.quant.recipe import Recipe, make_recipe
from modelmill.quant.vision_encoder import describe_vision_recipe, vision_encoder_recipe
from modelmill.weights.base import UNPACKED_MEMORY_FRACTION, unpacked_size


@dataclass(frozen=True)
class BuildPlan:
    """A build with all decisions made.

    Attributes:
        config: has no "auto" left.
        reasons: why each option was resolved as it was.
        recipe: quantizes the linears; None if they are kept.
        calibration: source of the statistics, if any.
        auto_result: the measurements of ``-q auto``.
        auto_source: the text it measured on.
        warnings: config values without effect, and other warnings about the checkpoint.
        kv: the KV cache of the layers that have one; None for a segmentation model.
    """

    checkpoint: Checkpoint
    config: BuildConfig
    family: ModuleType
    model_config: Any
    max_model_len: int
    tensors: tuple[PlannedTensor, ...]
    aliases: dict[str, str]
    reasons: dict[str, str]
    recipe: Recipe | None = None
    calibration: CalibrationSource | None = None
    auto_result: AutoPrecisionResult | None = None
    auto_source: CalibrationSource | None = None
    warnings: tuple[str, ...] = ()
    kv: KVShape | None = None

    @property
    def text_source(self) -> CalibrationSource | None:
        """Return the text that influenced the engine; no evaluation may use it."""
        return self.calibration or self.auto_source

    @property
    def engine_type(self) -> str:
        """Return the engine type: "language" or "segmentation"."""
        return engine_type_for(self.family)

    @property
    def generation(self) -> GenerationDefaults | None:
        """Return the defaults of the engine's requests; None for a segmentation model."""
        if self.engine_type != LANGUAGE:
            return None
        return read_generation(self.checkpoint.generation_config, self.checkpoint.container)

    @property
    def dtype(self) -> torch.dtype:
        """Return the activations' dtype."""
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        return dtype

    @property
    def device(self) -> str:
        """Return the device for rounding and calibration: the target if it exists here."""
        return "cuda" if self.config.target == "cuda" and torch.cuda.is_available() else "cpu"

    @property
    def weight_formats(self) -> dict[str, str]:
        """Return linear module → weight format."""
        out = {p.module: p.weight_format for p in self.tensors if p.weight_format is not None}
        for module_path, tied_path in self.aliases.items():
            out.setdefault(module_path.rpartition(".")[0], "dense")
            assert tied_path
        return out

    def shards(self) -> dict[str, list[PlannedTensor]]:
        """Return weight file → its tensors, one file per layer.

        An interrupted build loses one layer at most.
        """
        out: dict[str, list[PlannedTensor]] = {}
        for planned in self.tensors:
            out.setdefault(f"weights/{planned.weight_file}.safetensors", []).append(planned)
        return dict(sorted(out.items()))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights, on disk and in memory alike."""
        return sum(planned.nbytes for planned in self.tensors)

    @property
    def unpacked_weight_bytes(self) -> int:
        """Return the additional bytes of expanded weights on a CPU without a compiled kernel.

        They are expanded once at load, as far as memory allows (``loader.unpack_weights``).
        """
        if self.config.target != "cpu":
            return 0
        chosen = registry.select_backends("cpu", self.config.kernels).backends
        sizes = [
            unpacked_size(p.weight_format, p.shape, self.dtype)
            for p in self.tensors
            if p.weight_format is not None
        ]
        total = sum(size for op, size in filter(None, sizes) if chosen[op] == "torch")
        return min(
            total,
            int(
                UNPACKED_MEMORY_FRACTION
                * max(memory_limits.available_memory().total - self.weight_bytes, 0)
            ),
        )

    @cached_property
    def build_memory(self) -> BuildMemory:
        """Return the memory of the build itself, including acceptance."""
        shared = (
            memory_plan.process_bytes(),
            memory_plan.mapped_bytes(self.checkpoint, self.tensors),
        )
        writing = memory_plan.writing_bytes(self.checkpoint, self.tensors)
        if self.engine_type != LANGUAGE:
            encoder, itemsize = self.model_config.encoder, self.dtype.itemsize
            encoding = memory_plan.encoding_bytes(encoder, self._encoder_workspace, itemsize)
            return BuildMemory(*shared, writing, 0, encoding)
        judging = memory_plan.acceptance_bytes(
            self.checkpoint, self.tensors, self.model_config.vocab, self.model_config.hidden
        )
        judging += min(
            self.unpacked_weight_bytes,
            int(UNPACKED_MEMORY_FRACTION * memory_limits.available_memory().free),
        )
        calibrating = 0
        if self.calibration is not None and self.device == "cuda":
            # the tokens, their statistics and the layer are on the GPU; here one is read, and one
            # read ahead
            calibrating = memory_plan.layer_read_bytes(self.tensors)
        elif self.calibration is not None:
            tokens = self.calibration.num_samples * self.calibration.max_length
            calibrating = memory_plan.calibration_bytes(
                self.tensors,
                tokens,
                self.model_config.hidden,
                self.model_config.inner,
                2 * self._kv_shape.kv_heads * self._kv_shape.head_dim,
                needs_hessian=self.recipe is not None and self.recipe.needs_hessian,
            )
        return BuildMemory(*shared, writing, calibrating, judging)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the KV cache bytes per token of context, with the engine's default dtype."""
        return self._kv_shape.page_bytes(1, kv_cache_dtype(self.config.kv_cache_dtype, self.dtype))

    @property
    def _kv_shape(self) -> KVShape:
        assert self.kv is not None, "a language model has a KV cache"
        return self.kv

    @cached_property
    def memory_report(self) -> dict[str, Any]:
        """Return the memory in bytes now and at run time, and the largest batch × length.

        If none fits, it contains the reason.
        """
        total, free = device_memory(self.config.target)
        expanded = self.unpacked_weight_bytes
        if self.engine_type != LANGUAGE:
            room = (total, free)
            report = segmentation_memory(
                self.model_config, self.weight_bytes + expanded, room, self.dtype.itemsize
            )
            return report | self._build_memory_json
        workspace = (
            4
            * 8192
            * max(self.model_config.inner * 2, self.model_config.hidden * 4)
            * self.dtype.itemsize
        )
        left = int(total * 0.9) - self.weight_bytes - expanded - workspace
        tokens = max(left, 0) // self.kv_bytes_per_token
        full = tokens // self.max_model_len
        if left <= 0:
            needed, there = (
                format_bytes(self.weight_bytes + expanded + workspace),
                format_bytes(total),
            )
            verdict = (
                f"does not fit: weights and workspace need {needed}, the device has "
                f"{there}; try -q int8"
            )
        elif full < 1:
            verdict = (
                f"{self.max_model_len} tokens do not fit; the longest that do: "
                f"--max-model-len {tokens}"
            )
        else:
            verdict = (
                f"{full} sequences of {self.max_model_len} tokens, or {tokens} tokens in "
                "any mixture"
            )
        return {
            "device_total": total,
            "device_free": free,
            "weights": self.weight_bytes,
            "expanded": expanded,
            **self._build_memory_json,
            "kv_per_token": self.kv_bytes_per_token,
            "kv_per_token_8bit": self._kv_shape.page_bytes(1, KV_DTYPES["int8"]),
            "workspace": workspace,
            "kv_tokens": tokens,
            "max_batch_at_max_len": full,
            "fits": verdict,
        }

    @property
    def _build_memory_json(self) -> dict[str, int]:
        """Return a build's memory for --dry-run: its peak, and the mapped part of it."""
        return {
            "build_peak": self.build_memory.peak_bytes,
            "build_mapped": self.build_memory.mapped_bytes,
        }

    @property
    def _encoder_workspace(self) -> int:
        """Return the bytes of an image engine's widest layer in float32 in the reference."""
        return int(segmentation_memory(self.model_config, 0, (0, 0), 4)["workspace"])

    def resume_key(self) -> str:
        """Return the identity of the build and its version; a resumed build must have the same."""
        parts = (
            modelmill.__version__,
            self.checkpoint.quick_fingerprint(),
            to_dict(self.config),
            PACKING,
            self.max_model_len,
            torch.__version__,
            # another version of this code may decide differently about what a warning describes
            *self.warnings,
        )
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON-able facts, for --dry-run."""
        by_format: dict[str, int] = {}
        for planned in self.tensors:
            label = planned.weight_format or "plain"
            by_format[label] = by_format.get(label, 0) + planned.nbytes
        return {
            "checkpoint": str(self.checkpoint.path),
            "container": self.checkpoint.container,
            "model_type": self.checkpoint.model_type,
            "build": to_dict(self.config),
            "reasons": self.reasons,
            "warnings": list(self.warnings),
            "max_model_len": self.max_model_len,
            "engine_type": self.engine_type,
            "layers": getattr(self.model_config, "layers", None),
            "tensors": len(self.tensors),
            "tokenizer": bool(self.checkpoint.tokenizer_files()),
            "bytes_by_format": by_format,
            "auto": None if self.auto_result is None else self.auto_result.describe(),
            "memory": self.memory_report,
            "sampling": None if self.generation is None else self.generation.to_dict(),
        }


def layer_index(shard: str) -> int | None:
    """Return the layer of a weight file; None for the tensors outside the layers."""
    number = shard.removesuffix(".safetensors").rpartition("layer-")[2]
    return int(number) if number.isdigit() else None


def make_plan(
    checkpoint: Checkpoint, config: BuildConfig, on_progress: Progress | None = None
) -> BuildPlan:
    """Decide everything without reading weights, except for ``-q auto``, which measures.

    on_progress: as for ``build_engine.build``.

    Raises:
        CheckpointError: if the checkpoint is not supported (UnknownArchitecture, …).
        UsageError: if an option is invalid.
    """
    checkpoint = with_config(checkpoint)
    family = find_family(checkpoint)
    sizes, warnings = _read_model_config(checkpoint, family)
    if engine_type_for(family) != LANGUAGE:
        return replace(
            _segmentation_plan(checkpoint, config, family, sizes), warnings=tuple(warnings)
        )
    check_generation_config(checkpoint, int(sizes.vocab))
    sizes, tied_warnings = resolve_tied_head(checkpoint, family, sizes)
    config, kept = resolve_keep(checkpoint, config)
    renames = resolve_rename_rules(checkpoint, family, sizes)
    config, auto_result = resolve_auto_precision(
        checkpoint, config, family, sizes, renames, on_progress
    )
    recipe = (
        MixedPrecisionRecipe(config, sizes.layers)
        if config.quantization == AUTO
        else make_recipe(config)
    )
    limit = getattr(sizes, "max_extended_len", None) or sizes.max_len
    length = config.max_model_len or sizes.max_len
    if length > limit:
        raise UsageError(f"--max-model-len {length} must be at most {limit}, this model's limit")
    calibrated = recipe is not None and recipe.needs_calibration
    source = find_calibration(config, length) if calibrated or auto_result is not None else None
    if source is not None and reads_images(checkpoint.tokenizer_files()):
        source = hash_images(source)
    config, reasons = resolve_options(checkpoint, config, recipe, source)
    recipe = (
        MixedPrecisionRecipe(config, sizes.layers)
        if isinstance(recipe, MixedPrecisionRecipe)
        else recipe
    )
    reasons |= kept
    registry.select_backends(
        config.target if config.target == "cpu" or torch.cuda.is_available() else "cpu",
        config.kernels,
    )
    with torch.device("meta"):
        model = family.Model(sizes)
    if config.tower != "none" and all(stack.recipe != "tower" for stack in layer_stacks(model)):
        raise UsageError(
            f"--tower {config.tower}: {checkpoint.path} does not read images; remove it"
        )
    tensors = tuple(plan_tensors(checkpoint, config, recipe, model, renames, family))
    aliases = {"head.weight": "embed.weight"} if sizes.tied else {}
    if sizes.tied and "head" in quantized_modules(model, config):
        tensors, aliases = (*tensors, _quantized_head(checkpoint, config, recipe, tensors)), {}
    calibration, chosen_on = (
        source if calibrated else None,
        source if auto_result is not None else None,
    )
    return BuildPlan(
        checkpoint, config, family, sizes, length, tensors, aliases, reasons, recipe, calibration,
        auto_result, chosen_on,
        (*warnings, *tied_warnings), kv_shape(model.layers),
    )  # fmt: skip


def _quantized_head(
    checkpoint: Checkpoint,
    config: BuildConfig,
    recipe: Any,
    tensors: Sequence[PlannedTensor],
) -> PlannedTensor:
    """Plan the quantized copy of a tied embedding as head; the embedding stays unquantized."""
    embed = next(p for p in tensors if p.module == "embed" and p.rule.target == "embed.weight")
    copy = ResolvedRule("head.weight", embed.rule.sources, embed.rule.how)
    return plan_tensor(checkpoint, config, copy, "head", quantization_for(recipe, config, "head"))


def _read_model_config(checkpoint: Checkpoint, family: ModuleType) -> tuple[Any, list[str]]:
    """Return the family's config, and warnings about keys that it does not read.

    Raises:
        CheckpointError: if a key requires an unsupported computation.
    """
    view = ConfigView(checkpoint.config)
    sizes = family.config_from_hf(view)
    view.ignore(checkpoint.unread_config)
    where = checkpoint.path.name if checkpoint.container.endswith("gguf") else "config.json"
    return sizes, check_unread_keys(view, family, where)


def _segmentation_plan(
    checkpoint: Checkpoint, config: BuildConfig, family: ModuleType, model_config: Any
) -> BuildPlan:
    """Plan a segmentation model: no tokens, so no length, no head and no calibration."""
    check_segmentation_options(config, checkpoint.path)
    recipe = vision_encoder_recipe(config)
    config, reasons = resolve_options(checkpoint, config, recipe, None)
    if recipe is not None:
        reasons["quantization"] = describe_vision_recipe(config)
    registry.select_backends(
        config.target if config.target == "cpu" or torch.cuda.is_available() else "cpu",
        config.kernels,
    )
    renames = resolve_rename_rules(checkpoint, family, model_config)
    model = family.Model(model_config)
    tensors = tuple(plan_tensors(checkpoint, config, recipe, model, renames, family))
    return BuildPlan(checkpoint, config, family, model_config, 1, tensors, {}, reasons, recipe)


def device_memory(target: str) -> tuple[int, int]:
    """Return (total, free) bytes of the device; the CPU's if the target does not exist here."""
    if target == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total, free
    return memory_limits.available_memory()
