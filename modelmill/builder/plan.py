"""Decides a build: resolves every "auto", accounts for every tensor and computes the memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import modelmill
from modelmill.artifact.manifest import PACKING_VERSION
from modelmill.builder import memory_plan
from modelmill.builder.auto_precision import (
    AUTO_QUANTIZATION,
    AutoPrecisionResult,
    resolve_auto_precision,
)
from modelmill.builder.calibration_data import (
    CalibrationSource,
    chat_supports_images,
    check_calibration_texts,
    find_calibration_source,
)
from modelmill.builder.expert_loop import unfused_experts_remark
from modelmill.builder.memory_plan import BuildMemory
from modelmill.builder.model_config import (
    check_generation_config,
    config_dtype_name,
    derive_missing_config,
    find_family,
    read_model_config,
    resolve_tied_head,
)
from modelmill.builder.multimodal_calibration import with_images_digest
from modelmill.builder.segmentation import check_segmentation_options
from modelmill.builder.tensor_mismatch import reraise_explained_mismatch
from modelmill.builder.tensor_plan import (
    PlannedTensor,
    plan_linear_weight,
    plan_tensors,
    quantized_modules,
    resolve_rename_rules,
)
from modelmill.checkpoint.chat_format import chat_format_remark
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import ResolvedRule
from modelmill.core.config import BuildConfig, config_to_dict
from modelmill.core.errors import UsageError
from modelmill.core.generation_defaults import GenerationDefaults, parse_generation_config
from modelmill.core.model_family import LANGUAGE_ENGINE_TYPE, read_family_options
from modelmill.core.progress_callback import Progress
from modelmill.nn.kv import ModelKVCacheSpec, kv_cache_dtype
from modelmill.nn.layer_stack import layer_stacks, state_shape
from modelmill.nn.per_layer_input import per_layer_input_size
from modelmill.nn.recurrent_state import NO_STATE, ModelStateSpec
from modelmill.nn.whole_model_decode import model_kv_shape
from modelmill.ops import registry
from modelmill.quant.keep import KEEP_RECIPE_NAME, dequantization_note, resolve_keep_config
from modelmill.quant.mixed_precision import MixedPrecisionRecipe
from modelmill.quant.recipe import NO_RECIPE, Recipe, make_recipe
from modelmill.quant.vision_encoder import describe_segmentation_recipe, segmentation_recipe


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
        state: the recurrent state of a sequence, in the layers that keep one.
        per_layer_input_size: channels that a token has beside the stream, for all layers together.
        expert_loop: which experts a GPU computes one after another, and why; None: none.
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
    kv: ModelKVCacheSpec | None = None
    state: ModelStateSpec = NO_STATE
    per_layer_input_size: int = 0
    expert_loop: str | None = None

    @property
    def quantization_text_source(self) -> CalibrationSource | None:
        """Return the text that influenced the engine; no evaluation may use it."""
        return self.calibration or self.auto_source

    @property
    def engine_type(self) -> str:
        """Return the engine type: "language" or "segmentation"."""
        return read_family_options(self.family).ENGINE_TYPE

    @property
    def generation(self) -> GenerationDefaults | None:
        """Return the defaults of the engine's requests; None for a segmentation model."""
        if self.engine_type != LANGUAGE_ENGINE_TYPE:
            return None
        return parse_generation_config(self.checkpoint.generation_config, self.checkpoint.container)

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

    def tensors_by_weight_file(self) -> dict[str, list[PlannedTensor]]:
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

    @cached_property
    def build_memory(self) -> BuildMemory:
        """Return the memory of the build itself, including acceptance."""
        return memory_plan.estimate_build_memory(self)

    @cached_property
    def memory_report(self) -> dict[str, Any]:
        """Return the memory in bytes now and at run time, and what fits."""
        return memory_plan.memory_report(self)

    def num_parameters(self, share: Callable[[str], float] | None = None) -> int:
        """Return the number of values of all tensors.

        share: of a module by its name, the part that is counted.
        """
        return round(
            sum(
                torch.Size(planned.shape).numel() * (share(planned.module) if share else 1)
                for planned in self.tensors
            )
        )

    def _token_share_of_module(self, module: str) -> float:
        """Return the share of the tokens that a module multiplies: of an expert, less than all."""
        moe = getattr(self.model_config, "moe", None)
        if moe is None or re.search(r"\.experts\.\d", module) is None:
            return 1.0
        return float(moe.router.top_k / moe.router.experts)

    def resume_key(self) -> str:
        """Return the identity of the build and its version; a resumed build must have the same."""
        parts = (
            modelmill.__version__,
            self.checkpoint.quick_fingerprint(),
            config_to_dict(self.config),
            PACKING_VERSION,
            self.max_model_len,
            torch.__version__,
            # another version of this code may decide differently about what a warning describes
            *self.warnings,
        )
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def describe(self, ranks: int = 1, expert_parallel: bool = False) -> dict[str, Any]:
        """Return the plan as JSON-able facts, for --dry-run.

        Args:
            ranks: Over which the engine will be split; the memory is that of the largest.
            expert_parallel: Whether they divide whole experts.
        """
        memory = self.memory_report
        if ranks > 1:
            memory = memory_plan.largest_rank_memory_report(self, ranks, expert_parallel)
        by_format: dict[str, int] = {}
        for planned in self.tensors:
            label = planned.weight_format or "plain"
            by_format[label] = by_format.get(label, 0) + planned.nbytes
        return {
            "checkpoint": str(self.checkpoint.path),
            "container": self.checkpoint.container,
            "model_type": self.checkpoint.model_type,
            "build": config_to_dict(self.config),
            "reasons": self.reasons,
            "warnings": list(self.warnings),
            "max_model_len": self.max_model_len,
            "engine_type": self.engine_type,
            "layers": getattr(self.model_config, "layers", None),
            "tensors": len(self.tensors),
            "parameters": self.num_parameters(),
            "active_parameters": self.num_parameters(self._token_share_of_module),
            "tokenizer": bool(self.checkpoint.tokenizer_files()),
            "chat_template": chat_format_remark(self.checkpoint.side_files) or None,
            "bytes_by_format": by_format,
            "auto": None if self.auto_result is None else self.auto_result.describe(),
            "memory": memory,
            "experts": self.expert_loop,
            "sampling": None if self.generation is None else self.generation.to_dict(),
        }


