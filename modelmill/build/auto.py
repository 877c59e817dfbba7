"""``-q auto``: each layer gets the fewest bits that keep a stated limit, measured on calibration data alone.

The layers stream through once. Beside the tokens of the whole model travel those of models with one rounded layer each;
at the end their next-token distributions tell what each rounding costs (quant.search). The choice is then measured as a
whole on more tokens, mean plus standard error, and corrected until the limit holds. Rounding here is quick; the build
rounds int4 layers with --method, which errs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modelmill.build.calibration import Source, find_source
from modelmill.build.shown import embedded, samples_of
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import Resolved, apply
from modelmill.core.config import BuildConfig
from modelmill.core.errors import UsageError
from modelmill.nn.linear import Linear
from modelmill.ops import shelf
from modelmill.quant.block import SITES, Block, Flow, Heads
from modelmill.quant.search import FORMS, WHOLE, Option, choose, hold_all
from modelmill.weights.dense import Held as Dense
from modelmill.weights.held import HeldWeight, pack

AUTO = "auto"
LENGTH = 128
ALONE, TOGETHER = 4, 16  # sequences that single layers and the whole choice are measured on
ROUNDS = 6
ROWS = 256
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Limits:
    """kl: nats a token; rise: of the perplexity, as a share. None: no such limit."""

    kl: float | None
    rise: float | None

    @property
    def budget(self) -> float:
        """The KL to begin with: where a model is sure of what it says, its KL is the rise of its log perplexity."""
        return min(
            self.kl if self.kl is not None else math.inf, math.inf if self.rise is None else math.log1p(self.rise)
        )

    def strain(self, found: Measured) -> float:
        """What is measured as a share of the limit: above 1 it does not hold."""
        shares = [0.0 if self.kl is None else found.kl / self.kl]
        if self.rise is not None:
            shares.append(math.expm1(min(found.rise, 50.0)) / self.rise)
        return max(shares)


@dataclass(frozen=True)
class Measured:
    """Of a choice as a whole, mean plus standard error: kl in nats a token, rise of the log perplexity."""

    kl: float
    rise: float


@dataclass(frozen=True)
class Found:
    """What ``-q auto`` measured: the choice and all options by layer, and the choice as a whole."""

    chosen: tuple[Option, ...]
    options: tuple[tuple[Option, ...], ...]
    whole: Measured

    def describe(self) -> dict[str, Any]:
        """JSON-able."""
        layers = [
            {"layer": i, "form": now.form, "bytes": now.nbytes, "kl": {o.form: o.kl for o in each}}
            for i, (now, each) in enumerate(zip(self.chosen, self.options, strict=True))
        ]
        return {"layers": layers, "kl": self.whole.kl, "log_perplexity": self.whole.rise}


def limits_of(config: BuildConfig) -> Limits:
    """Raises UsageError where no limit is stated, or one that nothing keeps."""
    kl, rise = config.max_kl, config.max_ppl_increase
    if kl is None and rise is None:
        raise UsageError(
            "-q auto needs a limit to keep: --max-kl 0.02 (nats a token) or --max-ppl-increase 1 (per cent)"
        )
    return Limits(kl, None if rise is None else rise / 100)


class Walk:
    """A checkpoint's layers one after another, whole, in float32: the tokens' way through the model."""

    def __init__(
        self, checkpoint: Checkpoint, family: Any, sizes: Any, renames: Sequence[Resolved], device: str
    ) -> None:
        self.checkpoint, self.sizes, self.device = checkpoint, sizes, device
        self.renames = renames
        self.model = family.Model(sizes)
        self.heads = Heads(sizes.heads, sizes.kv_heads, sizes.head_dim)
        for name, buffer in list(self.model.named_buffers()):
            if not buffer.is_meta:
                self._set(name, buffer.to(device))
        self.put("embed.")

    def layers(self) -> Iterator[Block]:
        """Each is gone when the next one comes."""
        for index in range(self.sizes.layers):
            module = self.model.layers[index]
            self.put(f"layers.{index}.")
            yield Block(module, self.heads)
            for linear in module.modules():
                if isinstance(linear, Linear):
                    del linear.held

    def head(self) -> None:
        """The last norm and the projection to the vocabulary."""
        self.put("norm.")
        self.put("head.")
        if self.sizes.tied:
            self.model.head.held = Dense(self.model.embed.weight)

    def logits(self, flow: Flow, head: HeldWeight | None = None) -> Iterator[torch.Tensor]:
        """[rows, V] of all tokens at the end, some rows at a time. head: in the place of the checkpoint's."""
        whole = self.model.head.held
        for batch in flow.batches:
            x, _ = self.model.norm(
                batch.x.clone(), None if batch.residual is None else batch.residual.clone(), batch.step
            )
            for part in x.split(ROWS):
                self.model.head.held = whole if head is None else head
                logits = self.model.head(part, batch.step)
                self.model.head.held = whole
                yield logits

    def put(self, prefix: str) -> None:
        """Fill what the prefix names, in float32."""
        for resolved in self.renames:
            if not resolved.target.startswith(prefix):
                continue
            tensor = apply(resolved, self.checkpoint.get, self.checkpoint.info).float().to(self.device).contiguous()
            module, _, leaf = resolved.target.rpartition(".")
            found = self.model.get_submodule(module)
            if isinstance(found, Linear) and leaf == "weight":
                found.held = Dense(tensor)
            else:
                self._set(resolved.target, tensor)

    def _set(self, name: str, value: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(module), leaf, value)


