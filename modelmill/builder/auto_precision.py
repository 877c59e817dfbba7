"""``-q auto``: gives each layer the fewest bits that keep an accuracy limit, on calibration data.

The layers are read once. Besides the activations of the unquantized model, those of models with one
quantized layer each are computed; at the end their next-token distributions give the KL of each
quantized layer (quant.bit_allocation). The choice is then measured as a whole on more tokens, mean
plus standard error, and corrected until the limit holds. Quantization here is fast and coarse; the
build rounds int4 layers with --method, which has a smaller error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.builder.calibration_data import (
    CalibrationSource,
    embed_sample_images,
    find_calibration_source,
    load_calibration_samples,
)
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import ResolvedRule, apply_rule
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.progress_callback import Progress
from modelmill.nn.linear import Linear
from modelmill.ops import registry
from modelmill.quant.bit_allocation import (
    BIT_CHOICES,
    UNQUANTIZED_CHOICE,
    LayerBitOption,
    allocate_bits,
    quantize_layer_linears,
)
from modelmill.quant.calibration_state import (
    EMBEDDING_MODULES,
    CalibrationState,
    QuantizableLayer,
)
from modelmill.weights.base import WeightFormat, pack_as_format
from modelmill.weights.dense import DenseWeight as Dense

AUTO_QUANTIZATION = "auto"
SEQUENCE_LENGTH = 128
# sequences used to measure single layers and the whole choice
SINGLE_LAYER_SEQUENCES, WHOLE_CHOICE_SEQUENCES = 4, 16
MAX_BUDGET_ROUNDS = 6
LOGIT_ROWS_PER_BLOCK = 256


@dataclass(frozen=True)
class AccuracyLimits:
    """Limits of a choice; None: no such limit.

    Attributes:
        max_kl: nats per token.
        max_ppl_rise: relative rise of the perplexity.
    """

    max_kl: float | None
    max_ppl_rise: float | None

    @property
    def kl_budget(self) -> float:
        """Return the initial KL budget.

        For a confident model, the KL equals the rise of its log perplexity.
        """
        return min(
            self.max_kl if self.max_kl is not None else math.inf,
            math.inf if self.max_ppl_rise is None else math.log1p(self.max_ppl_rise),
        )

    def measured_to_limit_ratio(self, measured: MeasuredDivergence) -> float:
        """Return the measured values relative to the limit; above 1 the limit is exceeded."""
        shares = [0.0 if self.max_kl is None else measured.kl / self.max_kl]
        if self.max_ppl_rise is not None:
            shares.append(math.expm1(min(measured.log_ppl_rise, 50.0)) / self.max_ppl_rise)
        return max(shares)


@dataclass(frozen=True)
class MeasuredDivergence:
    """Divergence of a whole choice, mean plus standard error.

    Attributes:
        kl: nats per token.
        rise: rise of the log perplexity.
    """

    kl: float
    log_ppl_rise: float


@dataclass(frozen=True)
class AutoPrecisionResult:
    """The measurements of ``-q auto``: the choice, and all options by layer."""

    chosen: tuple[LayerBitOption, ...]
    layer_options: tuple[tuple[LayerBitOption, ...], ...]
    measured: MeasuredDivergence

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able object."""
        layers = [
            {
                "layer": i,
                "bit_choice": now.bit_choice,
                "bytes": now.nbytes,
                "kl": {o.bit_choice: o.kl for o in each},
            }
            for i, (now, each) in enumerate(zip(self.chosen, self.layer_options, strict=True))
        ]
        return {
            "layers": layers,
            "kl": self.measured.kl,
            "log_perplexity": self.measured.log_ppl_rise,
        }


def parse_accuracy_limits(config: BuildConfig) -> AccuracyLimits:
    """Read the limits of the options.

    Raises:
        UsageError: if no limit is set, or a limit that no choice can keep.
    """
    kl, rise = config.max_kl, config.max_ppl_increase
    if kl is None and rise is None:
        raise UsageError(
            "-q auto needs a limit: --max-kl 0.02 (nats a token) or --max-ppl-increase 1 (per cent)"
        )
    return AccuracyLimits(kl, None if rise is None else rise / 100)


