"""A checkpoint of which only config.json is here: its tensors' shapes follow from the model.

So a build can be planned, its parameters counted and its memory estimated before a download.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from modelmill.builder.model_config import config_dtype_name, find_family, read_model_config
from modelmill.builder.tensor_plan import model_tensor_shapes
from modelmill.checkpoint import bitnet_format
from modelmill.checkpoint.awq_format import AwqScheme
from modelmill.checkpoint.compressed_tensors import CompressedTensorsScheme
from modelmill.checkpoint.container import Container, TensorInfo
from modelmill.checkpoint.fp8_format import (
    STORED_DTYPE_NAME,
    DequantizingFp8Container,
    read_settings,
)
from modelmill.checkpoint.gpt_oss_experts import MODEL_TYPE, expert_layouts_from_config
from modelmill.checkpoint.gptq_format import GptqScheme
from modelmill.checkpoint.legacy_model_types import with_current_model_type
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.prequantized import find_scheme
from modelmill.checkpoint.quant_layout import QuantLayout
from modelmill.checkpoint.rename import Rule
from modelmill.checkpoint.side_files import read_json
from modelmill.checkpoint.vlm_language_model import split_language_model_config
from modelmill.core.errors import CheckpointError
from modelmill.core.model_family import (
    LANGUAGE_ENGINE_TYPE,
    checkpoint_tensor_rules,
    read_family_options,
)
from modelmill.core.quoting import quote
from modelmill.weights.int4 import resolve_group_size

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class ConfigOnlyContainer:
    """Names and shapes of the tensors that a config describes; there are no values.

    The shapes of sources that are concatenated are not known one by one, only that of the result.
    """

    def __init__(
        self,
        infos: dict[str, TensorInfo],
        config_file: Path,
        layouts: Mapping[str, QuantLayout] | None = None,
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self._infos, self._config_file = infos, config_file
        self._layouts = layouts or {}

    def names(self) -> list[str]:
        """Return every tensor's name."""
        return list(self._infos)

    def tensor_info(self, name: str) -> TensorInfo:
        """Return shape, dtype and size."""
        return self._infos[name]

    def quant_layout(self, name: str) -> QuantLayout | None:
        """Return how a matrix is stored in few bits; None if it is not."""
        return self._layouts.get(name)

    def get(self, name: str) -> torch.Tensor:
        """Raise CheckpointError: there are no weights."""
        raise CheckpointError(f"{self._config_file.parent}: holds no weights, {name} among them")

    def files(self) -> list[Path]:
        """Return the files the values come from."""
        return [self._config_file]


def is_config_only(folder: Path) -> bool:
    """Return whether a folder has a config.json and no file of weights."""
    if not (folder / "config.json").is_file():
        return False
    weights = (".safetensors", ".bin", ".gguf", ".pth")
    return not any(f.suffix in weights or f.name.endswith(".index.json") for f in folder.iterdir())


def checkpoint_from_config(folder: Path) -> Checkpoint:
    """Return the checkpoint that a folder's config.json describes.

    Raises:
        CheckpointError: for an unknown or wrong config, and for a model of images.
    """
    file = folder / "config.json"
    config, left_out = split_language_model_config(with_current_model_type(read_json(file)), file)
    empty = ConfigOnlyContainer({}, file)
    checkpoint = Checkpoint(
        folder, "config.json", config, {}, raw_container=empty, view=empty, unread_config=left_out
    )
    family = find_family(checkpoint)
    if read_family_options(family).ENGINE_TYPE != LANGUAGE_ENGINE_TYPE:
        raise CheckpointError(f"{folder}: holds no weights; a model of images cannot be planned so")
    model_config, _ = read_model_config(checkpoint, family)
    shapes = model_tensor_shapes(family.Model(model_config))
    dtype = config_dtype_name(config)
    infos: dict[str, TensorInfo] = {}
    rules = checkpoint_tensor_rules(family).rules(model_config)
    # those of one source first: it may be among several of another rule
    for rule in sorted(rules, key=lambda rule: len(rule.sources) > 1):
        if rule.target in shapes:
            shape = shapes[rule.target]
            infos |= infer_source_infos(rule, shape, TORCH_DTYPES.get(dtype, torch.bfloat16), infos)
    matrices = [
        source for rule in rules if _rule_makes_quantizable_matrix(rule) for source in rule.sources
    ]
    checkpoint.raw_container = checkpoint.view = container_from_quant_config(
        config, infos, matrices, file
    )
    return checkpoint