def resolve_auto(
    checkpoint: Checkpoint, config: BuildConfig, family: Any, sizes: Any, renames: Sequence[Resolved],
    progress: Progress | None,
) -> tuple[BuildConfig, Found | None]:  # fmt: skip
    """``-q auto`` as a form for each layer; None where the forms are given."""
    if config.quantization != AUTO or config.layer_recipes:
        return config, None
    limits_of(config)
    target = config.target if config.target != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    device = target if torch.cuda.is_available() else "cpu"
    walk = Walk(checkpoint, family, sizes, renames, device)
    chosen, options, whole = search(walk, config, find_source(config, sizes.max_len), progress)
    forms = {str(layer): option.form for layer, option in enumerate(chosen)}
    return replace(config, layer_recipes=forms), Found(tuple(chosen), tuple(map(tuple, options)), whole)


@torch.inference_mode()
def search(
    walk: Walk, config: BuildConfig, source: Source, progress: Progress | None = None
) -> tuple[list[Option], list[list[Option]], Measured]:
    """The choice by layer, all options by layer, and the choice as it was measured.

    Raises UsageError for calibration data that is no good.
    """
    limits = limits_of(config)
    some = replace(source, samples=TOGETHER, length=min(LENGTH, source.length))
    samples = samples_of(some, walk.checkpoint.tokenizer_files(), walk.model, config.seed)
    sequences = [sample.ids for sample in samples]
    told = progress or (lambda *_: None)
    ops = shelf.resolve(walk.device, config.kernels)
    shown = embedded(samples, walk.model, walk.put, ops)
    start = Flow.start(walk.model, sequences, ops, walk.device, shown)
    few = Flow.start(walk.model, sequences[:ALONE], ops, walk.device, shown[:ALONE])
    options, energy = _alone(walk, start.fork(), few, told)
    budget, best = limits.budget, None
    for number in range(ROUNDS):
        chosen = choose(options, budget)
        told("auto: the choice as a whole", number, ROUNDS)
        found = together(walk, start.fork(), [option.form for option in chosen], energy, config.quantize_head)
        strain = limits.strain(found)
        if strain <= 1 and (best is None or _size(chosen) < _size(best[0])):
            best = (chosen, found)
        if strain <= 1 and (strain > 0.9 or number >= 3 or all(o.form == FORMS[0] for o in chosen)):
            break
        budget *= min(max(0.97 / max(strain, 1e-9), 0.25), 2.0)
        if best is not None and strain > 1 and number >= 3:
            break
    if best is None:  # nothing rounded holds: whole layers do, and cost nothing but for a rounded head
        kept, found = [next(o for o in each if o.form == WHOLE) for each in options], Measured(0.0, 0.0)
        if config.quantize_head:
            found = together(walk, start.fork(), [WHOLE] * len(kept), energy, head=True)
        if limits.strain(found) > 1:
            raise UsageError("the head in int8 costs more than the limit by itself; leave --quantize-head out")
        best = (kept, found)
    told("auto: the choice as a whole", ROUNDS, ROUNDS)
    return best[0], options, best[1]