class LayerStreamer:
    """Reads the unquantized layers of a checkpoint in float32, one after another."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Any,
        model_config: Any,
        renames: Sequence[ResolvedRule],
        device: str,
    ) -> None:
        self.checkpoint = checkpoint
        self.model_config = model_config
        self.device = device
        self.renames = renames
        self.model = family.Model(model_config)
        for name, buffer in list(self.model.named_buffers()):
            if not buffer.is_meta:
                self._set_model_tensor(name, buffer.to(device))
        for part in EMBEDDING_MODULES:
            self.load_submodules(f"{part}.")

    def stream_layers(self) -> Iterator[QuantizableLayer]:
        """Yield the layers; each is freed before the next is read."""
        for index in range(self.model_config.layers):
            module = self.model.layers[index]
            self.load_submodules(f"layers.{index}.")
            yield QuantizableLayer(module)
            for linear in module.modules():
                if isinstance(linear, Linear):
                    del linear.weight

    def load_final_norm_and_head(self) -> None:
        """Load the final norm and the projection to the vocabulary."""
        self.load_submodules("norm.")
        self.load_submodules("head.")
        if self.model_config.tied:
            self.model.head.weight = Dense(self.model.embed.weight)

    def stream_logits(
        self, calibration: CalibrationState, head_weight: WeightFormat | None = None
    ) -> Iterator[torch.Tensor]:
        """Yield the logits [rows, V] of all tokens, some rows at a time.

        head_weight: used instead of the checkpoint's.
        """
        whole = self.model.head.weight
        for batch in calibration.batches:
            x, _ = self.model.norm(
                batch.x.clone(),
                None if batch.residual is None else batch.residual.clone(),
                batch.step,
            )
            for part in x.split(LOGIT_ROWS_PER_BLOCK):
                self.model.head.weight = whole if head_weight is None else head_weight
                logits = self.model.head(part, batch.step)
                self.model.head.weight = whole
                yield logits

    def load_submodules(self, prefix: str) -> None:
        """Load the modules below the prefix, in float32."""
        for resolved in self.renames:
            if not resolved.target.startswith(prefix):
                continue
            tensor = (
                apply_rule(resolved, self.checkpoint.get, self.checkpoint.tensor_info)
                .float()
                .to(self.device)
                .contiguous()
            )
            module, _, leaf = resolved.target.rpartition(".")
            submodule = self.model.get_submodule(module)
            if isinstance(submodule, Linear) and leaf == "weight":
                submodule.weight = Dense(tensor)
            else:
                self._set_model_tensor(resolved.target, tensor)

    def _set_model_tensor(self, name: str, value: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(module), leaf, value)


def resolve_auto_precision(
    checkpoint: Checkpoint, config: BuildConfig, family: Any, model_config: Any,
    renames: Sequence[ResolvedRule],
    on_progress: Progress | None,
) -> tuple[BuildConfig, AutoPrecisionResult]:  # fmt: skip
    """Resolve ``-q auto`` to a bit choice per layer."""
    parse_accuracy_limits(config)
    target = (
        config.target
        if config.target != "auto"
        else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    device = target if torch.cuda.is_available() else "cpu"
    walk = LayerStreamer(checkpoint, family, model_config, renames, device)
    chosen, options, whole = search_bit_choices(
        walk, config, find_calibration_source(config, model_config.max_len), on_progress
    )
    forms = {str(layer): option.bit_choice for layer, option in enumerate(chosen)}
    return replace(config, layer_recipes=forms), AutoPrecisionResult(
        tuple(chosen), tuple(map(tuple, options)), whole
    )


@torch.inference_mode()
def search_bit_choices(
    streamer: LayerStreamer,
    config: BuildConfig,
    source: CalibrationSource,
    on_progress: Progress | None = None,
) -> tuple[list[LayerBitOption], list[list[LayerBitOption]], MeasuredDivergence]:
    """Search the bit choices.

    Returns:
        The choice by layer, all options by layer, and the measured divergence of the choice.

    Raises:
        UsageError: if the calibration data cannot be used.
    """
    limits = parse_accuracy_limits(config)
    length = min(SEQUENCE_LENGTH, source.max_length)
    some = replace(source, num_samples=WHOLE_CHOICE_SEQUENCES, max_length=length)
    samples = load_calibration_samples(
        some, streamer.checkpoint.tokenizer_files(), streamer.model, config.seed
    )
    sequences = [sample.ids for sample in samples]
    report_progress = on_progress or (lambda *_: None)
    ops = registry.select_backends(streamer.device, config.kernels)
    shown = embed_sample_images(samples, streamer.model, streamer.load_submodules, ops)
    start = CalibrationState.from_ids(streamer.model, sequences, ops, streamer.device, shown)
    count = SINGLE_LAYER_SEQUENCES
    few = CalibrationState.from_ids(
        streamer.model, sequences[:count], ops, streamer.device, shown[:count]
    )
    options, mean_squares = _measure_single_layer_options(
        streamer, start.fork(), few, report_progress
    )
    budget, best = limits.kl_budget, None
    for number in range(MAX_BUDGET_ROUNDS):
        chosen = allocate_bits(options, budget)
        report_progress("auto: the choice as a whole", number, MAX_BUDGET_ROUNDS)
        measured = measure_divergence(
            streamer,
            start.fork(),
            [option.bit_choice for option in chosen],
            mean_squares,
            config.quantize_head,
        )
        ratio = limits.measured_to_limit_ratio(measured)
        if ratio <= 1 and (best is None or _choice_bytes(chosen) < _choice_bytes(best[0])):
            best = (chosen, measured)
        if ratio <= 1 and (
            ratio > 0.9 or number >= 3 or all(o.bit_choice == BIT_CHOICES[0] for o in chosen)
        ):
            break
        budget *= min(max(0.97 / max(ratio, 1e-9), 0.25), 2.0)
        if best is not None and ratio > 1 and number >= 3:
            break
    # no quantized choice keeps the limit; unquantized layers do, unless the head in int8 does not
    if best is None:
        unquantized_layers, measured = (
            [next(o for o in each if o.bit_choice == UNQUANTIZED_CHOICE) for each in options],
            MeasuredDivergence(0.0, 0.0),
        )
        if config.quantize_head:
            measured = measure_divergence(
                streamer,
                start.fork(),
                [UNQUANTIZED_CHOICE] * len(unquantized_layers),
                mean_squares,
                quantize_head=True,
            )
        if limits.measured_to_limit_ratio(measured) > 1:
            raise UsageError("the head in int8 exceeds the limit alone; remove --quantize-head")
        best = (unquantized_layers, measured)
    report_progress("auto: the choice as a whole", MAX_BUDGET_ROUNDS, MAX_BUDGET_ROUNDS)
    return best[0], options, best[1]


def _choice_bytes(chosen: Sequence[LayerBitOption]) -> int:
    return sum(option.nbytes for option in chosen)


def _measure_single_layer_options(
    streamer: LayerStreamer,
    unquantized: CalibrationState,
    probe: CalibrationState,
    on_progress: Progress,
) -> tuple[list[list[LayerBitOption]], list[Mapping[str, Any]]]:
    """Measure each bit choice of each layer with all other layers unquantized.

    Returns:
        The options by layer, and the mean squares of the inputs by layer and site.
    """
    streams: list[tuple[int, str, int, CalibrationState]] = []
    mean_squares: list[Mapping[str, Any]] = []
    sizes: list[int] = []
    for index, block in enumerate(streamer.stream_layers()):
        on_progress("auto: layers alone", index, streamer.model_config.layers)
        for *_, stream in streams:
            stream.forward_layer(block)
        dense = {path: linear.weight for path, linear in block.all_linears().items()}
        mean_squares.append(_forward_measuring_input_mean_square(block, unquantized))
        sizes.append(sum(4 * weight.shape[0] * weight.shape[1] for weight in dense.values()))
        for form in BIT_CHOICES:
            stream = probe.fork()
            nbytes = quantize_layer_linears(block, form, mean_squares[index], dense)
            stream.forward_layer(block)
            streams.append((index, form, nbytes, stream))
        for path, weight in dense.items():
            block.linear_by_path(path).weight = weight
        probe.forward_layer(block)
    streamer.load_final_norm_and_head()
    right = [part.double().log_softmax(-1) for part in streamer.stream_logits(probe)]
    options: list[list[LayerBitOption]] = [[] for _ in mean_squares]
    for layer, form, nbytes, stream in streams:
        kl = _kl_divergence(right, streamer.stream_logits(stream))
        options[layer].append(LayerBitOption(form, nbytes, max(float(kl.mean()), 0.0)))
    for each, size in zip(options, sizes, strict=True):
        each.append(LayerBitOption(UNQUANTIZED_CHOICE, size, 0.0))
    on_progress("auto: layers alone", streamer.model_config.layers, streamer.model_config.layers)
    return options, mean_squares


def measure_divergence(
    streamer: LayerStreamer,
    unquantized: CalibrationState,
    bit_choices: Sequence[str],
    importance: Sequence[Mapping[str, Any]],
    quantize_head: bool = False,
) -> MeasuredDivergence:
    """Compare the quantized model with the unquantized one on all tokens.

    quantize_head: also quantize the head to int8.
    """
    other = unquantized.fork()
    for index, block in enumerate(streamer.stream_layers()):
        unquantized.forward_layer(block)
        dense = {path: linear.weight for path, linear in block.all_linears().items()}
        quantize_layer_linears(block, bit_choices[index], importance[index], dense)
        other.forward_layer(block)
    streamer.load_final_norm_and_head()
    rounded = (
        pack_as_format("int8", streamer.model.head.weight.dequantize(), torch.float32)
        if quantize_head
        else None
    )
    kls, rises = [], []
    targets = torch.cat([_next_token_ids(batch.step) for batch in unquantized.batches])
    first = 0
    for a, b in zip(
        streamer.stream_logits(unquantized), streamer.stream_logits(other, rounded), strict=True
    ):
        right, ours = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kls.append((right.exp() * (right - ours)).sum(-1))
        came = targets[first : first + len(a)]
        known = came >= 0
        first += len(a)
        rises.append((right - ours)[known].gather(-1, came[known, None])[:, 0])
    return MeasuredDivergence(
        _mean_plus_stderr(torch.cat(kls)), _mean_plus_stderr(torch.cat(rises))
    )


def _forward_measuring_input_mean_square(
    block: QuantizableLayer, calibration: CalibrationState
) -> dict[str, torch.Tensor]:
    """Run tokens through a layer; return the mean square of each input channel by site."""
    mean_squares = {}
    for site in block.sites:
        calibration.forward_to_site(block, site)
        mean_squares[site] = torch.cat(
            [x.square().mean(0, keepdim=True) for x in calibration.site_inputs()]
        ).mean(0)
    calibration.forward_to_layer_end(block)
    return mean_squares


def _kl_divergence(
    expected: Sequence[torch.Tensor], logits: Iterator[torch.Tensor]
) -> torch.Tensor:
    each = [
        (r.exp() * (r - part.double().log_softmax(-1))).sum(-1)
        for r, part in zip(expected, logits, strict=True)
    ]
    return torch.cat(each)


def _next_token_ids(step: Any) -> torch.Tensor:
    """Return the token after each token; −1 at the end of a sequence and before an image."""
    after = torch.cat([step.ids[1:], step.ids[:1]])
    ends = step.query_start[1:].long() - 1
    after[ends] = -1
    return after


def _mean_plus_stderr(values: torch.Tensor) -> float:
    """Return the mean plus its standard error."""
    return float(values.mean() + values.std() / len(values) ** 0.5)