def resolve_build_options(
    checkpoint: Checkpoint,
    config: BuildConfig,
    recipe: Recipe | None,
    source: CalibrationSource | None,
) -> tuple[BuildConfig, dict[str, str]]:
    """Return the options with no "auto" left, and the reason for each value.

    ``-q auto`` and ``keep`` are resolved before (auto_precision, quant.keep). source: the
    calibration source.

    Raises:
        UsageError: if a file is missing.
    """
    reasons = {}
    target, dtype = config.target, config.dtype
    if target == "auto":
        target = "cuda" if torch.cuda.is_available() else "cpu"
        reasons["target"] = f"{target}: what is here"
    stored = config_dtype_name(checkpoint.config)
    if dtype == "auto":
        if target == "cpu":
            dtype, reasons["dtype"] = (
                "float32",
                "float32: exact, and no slower than 16 bit without special instructions",
            )
        elif stored in ("float16", "bfloat16"):
            dtype, reasons["dtype"] = stored, f"{stored}: as stored"
        else:
            dtype, reasons["dtype"] = (
                "bfloat16",
                "bfloat16: half the traffic of float32, no overflow",
            )
    method = "nearest" if recipe is None else recipe.method
    if config.method == "auto" and method != "nearest":
        reasons["method"] = f"{method}: the best measured"
    if recipe is not None:
        changes, why = recipe.resolve_options(config)
        config, reasons = replace(config, **changes), reasons | why
    if source is not None:
        calibration = f"sha256:{source.digest}" + (
            f"+{source.image_digest}" if source.image_digest else ""
        )
        reasons["calibration"] = (
            f"{source.to_json()['name']}, up to {source.num_samples} × {source.max_length} tokens"
        )
    else:
        # its path must not make two engines of one checkpoint differ
        if config.calibration is not None and not Path(config.calibration).is_file():
            raise UsageError(f"--calibration {config.calibration}: there is no such file")
        calibration = None
        if config.calibration is not None:
            reasons["calibration"] = (
                f"not used: the recipe {config.quantization} needs no statistics"
            )
    return replace(
        config, target=target, dtype=dtype, method=method, calibration=calibration
    ), reasons


