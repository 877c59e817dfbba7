"""``-q auto``: each layer gets the fewest bits that keep a stated limit, measured on calibration
data alone.

The layers stream through once. Beside the tokens of the whole model travel those of models with one
rounded layer each; at the end their next-token distributions tell what each rounding costs
(quant.search). The choice is then measured as a whole on more tokens, mean plus standard error, and
corrected until the limit holds. Rounding here is quick; the build rounds int4 layers with --method,
which errs less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.builder.calibration_data import CalibrationSource, find_calibration
from modelmill.builder.multimodal_calibration import calibration_samples, embed_images
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import ResolvedRule, apply_rule
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.core.progress_types import StageProgress
from modelmill.nn.linear import Linear
from modelmill.ops import registry
from modelmill.quant.bit_allocation import (
    BIT_CHOICES,
    UNQUANTIZED,
    LayerOption,
    allocate_bits,
    quantize_linears,
)
from modelmill.quant.calibration_state import (
    SITES,
    AttentionHeads,
    CalibrationState,
    QuantizableLayer,
)
from modelmill.weights.base import WeightFormat, pack
from modelmill.weights.dense import DenseWeight as Dense

AUTO = "auto"
SEQUENCE_LENGTH = 128
# sequences that single layers and the whole choice are measured on
SINGLE_LAYER_SEQUENCES, CHOICE_SEQUENCES = 4, 16
MAX_ROUNDS = 6
LOGIT_ROWS = 256


@dataclass(frozen=True)
class AccuracyLimits:
    """max_kl: nats a token; max_ppl_rise: of the perplexity, as a share. None: no such limit."""

    max_kl: float | None
    max_ppl_rise: float | None

    @property
    def kl_budget(self) -> float:
        """The KL to begin with: where a model is sure of what it says, its KL is the rise of its
        log perplexity.
        """
        return min(
            self.max_kl if self.max_kl is not None else math.inf,
            math.inf if self.max_ppl_rise is None else math.log1p(self.max_ppl_rise),
        )

    def limit_ratio(self, measured: MeasuredDivergence) -> float:
        """What is measured as a share of the limit: above 1 it does not hold."""
        shares = [0.0 if self.max_kl is None else measured.kl / self.max_kl]
        if self.max_ppl_rise is not None:
            shares.append(math.expm1(min(measured.log_ppl_rise, 50.0)) / self.max_ppl_rise)
        return max(shares)


@dataclass(frozen=True)
class MeasuredDivergence:
    """Of a choice as a whole, mean plus standard error: kl in nats a token, rise of the log
    perplexity.
    """

    kl: float
    log_ppl_rise: float


@dataclass(frozen=True)
class AutoPrecisionResult:
    """What ``-q auto`` measured: the choice and all options by layer, and the choice as a whole."""

    chosen: tuple[LayerOption, ...]
    layer_options: tuple[tuple[LayerOption, ...], ...]
    measured: MeasuredDivergence

    def describe(self) -> dict[str, Any]:
        """JSON-able."""
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


def accuracy_limits(config: BuildConfig) -> AccuracyLimits:
    """Raises UsageError where no limit is stated, or one that nothing keeps."""
    kl, rise = config.max_kl, config.max_ppl_increase
    if kl is None and rise is None:
        raise UsageError(
            "-q auto needs a limit to keep: --max-kl 0.02 (nats a token) or --max-ppl-increase 1 "
            "(per cent)"
        )
    return AccuracyLimits(kl, None if rise is None else rise / 100)


class LayerStreamer:
    """A checkpoint's layers one after another, whole, in float32: the tokens' way through the
    model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Any,
        model_config: Any,
        renames: Sequence[ResolvedRule],
        device: str,
    ) -> None:
        self.checkpoint, self.model_config, self.device = checkpoint, model_config, device
        self.renames = renames
        self.model = family.Model(model_config)
        self.heads = AttentionHeads(
            model_config.heads, model_config.kv_heads, model_config.head_dim
        )
        for name, buffer in list(self.model.named_buffers()):
            if not buffer.is_meta:
                self._set_tensor(name, buffer.to(device))
        self.load_prefix("embed.")

    def layers(self) -> Iterator[QuantizableLayer]:
        """Each is gone when the next one comes."""
        for index in range(self.model_config.layers):
            module = self.model.layers[index]
            self.load_prefix(f"layers.{index}.")
            yield QuantizableLayer(module, self.heads)
            for linear in module.modules():
                if isinstance(linear, Linear):
                    del linear.weight

    def load_head(self) -> None:
        """The last norm and the projection to the vocabulary."""
        self.load_prefix("norm.")
        self.load_prefix("head.")
        if self.model_config.tied:
            self.model.head.weight = Dense(self.model.embed.weight)

    def logits(
        self, calibration: CalibrationState, head_weight: WeightFormat | None = None
    ) -> Iterator[torch.Tensor]:
        """[rows, V] of all tokens at the end, some rows at a time.

        head_weight: in the place of the checkpoint's.
        """
        whole = self.model.head.weight
        for batch in calibration.batches:
            x, _ = self.model.norm(
                batch.x.clone(),
                None if batch.residual is None else batch.residual.clone(),
                batch.step,
            )
            for part in x.split(LOGIT_ROWS):
                self.model.head.weight = whole if head_weight is None else head_weight
                logits = self.model.head(part, batch.step)
                self.model.head.weight = whole
                yield logits

    def load_prefix(self, prefix: str) -> None:
        """Fill what the prefix names, in float32."""
        for resolved in self.renames:
            if not resolved.target.startswith(prefix):
                continue
            tensor = (
                apply_rule(resolved, self.checkpoint.get, self.checkpoint.info)
                .float()
                .to(self.device)
                .contiguous()
            )
            module, _, leaf = resolved.target.rpartition(".")
            found = self.model.get_submodule(module)
            if isinstance(found, Linear) and leaf == "weight":
                found.weight = Dense(tensor)
            else:
                self._set_tensor(resolved.target, tensor)

    def _set_tensor(self, name: str, value: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(module), leaf, value)


