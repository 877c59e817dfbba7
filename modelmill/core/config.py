"""The options: frozen dataclasses.

BuildConfig: what changes the engine; written to the manifest. RunConfig: what may change each time
an engine is started. SamplingParams (core.types): what may change per request. Field metadata holds
the help text, from which the command line and the docs are generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, TypeVar

from modelmill.core.errors import UsageError
from modelmill.core.recipe_declaration import (
    RecipeOption,
    read_recipe_declarations,
    read_recipe_options,
)
from modelmill.core.unknown_keywords import refuse_unknown_fields

DTYPE_CHOICES = ("float32", "float16", "bfloat16")
KV_DTYPE_CHOICES = ("auto", "int8", "fp8")
BUILD_KV_DTYPE_CHOICES = ("auto", "activations", "int8", "fp8")
TARGET_DEVICE_CHOICES = ("cpu", "cuda")
RECIPE_CHOICES = ("none", *read_recipe_declarations())
VISION_TOWER_RECIPE_CHOICES = ("none", "int8")
T = TypeVar("T")


def option_field(
    default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **extra_metadata: Any
) -> Any:
    """Make a dataclass field with its help text (and ``choices``, ``flags``) for the CLI."""
    metadata = {"help": help, **extra_metadata}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def path_option_field(help: str, metavar: str) -> Any:
    """A path that need not be given; metavar: what the help text calls it."""
    return option_field(None, help, metavar=metavar)


def recipe_option_field(name: str) -> Any:
    """Make the field of an option that a recipe declares (core/recipe_declaration.py)."""
    declared = read_recipe_options()[name]
    extra = {"choices": declared.choices, "flags": declared.flags}
    return option_field(declared.default, declared.help, **{k: v for k, v in extra.items() if v})


def add_recipe_option_fields(config: type[T]) -> type[T]:
    """Add a field for each option of a recipe that the class does not list, as its last ones.

    The class lists those of the package's recipes, with types for mypy; another recipe's file
    brings its own.
    """
    for name, declared in read_recipe_options().items():
        if name not in config.__annotations__:
            config.__annotations__[name] = declared.type_hint
            setattr(config, name, recipe_option_field(name))
    return config


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
@add_recipe_option_fields
class BuildConfig:
    """All options that decide what an engine contains.

    "auto" is resolved by ``builder.plan`` into a new object.
    """

    dtype: str = option_field(
        "auto", "activation and weight type", choices=("auto", *DTYPE_CHOICES)
    )
    quantization: str = option_field("none", "weight recipe", choices=RECIPE_CHOICES, flags=("-q",))
    quantize_head: bool = option_field(False, "quantize the output head too")
    tower: str = option_field(
        "none",
        "recipe of the vision encoder (minigpt4, blip-2); int8: weights and activations",
        choices=VISION_TOWER_RECIPE_CHOICES,
    )
    method: str = recipe_option_field("method")
    group_size: int = recipe_option_field("group_size")
    symmetric: bool = recipe_option_field("symmetric")
    max_kl: float | None = recipe_option_field("max_kl")
    max_ppl_increase: float | None = recipe_option_field("max_ppl_increase")
    layer_recipes: Mapping[str, str] = option_field(
        factory=dict,
        help="LAYER=FORM: int4-g128, int4-g64, int4-g32, int8 or none, instead of auto's search",
        flags=("--layer-recipe",),
    )
    bits: str = recipe_option_field("bits")
    mode: str = recipe_option_field("mode")
    splits_per_channel: int | None = recipe_option_field("splits_per_channel")
    activation_scales: str = recipe_option_field("activation_scales")
    weight_scales: str = recipe_option_field("weight_scales")
    alpha: str = recipe_option_field("alpha")
    max_layer_error: float | None = recipe_option_field("max_layer_error")
    calibration: str | None = option_field(
        None,
        "jsonl (`text`, `article`, `prompt` or `messages`) with the calibration texts; default: "
        "the built-in ones",
    )
    calibration_samples: int = option_field(96, "sequences of calibration tokens")
    calibration_length: int = option_field(512, "tokens per calibration sequence")
    max_model_len: int | None = option_field(
        None, "maximum length of prompt + answer in tokens; default: the model's maximum"
    )
    kv_cache_dtype: str = option_field(
        "auto",
        "default KV cache dtype of run and serve; auto: the dtype of the activations",
        choices=KV_DTYPE_CHOICES,
    )
    target: str = option_field(
        "auto", "device for which the engine is built", choices=("auto", *TARGET_DEVICE_CHOICES)
    )
    kernels: Mapping[str, str] = option_field(
        factory=dict, help="OP=VARIANT switches one kernel", flags=("--kernel",)
    )
    seed: int = option_field(
        0, "seed of the random calibration ids of a checkpoint without a tokenizer"
    )

    def __post_init__(self) -> None:
        _check_choice(self, "dtype", ("auto", *DTYPE_CHOICES))
        _check_choice(self, "target", ("auto", *TARGET_DEVICE_CHOICES))
        for name, declared in read_recipe_options().items():
            _check_recipe_option(self, name, declared)
        for name in ("max_kl", "max_ppl_increase"):
            if getattr(self, name) is not None and self.quantization != "auto":
                raise UsageError(f"--{name.replace('_', '-')} is a limit for -q auto")
        if self.layer_recipes and self.quantization != "auto":
            raise UsageError("--layer-recipe is for -q auto")
        _check_choice(self, "kv_cache_dtype", KV_DTYPE_CHOICES)
        _check_choice(self, "tower", VISION_TOWER_RECIPE_CHOICES)
        _check_smoothing_options(self)
        for name in ("max_model_len", "calibration_samples", "calibration_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def tp_option_field(help: str) -> Any:
    """The number of GPUs over which an engine is divided."""
    return option_field(1, help, flags=("--tp", "-tp", "--tensor-parallel-size"))


def expert_parallel_option_field(help: str) -> Any:
    """Whether each of these GPUs has whole experts."""
    return option_field(False, help, flags=("-ep",))


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All options that may change each time an engine is started."""

    device: str = option_field("auto", "cpu, cuda or cuda:N")
    tp: int = tp_option_field(
        "tensor parallelism: number of GPUs, starting at the device (on a CPU: processes)"
    )
    enable_expert_parallel: bool = expert_parallel_option_field(
        "with --tp: each GPU has whole experts of a mixture, instead of a part of every expert"
    )
    max_model_len: int | None = option_field(None, "lower the engine's maximum sequence length")
    max_num_seqs: int = option_field(256, "maximum number of sequences in one step")
    max_num_batched_tokens: int = option_field(
        8192, "maximum number of tokens in one step (longer prompts are prefilled in chunks)"
    )
    max_mixed_tokens: int | None = option_field(
        None,
        "maximum number of tokens in a step that prefills and decodes; default: in serve from "
        "measured step times, else on a GPU from the model's size",
    )
    gpu_memory_utilization: float = option_field(
        0.9, "share of the GPU's memory that weights and KV cache may take"
    )
    kv_cache_bytes: int | None = option_field(
        None, "bytes for the KV cache; default: from the memory that is free"
    )
    prefix_cache_bytes: int | None = option_field(
        None,
        "bytes of the KV cache beyond which cached prefixes take no new memory; default: a third, "
        "at least 1 GiB, if the size of a CPU's KV cache follows from the memory that is free, "
        "else all",
    )
    state_cache_bytes: int | None = option_field(
        None,
        "bytes for the recurrent states of hybrid models, of running sequences and of the prefix "
        "cache; default: up to half of the memory that is free",
    )
    kv_cache_dtype: str = option_field(
        "auto",
        "KV cache in 8 bits, or in the dtype of the activations; auto: as the engine was built",
        choices=BUILD_KV_DTYPE_CHOICES,
    )
    page_size: int = option_field(16, "tokens per KV page", choices=(8, 16, 32, 64))
    enable_prefix_caching: bool = option_field(True, "reuse the KV pages of equal prompt prefixes")
    cuda_graphs: bool = option_field(True, "replay steps of up to 1,024 tokens as CUDA graphs")
    enable_sleep_mode: bool = option_field(
        False,
        "let the engine sleep: weights go to pinned host memory, the KV cache is dropped, and "
        "waking up needs no load and no new CUDA graphs",
        python_only=True,
    )
    threads: int | None = option_field(
        None, "CPU threads; default: the physical cores that this process may use"
    )
    kernels: Mapping[str, str] = option_field(
        factory=dict, help="OP=VARIANT switches one kernel", flags=("--kernel",)
    )
    seed: int = option_field(0, "seed of requests that set none")

    def __post_init__(self) -> None:
        counts = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_mixed_tokens",
            "max_model_len",
            "kv_cache_bytes",
            "prefix_cache_bytes",
            "state_cache_bytes",
            "threads",
            "tp",
        )
        for name in counts:
            value = getattr(self, name)
            if value is None and name not in ("max_num_seqs", "max_num_batched_tokens", "tp"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"--{name.replace('_', '-')} must be an integer, not {value!r}")
            if value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        _check_field_types(self)
        _check_choice(self, "kv_cache_dtype", BUILD_KV_DTYPE_CHOICES)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise UsageError(
                f"--gpu-memory-utilization must be in (0, 1], not {self.gpu_memory_utilization}"
            )
        if self.page_size not in (8, 16, 32, 64):
            raise UsageError(f"--page-size must be 8, 16, 32 or 64, not {self.page_size}")
        if self.enable_expert_parallel and self.tp == 1:
            raise UsageError(
                "--enable-expert-parallel divides experts over ranks: give --tp 2 or more, or "
                "leave it out"
            )