def weight_file_layer(shard: str) -> int | None:
    """Return the layer of a weight file; None for the tensors outside the layers."""
    number = shard.removesuffix(".safetensors").rpartition("layer-")[2]
    return int(number) if number.isdigit() else None


def make_build_plan(
    checkpoint: Checkpoint, config: BuildConfig, on_progress: Progress | None = None
) -> BuildPlan:
    """Decide everything without reading weights, except for ``-q auto``, which measures.

    on_progress: as for ``build_engine.build``.

    Raises:
        CheckpointError: if the checkpoint is not supported (UnknownArchitecture, …).
        UsageError: if an option is invalid.
    """
    checkpoint = derive_missing_config(checkpoint)
    family = find_family(checkpoint)
    sizes, warnings = read_model_config(checkpoint, family)
    if read_family_options(family).ENGINE_TYPE != LANGUAGE_ENGINE_TYPE:
        return replace(
            _plan_segmentation_build(checkpoint, config, family, sizes), warnings=tuple(warnings)
        )
    check_generation_config(checkpoint, int(sizes.vocab))
    sizes, tied_warnings = resolve_tied_head(checkpoint, family, sizes)
    reasons: dict[str, str] = {}
    # what is quantized already is kept, unless another recipe is set
    quantized = bool(checkpoint.config.get("quantization_config"))
    note = dequantization_note(checkpoint) if quantized else ""
    unset = config.quantization == NO_RECIPE
    if config.quantization == KEEP_RECIPE_NAME or (quantized and unset and not note):
        config, reasons = resolve_keep_config(checkpoint, config)
    elif note and unset:
        warnings.append(note)
    auto_result = None
    with reraise_explained_mismatch(checkpoint, family, sizes):
        renames = resolve_rename_rules(checkpoint, family, sizes)
        if config.quantization == AUTO_QUANTIZATION and not config.layer_recipes:
            config, auto_result = resolve_auto_precision(
                checkpoint, config, family, sizes, renames, on_progress
            )
    recipe = _make_recipe(config, sizes)
    limit = getattr(sizes, "max_extended_len", None) or sizes.max_len
    length = config.max_model_len or sizes.max_len
    if length > limit:
        raise UsageError(f"--max-model-len {length} must be at most {limit}, this model's limit")
    calibrated = recipe is not None and recipe.needs_calibration
    needs_samples = calibrated or auto_result is not None
    source = _checked_calibration_source(checkpoint, config, length) if needs_samples else None
    config, resolved = resolve_build_options(checkpoint, config, recipe, source)
    if config.quantization == AUTO_QUANTIZATION:
        recipe = _make_recipe(config, sizes)  # unquantized layers need the resolved dtype
    device = config.target if torch.cuda.is_available() else "cpu"
    ops = registry.select_backends(device, config.kernels)
    with torch.device("meta"):
        model = family.Model(sizes)
    _check_vision_recipe(config, model, checkpoint)
    with reraise_explained_mismatch(checkpoint, family, sizes):
        tensors = tuple(plan_tensors(checkpoint, config, recipe, model, renames, family))
    aliases = {"head.weight": "embed.weight"} if sizes.tied else {}
    if sizes.tied and "head" in quantized_modules(model, config):
        tensors, aliases = (*tensors, _plan_quantized_head(checkpoint, config, recipe, tensors)), {}
    kv = _plan_kv_shape(model, config, ops, length, tensors)
    calibration, chosen_on = (
        source if calibrated else None,
        source if auto_result is not None else None,
    )
    return BuildPlan(
        checkpoint, config, family, sizes, length, tensors, aliases, resolved | reasons, recipe,
        calibration, auto_result, chosen_on,
        (*warnings, *tied_warnings), kv, state_shape(model.layers), per_layer_input_size(model),
        _expert_loop_remark(model, config, tensors),
    )  # fmt: skip