def resolve_auto_precision(
    checkpoint: Checkpoint, config: BuildConfig, family: Any, model_config: Any,
    renames: Sequence[ResolvedRule],
    on_progress: StageProgress | None,
) -> tuple[BuildConfig, AutoPrecisionResult | None]:  # fmt: skip
    """``-q auto`` as a form for each layer; None where the forms are given."""
    if config.quantization != AUTO or config.layer_recipes:
        return config, None
    accuracy_limits(config)
    target = (
        config.target
        if config.target != "auto"
        else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    device = target if torch.cuda.is_available() else "cpu"
    walk = LayerStreamer(checkpoint, family, model_config, renames, device)
    chosen, options, whole = search_bit_choices(
        walk, config, find_calibration(config, model_config.max_len), on_progress
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
    on_progress: StageProgress | None = None,
) -> tuple[list[LayerOption], list[list[LayerOption]], MeasuredDivergence]:
    """The choice by layer, all options by layer, and the choice as it was measured.

    Raises UsageError for calibration data that is no good.
    """
    limits = accuracy_limits(config)
    some = replace(
        source, num_samples=CHOICE_SEQUENCES, max_length=min(SEQUENCE_LENGTH, source.max_length)
    )
    samples = calibration_samples(
        some, streamer.checkpoint.tokenizer_files(), streamer.model, config.seed
    )
    sequences = [sample.ids for sample in samples]
    report_progress = on_progress or (lambda *_: None)
    ops = registry.select_backends(streamer.device, config.kernels)
    shown = embed_images(samples, streamer.model, streamer.load_prefix, ops)
    start = CalibrationState.from_ids(streamer.model, sequences, ops, streamer.device, shown)
    few = CalibrationState.from_ids(
        streamer.model,
        sequences[:SINGLE_LAYER_SEQUENCES],
        ops,
        streamer.device,
        shown[:SINGLE_LAYER_SEQUENCES],
    )
    options, energy = _measure_layers_alone(streamer, start.fork(), few, report_progress)
    budget, best = limits.kl_budget, None
    for number in range(MAX_ROUNDS):
        chosen = allocate_bits(options, budget)
        report_progress("auto: the choice as a whole", number, MAX_ROUNDS)
        found = measure_choice(
            streamer,
            start.fork(),
            [option.bit_choice for option in chosen],
            energy,
            config.quantize_head,
        )
        strain = limits.limit_ratio(found)
        if strain <= 1 and (best is None or _total_bytes(chosen) < _total_bytes(best[0])):
            best = (chosen, found)
        if strain <= 1 and (
            strain > 0.9 or number >= 3 or all(o.bit_choice == BIT_CHOICES[0] for o in chosen)
        ):
            break
        budget *= min(max(0.97 / max(strain, 1e-9), 0.25), 2.0)
        if best is not None and strain > 1 and number >= 3:
            break
    # nothing rounded holds: whole layers do, and cost nothing but for a rounded head
    if best is None:
        kept, found = (
            [next(o for o in each if o.bit_choice == UNQUANTIZED) for each in options],
            MeasuredDivergence(0.0, 0.0),
        )
        if config.quantize_head:
            found = measure_choice(
                streamer, start.fork(), [UNQUANTIZED] * len(kept), energy, quantize_head=True
            )
        if limits.limit_ratio(found) > 1:
            raise UsageError(
                "the head in int8 costs more than the limit by itself; leave --quantize-head out"
            )
        best = (kept, found)
    report_progress("auto: the choice as a whole", MAX_ROUNDS, MAX_ROUNDS)
    return best[0], options, best[1]


def _total_bytes(chosen: Sequence[LayerOption]) -> int:
    return sum(option.nbytes for option in chosen)


def _measure_layers_alone(
    streamer: LayerStreamer,
    unquantized: CalibrationState,
    probe: CalibrationState,
    on_progress: StageProgress,
) -> tuple[list[list[LayerOption]], list[Mapping[str, Any]]]:
    """What each form of each layer costs with all others whole; and the energy of the inputs, by
    layer and site.
    """
    streams: list[tuple[int, str, int, CalibrationState]] = []
    energy: list[Mapping[str, Any]] = []
    sizes: list[int] = []
    for index, block in enumerate(streamer.layers()):
        on_progress("auto: layers alone", index, streamer.model_config.layers)
        for *_, stream in streams:
            stream.forward_layer(block)
        dense = {site: block.linear(site).weight for site in SITES}
        energy.append(_forward_with_energy(block, unquantized))
        sizes.append(sum(4 * held.shape[0] * held.shape[1] for held in dense.values()))
        for form in BIT_CHOICES:
            stream = probe.fork()
            nbytes = quantize_linears(block, form, energy[index], dense)
            stream.forward_layer(block)
            streams.append((index, form, nbytes, stream))
        for site, held in dense.items():
            block.linear(site).weight = held
        probe.forward_layer(block)
    streamer.load_head()
    right = [part.double().log_softmax(-1) for part in streamer.logits(probe)]
    options: list[list[LayerOption]] = [[] for _ in energy]
    for layer, form, nbytes, stream in streams:
        kl = _kl_divergence(right, streamer.logits(stream))
        options[layer].append(LayerOption(form, nbytes, max(float(kl.mean()), 0.0)))
    for each, size in zip(options, sizes, strict=True):
        each.append(LayerOption(UNQUANTIZED, size, 0.0))
    on_progress("auto: layers alone", streamer.model_config.layers, streamer.model_config.layers)
    return options, energy


def measure_choice(
    streamer: LayerStreamer,
    unquantized: CalibrationState,
    bit_choices: Sequence[str],
    importance: Sequence[Mapping[str, Any]],
    quantize_head: bool = False,
) -> MeasuredDivergence:
    """The whole model against the one with every layer as chosen, on all tokens.

    quantize_head: in int8, too.
    """
    other = unquantized.fork()
    for index, block in enumerate(streamer.layers()):
        unquantized.forward_layer(block)
        dense = {site: block.linear(site).weight for site in SITES}
        quantize_linears(block, bit_choices[index], importance[index], dense)
        other.forward_layer(block)
    streamer.load_head()
    rounded = (
        pack("int8", streamer.model.head.weight.dense(), torch.float32) if quantize_head else None
    )
    kls, rises = [], []
    targets = torch.cat([_next_ids(batch.step) for batch in unquantized.batches])
    first = 0
    for a, b in zip(streamer.logits(unquantized), streamer.logits(other, rounded), strict=True):
        right, ours = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kls.append((right.exp() * (right - ours)).sum(-1))
        came = targets[first : first + len(a)]
        known = came >= 0
        first += len(a)
        rises.append((right - ours)[known].gather(-1, came[known, None])[:, 0])
    return MeasuredDivergence(
        _mean_plus_stderr(torch.cat(kls)), _mean_plus_stderr(torch.cat(rises))
    )


def _forward_with_energy(
    block: QuantizableLayer, calibration: CalibrationState
) -> dict[str, torch.Tensor]:
    """Run a flow through a layer; the mean square of each input channel by site."""
    found = {}
    for site in SITES:
        calibration.forward_to(block, site)
        found[site] = torch.cat(
            [x.square().mean(0, keepdim=True) for x in calibration.site_inputs()]
        ).mean(0)
    calibration.finish_layer(block)
    return found


def _kl_divergence(
    expected: Sequence[torch.Tensor], logits: Iterator[torch.Tensor]
) -> torch.Tensor:
    each = [
        (r.exp() * (r - part.double().log_softmax(-1))).sum(-1)
        for r, part in zip(expected, logits, strict=True)
    ]
    return torch.cat(each)


def _next_ids(step: Any) -> torch.Tensor:
    """The token after each of a batch's tokens; −1 behind the last of a sequence, and where a
    picture follows.
    """
    after = torch.cat([step.ids[1:], step.ids[:1]])
    ends = step.query_start[1:].long() - 1
    after[ends] = -1
    return after


def _mean_plus_stderr(values: torch.Tensor) -> float:
    """Mean plus its standard error."""
    return float(values.mean() + values.std() / len(values) ** 0.5)