def config_from_dict(cls: type[T], raw: Mapping[str, Any], source: str) -> T:
    """Make ``cls(**raw)``.

    Raises:
        UsageError: if a key is unknown; the message names it and ``source``.
    """
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - known)
    if unknown:
        raise UsageError(
            f"{source}: unknown option {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    return cls(**raw)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to a dict that JSON can hold, keys in field order."""
    return asdict(config)


def _check_field_types(config: RunConfig) -> None:
    """Check the types: a caller from Python may pass anything, the command line parses them."""
    expected_types: dict[str, tuple[Any, str]] = {
        "device": (str, "cpu, cuda or cuda:N"),
        "page_size": (int, "an integer"),
        "seed": (int, "an integer"),
        "gpu_memory_utilization": ((int, float), "a number"),
        "enable_prefix_caching": (bool, "true or false"),
        "enable_expert_parallel": (bool, "true or false"),
        "cuda_graphs": (bool, "true or false"),
        "enable_sleep_mode": (bool, "true or false"),
        "kernels": (Mapping, "OP=VARIANT pairs, a dict"),
    }
    for name, (cls, description) in expected_types.items():
        value = getattr(config, name)
        if not isinstance(value, cls) or (isinstance(value, bool) and cls is not bool):
            flag = "kernel" if name == "kernels" else name.replace("_", "-")
            raise UsageError(f"--{flag} must be {description}, not {value!r}")
    invalid = [
        item for item in config.kernels.items() if not all(isinstance(part, str) for part in item)
    ]
    if invalid:
        raise UsageError(f"--kernel takes OP=VARIANT, both strings, not {invalid[0]!r}")


def _check_smoothing_options(config: BuildConfig) -> None:
    """Check alpha and the scales that only one recipe has."""
    try:
        valid = config.alpha == "auto" or 0.0 <= float(config.alpha) <= 1.0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"--alpha must be auto or a number from 0 to 1, not {config.alpha!r}")
    if config.quantization == "smoothquant" and config.activation_scales == "none":
        raise UsageError(
            "--activation-scales none is for fp8; for int8 weights with unquantized activations "
            "use -q int8"
        )


def _check_recipe_option(config: BuildConfig, name: str, declared: RecipeOption) -> None:
    """Check an option's value as its recipe declares; None is "not set" where it is the default."""
    value, flag = getattr(config, name), declared.label(name)
    if declared.choices:
        _check_choice(config, name, declared.choices)
    if value is None:
        return
    if declared.above is not None and not value > declared.above:
        raise UsageError(f"{flag} must be above {declared.above}, not {value}")
    if declared.between is not None and not declared.between[0] <= value <= declared.between[1]:
        low, high = declared.between
        raise UsageError(f"{flag} must be {low} to {high}, not {value}")


def _check_choice(config: Any, name: str, allowed: tuple[Any, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise UsageError(
            f"--{name.replace('_', '-')} {value!r} is not one of {', '.join(map(str, allowed))}"
        )


def non_default_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config that differ from their defaults."""
    default = type(config)()
    pairs = ((each.name, getattr(config, each.name)) for each in fields(config))
    return {name: value for name, value in pairs if value != getattr(default, name)}