def _checked_calibration_source(
    checkpoint: Checkpoint, config: BuildConfig, max_model_len: int
) -> CalibrationSource:
    """Return the calibration source, with its images' hash if the model reads images.

    Raises:
        UsageError: if the file cannot be used.
    """
    source, files = find_calibration_source(config, max_model_len), checkpoint.tokenizer_files()
    if chat_supports_images(files):
        return with_images_digest(source)
    check_calibration_texts(source, files)
    return source


def _check_vision_recipe(config: BuildConfig, model: Any, checkpoint: Checkpoint) -> None:
    """Refuse a recipe of the vision encoder for a model that has none."""
    if config.tower != "none" and all(stack.recipe != "tower" for stack in layer_stacks(model)):
        raise UsageError(
            f"--tower {config.tower}: {checkpoint.path} does not read images; remove it"
        )


def _plan_kv_shape(
    model: Any,
    config: BuildConfig,
    ops: registry.Ops,
    length: int,
    tensors: Sequence[PlannedTensor],
) -> ModelKVCacheSpec:
    return model_kv_shape(
        model,
        length,
        ops.decode if config.target == "cpu" else None,
        kv_cache_dtype(config.kv_cache_dtype, getattr(torch, config.dtype)),
        formats={each.weight_format for each in tensors if each.weight_format is not None},
    )


def _expert_loop_remark(
    model: Any, config: BuildConfig, tensors: Sequence[PlannedTensor]
) -> str | None:
    """Which experts of this engine a GPU computes one after another, and why."""
    if config.target != "cuda":
        return None
    stored = {name for each in tensors for name in each.stored_info}
    formats = {each.module: each.weight_format for each in tensors if each.weight_format}
    return unfused_experts_remark(model, formats, config.activation_scales, stored)


def _make_recipe(config: BuildConfig, model_config: Any) -> Recipe | None:
    if config.quantization == AUTO_QUANTIZATION:
        return MixedPrecisionRecipe(config, model_config.layers)
    return make_recipe(config)


def _plan_quantized_head(
    checkpoint: Checkpoint,
    config: BuildConfig,
    recipe: Recipe | None,
    tensors: Sequence[PlannedTensor],
) -> PlannedTensor:
    """Plan the quantized copy of a tied embedding as head; the embedding stays unquantized."""
    embed = next(p for p in tensors if p.module == "embed" and p.rule.target == "embed.weight")
    copy = ResolvedRule("head.weight", embed.rule.sources, embed.rule.how)
    own = None if recipe is None else recipe.module_recipe("head")
    dtype = getattr(torch, config.dtype)
    return plan_linear_weight(
        checkpoint, copy, "head", dtype, own, keep=config.quantization == KEEP_RECIPE_NAME
    )


def _plan_segmentation_build(
    checkpoint: Checkpoint, config: BuildConfig, family: ModuleType, model_config: Any
) -> BuildPlan:
    """Plan a segmentation model: no tokens, so no length, no head and no calibration."""
    check_segmentation_options(config, checkpoint.path)
    recipe = segmentation_recipe(config)
    config, reasons = resolve_build_options(checkpoint, config, recipe, None)
    if recipe is not None:
        reasons["quantization"] = describe_segmentation_recipe(config)
    registry.select_backends(
        config.target if config.target == "cpu" or torch.cuda.is_available() else "cpu",
        config.kernels,
    )
    renames = resolve_rename_rules(checkpoint, family, model_config)
    model = family.Model(model_config)
    tensors = tuple(plan_tensors(checkpoint, config, recipe, model, renames, family))
    return BuildPlan(checkpoint, config, family, model_config, 1, tensors, {}, reasons, recipe)