def _size(chosen: Sequence[Option]) -> int:
    return sum(option.nbytes for option in chosen)


def _alone(walk: Walk, whole: Flow, few: Flow, told: Progress) -> tuple[list[list[Option]], list[Mapping[str, Any]]]:
    """What each form of each layer costs with all others whole; and the energy of the inputs, by layer and site."""
    streams: list[tuple[int, str, int, Flow]] = []
    energy: list[Mapping[str, Any]] = []
    sizes: list[int] = []
    for index, block in enumerate(walk.layers()):
        told("auto: layers alone", index, walk.sizes.layers)
        for *_, stream in streams:
            stream.run(block)
        dense = {site: block.linear(site).held for site in SITES}
        energy.append(_through(block, whole))
        sizes.append(sum(4 * held.shape[0] * held.shape[1] for held in dense.values()))
        for form in FORMS:
            stream = few.fork()
            nbytes = hold_all(block, form, energy[index], dense)
            stream.run(block)
            streams.append((index, form, nbytes, stream))
        for site, held in dense.items():
            block.linear(site).held = held
        few.run(block)
    walk.head()
    right = [part.double().log_softmax(-1) for part in walk.logits(few)]
    options: list[list[Option]] = [[] for _ in energy]
    for layer, form, nbytes, stream in streams:
        kl = _divergence(right, walk.logits(stream))
        options[layer].append(Option(form, nbytes, max(float(kl.mean()), 0.0)))
    for each, size in zip(options, sizes, strict=True):
        each.append(Option(WHOLE, size, 0.0))
    told("auto: layers alone", walk.sizes.layers, walk.sizes.layers)
    return options, energy


def together(
    walk: Walk, whole: Flow, forms: Sequence[str], energy: Sequence[Mapping[str, Any]], head: bool = False
) -> Measured:
    """The whole model against the one with every layer in its form, on all tokens. head: in int8, too."""
    other = whole.fork()
    for index, block in enumerate(walk.layers()):
        whole.run(block)
        dense = {site: block.linear(site).held for site in SITES}
        hold_all(block, forms[index], energy[index], dense)
        other.run(block)
    walk.head()
    rounded = pack("int8", walk.model.head.held.dense(), torch.float32) if head else None
    kls, rises = [], []
    targets = torch.cat([_next_ids(batch.step) for batch in whole.batches])
    first = 0
    for a, b in zip(walk.logits(whole), walk.logits(other, rounded), strict=True):
        right, ours = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kls.append((right.exp() * (right - ours)).sum(-1))
        came = targets[first : first + len(a)]
        known = came >= 0
        first += len(a)
        rises.append((right - ours)[known].gather(-1, came[known, None])[:, 0])
    return Measured(_upper(torch.cat(kls)), _upper(torch.cat(rises)))


def _through(block: Block, flow: Flow) -> dict[str, torch.Tensor]:
    """Run a flow through a layer; the mean square of each input channel by site."""
    found = {}
    for site in SITES:
        flow.reach(block, site)
        found[site] = torch.cat([x.square().mean(0, keepdim=True) for x in flow.given()]).mean(0)
    flow.leave(block)
    return found


def _divergence(right: Sequence[torch.Tensor], logits: Iterator[torch.Tensor]) -> torch.Tensor:
    each = [(r.exp() * (r - part.double().log_softmax(-1))).sum(-1) for r, part in zip(right, logits, strict=True)]
    return torch.cat(each)


def _next_ids(step: Any) -> torch.Tensor:
    """The token after each of a batch's tokens; −1 behind the last of a sequence, and where a picture follows."""
    after = torch.cat([step.ids[1:], step.ids[:1]])
    ends = step.query_start[1:].long() - 1
    after[ends] = -1
    return after


def _upper(values: torch.Tensor) -> float:
    """Mean plus its standard error."""
    return float(values.mean() + values.std() / len(values) ** 0.5)