def _rule_makes_quantizable_matrix(rule: Rule) -> bool:
    """Whether a rule makes a matrix of a layer that quantized checkpoints have in few bits."""
    module, _, leaf = rule.target.rpartition(".")
    return rule.target.startswith("layers.") and leaf == "weight" and module.endswith("_proj")


def container_from_quant_config(
    config: Mapping[str, Any], infos: dict[str, TensorInfo], matrices: Sequence[str], file: Path
) -> Container:
    """Return the tensors as a ``quantization_config`` says that they are stored.

    Args:
        config: The config.
        infos: Of all tensors, none in few bits.
        matrices: Those of the layers.
        file: For messages.

    Raises:
        CheckpointError: for a method whose sizes do not follow from the config.
    """
    settings = config.get("quantization_config")
    if config.get("model_type") == MODEL_TYPE or not settings:
        return ConfigOnlyContainer(infos, file, expert_layouts_from_config(config, infos))
    fp8 = read_settings(settings, file)
    kept = settings.get("modules_to_not_convert") or [] if isinstance(settings, Mapping) else []
    packed = [name for name in matrices if not any(str(each) in name for each in kept)]
    if fp8 is not None:
        return DequantizingFp8Container(
            ConfigOnlyContainer(infos | fp8_tensor_infos(infos, packed, fp8.block), file), fp8
        )
    if bitnet_format.read_settings(settings, file) is not None:
        return ConfigOnlyContainer(
            infos, file
        )  # expanded; some files have them as they were trained
    scheme = find_scheme(settings, file)
    if isinstance(scheme, CompressedTensorsScheme) and _has_single_linear_group(settings):
        half = config_dtype_name(config) == "float16"
        return ConfigOnlyContainer(
            infos, file, compressed_tensors_layouts(settings, scheme, infos, packed, half)
        )
    if not isinstance(scheme, GptqScheme | AwqScheme):
        raise CheckpointError(
            f"{file.parent}: holds no weights, and the sizes of those of {scheme.label} do not "
            "follow from config.json alone; download them, or remove quantization_config to plan "
            "the original"
        )
    layouts = {name: _gptq_or_awq_layout(scheme, *infos[name].shape) for name in packed}
    return ConfigOnlyContainer(infos, file, layouts)


