"""The options, frozen once parsed.

What changes the artifact is in BuildConfig (written to the manifest), what may change per start is
in
RunConfig, what may change per request is in SamplingParams. Field metadata carries the help text,
so that
the command line and the docs are made from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar

from modelmill.core.errors import UsageError

DTYPES = ("float32", "float16", "bfloat16")
KV_DTYPES = ("auto", "int8", "fp8")
BUILD_KV_DTYPES = ("auto", "activations", "int8", "fp8")
TARGET_DEVICES = ("cpu", "cuda")
RECIPES = ("none", "int8", "int4", "smoothquant", "fp8", "rptq", "keep", "auto")
MAX_SPLITS_PER_CHANNEL = 4
ROUNDING_METHODS = ("nearest", "gptq", "awq", "awq+gptq")
GROUP_SIZES = (128, 64, 32, -1)
RPTQ_BITS = ("w8a8", "w4a8", "w4a4")
VISION_RECIPES = ("none", "int8")
RPTQ_MODES = ("exact", "folded", "dynamic")
ACTIVATION_SCALES = ("token", "tensor", "none")
WEIGHT_SCALES = ("channel", "tensor")
T = TypeVar("T")


def option(
    default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **extra_metadata: Any
) -> Any:
    """A dataclass field with its help text (and ``choices``, ``flags``) for the command line."""
    metadata = {"help": help, **extra_metadata}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Everything that decides what an engine contains.

    "auto" is resolved by ``builder.plan`` into a new object.
    """

    dtype: str = option("auto", "activation and weight type", choices=("auto", *DTYPES))
    quantization: str = option("none", "weight recipe", choices=RECIPES, flags=("-q",))
    quantize_head: bool = option(False, "quantize the output head too")
    tower: str = option(
        "none",
        "recipe of the vision encoder (minigpt4, blip-2); int8: weights and activations",
        choices=VISION_RECIPES,
    )
    method: str = option(
        "auto",
        "how the recipe rounds; auto: the best measured",
        choices=("auto", *ROUNDING_METHODS),
    )
    group_size: int = option(
        128,
        "columns that share a scale (int4); -1: a whole row, for comparison",
        choices=GROUP_SIZES,
    )
    symmetric: bool = option(False, "scales without zero-points (int4)")
    max_kl: float | None = option(
        None, "mean KL to the whole model, nats a token, that auto keeps below"
    )
    max_ppl_increase: float | None = option(
        None, "rise of the perplexity in per cent that auto keeps below"
    )
    layer_recipes: Mapping[str, str] = option(
        factory=dict,
        help="LAYER=FORM: int4-g128, int4-g64, int4-g32, int8 or none, in place of auto's search",
        flags=("--layer-recipe",),
    )
    bits: str = option("w8a8", "of weights and activations (rptq)", choices=RPTQ_BITS)
    mode: str = option(
        "exact", "where the steps of activations are applied (rptq)", choices=RPTQ_MODES
    )
    splits_per_channel: int | None = option(
        None, "columns that a channel of SwiGLU's output takes, each for a part of its range, 1 "
        "to 4 (rptq): fewer "
        "values are clipped, down_proj is as many times as wide; default: 1 for w8a8, 2 for w4a8, " "3 for w4a4",  # noqa: E501
        flags=("--splits-per-channel", "--copies"),
    )  # fmt: skip
    activation_scales: str = option(
        "token",
        "8-bit activations scaled by token, or with one static scale (smoothquant, fp8); none: "
        "kept as they are (fp8)",
        choices=ACTIVATION_SCALES,
    )
    weight_scales: str = option(
        "channel",
        "a scale for each output channel, or one for a matrix (smoothquant, fp8)",
        choices=WEIGHT_SCALES,
    )
    alpha: str = option(
        "auto",
        "share of the activations' range that moves into the weights, 0 to 1; auto: searched",
    )
    max_layer_error: float | None = option(
        0.05,
        "error of a layer's output beyond which some of its activations stay as they are "
        "(smoothquant)",
    )
    calibration: str | None = option(
        None,
        "jsonl (`text`, `article`, `prompt` or `messages`) that a recipe takes statistics on; "
        "default: our own",
    )
    calibration_samples: int = option(96, "sequences of calibration tokens")
    calibration_length: int = option(512, "tokens of each")
    max_model_len: int | None = option(
        None, "longest prompt + answer in tokens; default: what the model allows"
    )
    kv_cache_dtype: str = option(
        "auto",
        "what run and serve keep keys and values in unless told; auto: as the activations",
        choices=KV_DTYPES,
    )
    target: str = option(
        "auto", "device the engine is laid out for", choices=("auto", *TARGET_DEVICES)
    )
    kernels: Mapping[str, str] = option(
        factory=dict, help="OP=VARIANT switches one kernel", flags=("--kernel",)
    )
    seed: int = option(
        0, "seed of the random ids that a checkpoint without a tokenizer is calibrated on"
    )

    def __post_init__(self) -> None:
        _check_choice(self, "dtype", ("auto", *DTYPES))
        _check_choice(self, "target", ("auto", *TARGET_DEVICES))
        _check_choice(self, "method", ("auto", *ROUNDING_METHODS))
        for name in ("max_kl", "max_ppl_increase"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise UsageError(f"--{name.replace('_', '-')} must be above 0, not {limit}")
            if limit is not None and self.quantization != "auto":
                raise UsageError(f"--{name.replace('_', '-')} is a limit for -q auto")
        if self.layer_recipes and self.quantization != "auto":
            raise UsageError("--layer-recipe is for -q auto")
        _check_choice(self, "kv_cache_dtype", KV_DTYPES)
        _check_choice(self, "group_size", GROUP_SIZES)
        _check_choice(self, "tower", VISION_RECIPES)
        _check_choice(self, "bits", RPTQ_BITS)
        _check_choice(self, "mode", RPTQ_MODES)
        if (
            self.splits_per_channel is not None
            and not 1 <= self.splits_per_channel <= MAX_SPLITS_PER_CHANNEL
        ):
            most = MAX_SPLITS_PER_CHANNEL
            raise UsageError(
                f"--splits-per-channel must be 1 to {most}, not {self.splits_per_channel}"
            )
        _check_choice(self, "activation_scales", ACTIVATION_SCALES)
        _check_choice(self, "weight_scales", WEIGHT_SCALES)
        _check_smoothing(self)
        for name in ("max_model_len", "calibration_samples", "calibration_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What may differ from one start of an engine to the next."""

    device: str = option("auto", "cpu, cuda or cuda:N")
    tp: int = option(
        1,
        "GPUs that compute the model together, from the device on (on a CPU: processes)",
        flags=("--tp", "-tp", "--tensor-parallel-size"),
    )
    max_model_len: int | None = option(None, "lower the engine's longest sequence")
    max_num_seqs: int = option(256, "most sequences computed in one step")
    max_num_batched_tokens: int = option(
        8192, "most tokens computed in one step (longer prompts go in chunks)"
    )
    max_mixed_tokens: int | None = option(
        None,
        "most tokens in a step that also continues running answers; default: in serve by what "
        "steps take, else on "
        "a GPU by the model's size",
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory that weights and KV cache may take"
    )
    kv_cache_bytes: int | None = option(
        None, "bytes for the KV cache; default: from the memory that is free"
    )
    prefix_cache_bytes: int | None = option(
        None,
        "of them, bytes beyond which kept prompt beginnings take no new memory; default: a third, "
        "at least 1 GiB, "
        "where a CPU's KV cache follows from the memory that is free, else all",
    )
    kv_cache_dtype: str = option(
        "auto",
        "keys and values in 8 bits, or as the activations; auto: as the engine was built",
        choices=BUILD_KV_DTYPES,
    )
    page_size: int = option(16, "tokens in a page of the KV cache", choices=(8, 16, 32, 64))
    enable_prefix_caching: bool = option(True, "reuse the KV pages of equal prompt beginnings")
    cuda_graphs: bool = option(True, "replay decode steps and short prompts as CUDA graphs")
    threads: int | None = option(
        None, "CPU threads; default: the physical cores this process may use"
    )
    kernels: Mapping[str, str] = option(
        factory=dict, help="OP=VARIANT switches one kernel", flags=("--kernel",)
    )
    seed: int = option(0, "seed for requests that bring none")

    def __post_init__(self) -> None:
        counts = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_mixed_tokens",
            "max_model_len",
            "kv_cache_bytes",
            "prefix_cache_bytes",
            "threads",
            "tp",
        )
        for name in counts:
            value = getattr(self, name)
            if value is None and name not in ("max_num_seqs", "max_num_batched_tokens", "tp"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(
                    f"--{name.replace('_', '-')} must be a whole number, not {value!r}"
                )
            if value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        _check_types(self)
        _check_choice(self, "kv_cache_dtype", BUILD_KV_DTYPES)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise UsageError(
                f"--gpu-memory-utilization must be in (0, 1], not {self.gpu_memory_utilization}"
            )
        if self.page_size not in (8, 16, 32, 64):
            raise UsageError(f"--page-size must be 8, 16, 32 or 64, not {self.page_size}")


def from_dict(cls: type[T], raw: Mapping[str, Any], source: str) -> T:
    """``cls(**raw)``; an unknown key is a UsageError that names it and ``source`` it stood."""
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - known)
    if unknown:
        raise UsageError(
            f"{source}: unknown option {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    return cls(**raw)


def to_dict(config: Any) -> dict[str, Any]:
    """A JSON-able dict of a config, keys in field order."""
    return asdict(config)


def _check_types(config: RunConfig) -> None:
    """What the command line parses may come from Python as anything."""
    kinds: dict[str, tuple[Any, str]] = {
        "device": (str, "cpu, cuda or cuda:N"),
        "page_size": (int, "a whole number"),
        "seed": (int, "a whole number"),
        "gpu_memory_utilization": ((int, float), "a number"),
        "enable_prefix_caching": (bool, "true or false"),
        "cuda_graphs": (bool, "true or false"),
        "kernels": (Mapping, "OP=VARIANT pairs, a dict"),
    }
    for name, (kind, told) in kinds.items():
        value = getattr(config, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            flag = "kernel" if name == "kernels" else name.replace("_", "-")
            raise UsageError(f"--{flag} must be {told}, not {value!r}")
    odd = [
        item for item in config.kernels.items() if not all(isinstance(each, str) for each in item)
    ]
    if odd:
        raise UsageError(f"--kernel takes OP=VARIANT, both texts, not {odd[0]!r}")


def _check_smoothing(config: BuildConfig) -> None:
    """α, the limit, and what only one recipe has."""
    try:
        known = config.alpha == "auto" or 0.0 <= float(config.alpha) <= 1.0
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"--alpha must be auto or a number from 0 to 1, not {config.alpha!r}")
    if config.max_layer_error is not None and not config.max_layer_error > 0:
        raise UsageError(f"--max-layer-error must be above 0, not {config.max_layer_error}")
    if config.quantization == "smoothquant" and config.activation_scales == "none":
        raise UsageError(
            "--activation-scales none is for fp8; int8 weights with activations as they are: -q "
            "int8"
        )


def _check_choice(config: Any, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise UsageError(
            f"--{name.replace('_', '-')} {value!r} is not one of {', '.join(map(str, allowed))}"
        )