def fp8_tensor_infos(
    infos: Mapping[str, TensorInfo], matrices: Sequence[str], block: tuple[int, int] | None
) -> dict[str, TensorInfo]:
    """Return matrices in 8-bit floats, and their scales: one for each block, or one for all."""
    out = {}
    for name in matrices:
        rows, columns = infos[name].shape
        out[name] = TensorInfo(name, (rows, columns), STORED_DTYPE_NAME, rows * columns)
        grid = (1,) if block is None else (-(-rows // block[0]), -(-columns // block[1]))
        scale = f"{name}_scale_inv"
        out[scale] = TensorInfo(scale, grid, "float32", 4 * math.prod(grid))
    return out


def _has_single_linear_group(settings: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors stores all matrices alike, but for those that it leaves out."""
    [group, *others] = settings["config_groups"].values()
    return not others and group.get("targets") == ["Linear"]


def compressed_tensors_layouts(
    settings: Mapping[str, Any],
    scheme: CompressedTensorsScheme,
    infos: Mapping[str, TensorInfo],
    matrices: Sequence[str],
    half: bool,
) -> dict[str, QuantLayout]:
    """Return how compressed-tensors stores matrices, but for an order of their columns.

    Args:
        settings: ``quantization_config``; ``ignore`` has modules, or patterns behind "re:".
        scheme: What it says.
        infos: Of all tensors.
        matrices: Those of the layers.
        half: Whether the scales are of 16 bits with a mantissa of 10.
    """
    [group] = settings["config_groups"].values()
    weights, ignored = (
        group["weights"],
        parse_ignored_module_patterns(settings.get("ignore"), scheme.path),
    )
    symmetric = weights.get("symmetric", True)
    size = weights["group_size"] if weights.get("strategy") == "group" else -1
    layouts = {}
    for name in matrices:
        module, (rows, columns) = name.removesuffix(".weight"), infos[name].shape
        if any(pattern.match(module) for pattern in ignored):
            continue
        layouts[name] = QuantLayout(
            scheme.label,
            weights.get("num_bits", 8),
            rows,
            columns,
            resolve_group_size(size, columns),
            not symmetric,
            torch.float16 if half and symmetric else torch.float32,
        )
    return layouts


def parse_ignored_module_patterns(names: Any, path: Path) -> list[re.Pattern[str]]:
    """Return the patterns of modules that compressed-tensors leaves out.

    Raises:
        CheckpointError: for what is no list of names and patterns, and for patterns that could take
            a hostile time.
    """
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise CheckpointError(f"{path}: ignore must be a list of names, not {quote(names, 60)}")
    patterns = []
    for name in names:
        is_pattern, text = name.startswith("re:"), name.removeprefix("re:")
        # the time is exponential for a repeated group, and a power for several repetitions
        if is_pattern and (re.search(r"\)[*+{]", text) or len(re.findall(r"[*+{]", text)) > 4):
            raise CheckpointError(
                f"{path}: the pattern {quote(name, 60)} in ignore is too complex to plan without "
                "weights; fetch the weights"
            )
        try:
            patterns.append(re.compile(text if is_pattern else rf"{re.escape(text)}\Z"))
        except (re.error, RecursionError, OverflowError):
            raise CheckpointError(
                f"{path}: ignore has {quote(name, 60)}, which is no regular expression"
            ) from None
    return patterns


def _gptq_or_awq_layout(scheme: GptqScheme | AwqScheme, rows: int, columns: int) -> QuantLayout:
    """Return how a scheme stores a matrix, but for an order of its columns."""
    group = resolve_group_size(scheme.group_size, columns)
    symmetric = isinstance(scheme, GptqScheme) and scheme.symmetric
    bits = scheme.bits if isinstance(scheme, GptqScheme) else 4
    grid = torch.float16 if symmetric else torch.float32
    return QuantLayout(scheme.label, bits, rows, columns, group, not symmetric, grid)


def infer_source_infos(
    rule: Rule, shape: tuple[int, ...], dtype: torch.dtype, known: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return sources that a rule makes a tensor of this shape from; known: of other rules."""
    if rule.how.startswith("ones:"):
        return {}  # its source is also that of another rule
    for step in reversed(rule.how.split("+")):
        name, _, argument = step.partition(":")
        if name == "transpose":
            shape = shape[::-1]
        elif name == "part0":
            shape = (shape[0] * int(argument.partition("/")[2]), *shape[1:])
        elif name == "expert":
            shape = (int(argument.partition("/")[2]), *shape)
        elif name in ("drop_gates", "gates"):
            shape = (shape[0] + math.prod(map(int, argument.split("/"))), *shape[1:])
        elif name == "rows":
            shape = (int(argument.rpartition("/")[2]), *shape[1:])
        elif name == "depthwise" and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
    shapes = (
        _infer_rule_source_shapes(rule, shape, known) if shape else [()]
    )  # a number is of one source
    return {
        source: TensorInfo(
            source,
            each,
            str(dtype).removeprefix("torch."),
            torch.Size(each).numel() * dtype.itemsize,
        )
        for source, each in zip(rule.sources, shapes, strict=True)
    }


def _infer_rule_source_shapes(
    rule: Rule, shape: tuple[int, ...], known: Mapping[str, TensorInfo]
) -> list[tuple[int, ...]]:
    """Return the shape of each source of a tensor; ``known`` are of other rules."""
    axis = 1 if rule.how.startswith("cat1") else 0
    sizes = [known[source].shape[axis] if source in known else 1 for source in rule.sources]
    unknown = [i for i, source in enumerate(rule.sources) if source not in known]
    if unknown:
        sizes[unknown[-1]] += shape[axis] - sum(sizes)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
