"""Checks an engine's modules: their inputs are replaced by the reference's, outputs compared.

Four passes run over the same tokens through the real runtime (its pages, kernels and Step).
Modules: every module reads the reference's input, so that errors do not accumulate and the faulty
module is named. Wiring: only the residual stream entering a layer is replaced, so that the
connections of modules are checked too. Norms: every norm reads inputs of the size of √eps, where a
wrong eps shows in any dtype. Bounds: modules that have some run on values beyond these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from modelmill.accept.attention_inputs import (
    ATTENTION_INPUT_BOUND_KEYS,
    gather_attention_inputs,
    gather_slots,
)
from modelmill.accept.error_metrics import compare_tensors, incomparable_metrics
from modelmill.accept.extreme_inputs import ExtremeInputRunner
from modelmill.accept.quantized_reference import language_model_weight_formats
from modelmill.accept.reference import ExtraModuleTrace, LayerTrace, ModuleIO, ReferenceModel
from modelmill.accept.reference_trace import (
    ReferenceLayerStepper,
    ReferenceSequence,
    cast_like,
    concat_reference_outputs,
    lookup_reference_value,
    norm_args_summing_to,
    split_fused_output,
    split_layer_path,
)
from modelmill.accept.static_range_check import OutOfRangeRowCounter
from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.accept.tolerance_check_result import ToleranceCheckResult
from modelmill.accept.tolerances import (
    ErrorBound,
    act_quant_layer_bound,
    formats_with_combined_tolerances,
    module_bound,
    weight_formats_with_act_quant,
)
from modelmill.nn.layer_spec import (
    LinearSpec,
    ModuleSpec,
    NormSpec,
    QueryRopeSpec,
    RecurrenceSpec,
    RopeCacheSpec,
    RoutingSpec,
    layer_spec,
)
from modelmill.runtime.engine_core import EngineCore

# Rows of the probe for which the final norm and the head are checked: a vocabulary is wide.
NUM_CHECKED_LOGIT_POSITIONS = 12


class ModuleCheck:
    """One engine and one reference on one sequence of ids in one step.

    other_sequences are (ids, prompt length) of further sequences that the reference computes while
    it has a layer's weights; after ``check_modules`` their residual streams behind the last layer
    are in ``other_streams``, and the experts that it chose in ``routings``. With
    uses_engine_weights the reference computes with the engine's weights
    (accept.quantized_reference), so that the rounding of weights is not part of the difference.
    """

    def __init__(
        self,
        engine_core: EngineCore,
        reference: ReferenceModel,
        ids: Sequence[int],
        other_sequences: Sequence[tuple[Sequence[int], int]] = (),
        *,
        uses_engine_weights: bool = False,
    ) -> None:
        self.engine_core = engine_core
        self.reference = reference
        self.uses_engine_weights = uses_engine_weights
        self.ids = list(ids)
        self.other_sequences = list(other_sequences)
        self.other_streams: list[torch.Tensor] = []
        self.head_rows = sorted(
            {
                round((i + 1) * len(self.ids) / NUM_CHECKED_LOGIT_POSITIONS) - 1
                for i in range(NUM_CHECKED_LOGIT_POSITIONS)
            }
            - {-1}
        )
        self.dtype = engine_core.opened_artifact.manifest.build["dtype"]
        self.weight_formats = language_model_weight_formats(
            engine_core.model, engine_core.opened_artifact.manifest.weight_formats
        )
        layers = engine_core.model_runner.model.get_submodule("layers")
        self.specs = [layer_spec(layer) for layer in layers.children()]
        for spec, layer in zip(self.specs, layers.children(), strict=True):
            spec.check_module_tree(layer)
        self.depth = max(spec.critical_path_length for spec in self.specs) - 1
        self.findings: list[ToleranceCheckResult] = []
        self._streams: list[torch.Tensor] = []
        self._outside: ExtraModuleTrace = {}
        self._extreme_inputs: ExtremeInputRunner | None = None
        self.routings: dict[int, list[torch.Tensor]] = {}
        self._router_logits: dict[int, torch.Tensor] = {}
        self._attention_of_engine_inputs: dict[str, torch.Tensor] = {}
        self.static_ranges = OutOfRangeRowCounter(engine_core.model_runner.model)

    def check_modules(self, on_layer: Callable[[int], None] = lambda _: None) -> torch.Tensor:
        """Check every module on the reference's inputs.

        on_layer: called with the number of finished layers.

        Returns:
            The reference's final residual stream, [T, H].
        """
        own = self.reference.bind_to_sequence(self.ids)
        others = [
            ReferenceSequence.from_ids(self.reference, ids, length)
            for ids, length in self.other_sequences
        ]
        state = ReferenceLayerStepper(
            own, own.embed(torch.tensor(self.ids)), self.head_rows, others
        )
        self._outside = own.extra_module_trace()

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            layer, part = split_layer_path(name)
            if layer is not None and self._reads_layer_input(layer, part):
                on_layer(layer)
            return self._substitute_reference_inputs(state, name, args)

        def after(name: str, args: tuple[Any, ...], output: Any) -> None:
            self._compare_module_output(state, name, args, output)
            self.static_ranges.count_input_rows(name, args)

        self._run_with_hooks(before, after)
        self._streams, self.routings = state.streams, state.routings
        self._extreme_inputs = ExtremeInputRunner(
            self.engine_core, self.reference, state.head_trace()["final_norm"].output
        )
        self.other_streams = [other.stream for other in others]
        return state.stream

    def check_layers_on_reference_stream(self) -> None:
        """Check every layer on the reference's residual stream; call after ``check_modules``."""

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            layer, part = split_layer_path(name)
            if name != "norm" and not (layer is not None and self._reads_layer_input(layer, part)):
                self._compare_router_logits(name, args)
                return self._substitute_reference_routing(name, args)
            index = self.reference.num_layers if layer is None else layer
            x, residual = args[0], args[1]
            stream = x if residual is None else x.float() + residual.float()
            expected = (
                self._streams[index] if layer is not None else self._streams[index][self.head_rows]
            )
            if index > 0:
                self.findings.append(
                    self._compare(
                        f"layers.{index - 1}", index - 1, "layer", "layer", stream, expected
                    )
                )
            return norm_args_summing_to(expected, args)

        self._run_with_hooks(before, None)

    def add_findings(self, findings: Sequence[ToleranceCheckResult]) -> None:
        """Add what another check found of a module."""
        self.findings.extend(findings)

    def check_norm_eps(self) -> None:
        """Check every norm, including QK norms, on inputs of the size of √eps."""
        eps, dtype = self.reference.eps, getattr(torch, self.dtype)

        def tiny(width: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(17)
            return (
                (torch.randn(len(self.ids), width, generator=generator) * eps**0.5)
                .to(dtype)
                .float()
            )

        def tiny_rows(like: torch.Tensor) -> torch.Tensor:
            """Of a norm with several rows a token."""
            return tiny(like.numel() // len(self.ids)).reshape(like.shape)

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            module = self._module_spec(name)
            if name == "norm" or (isinstance(module, NormSpec) and len(module.reads) > 1):
                return norm_args_summing_to(tiny(args[0].shape[1])[: len(args[0])], args)
            if isinstance(module, NormSpec | QueryRopeSpec):
                return cast_like(tiny(args[0].shape[1]), args[0]), *args[1:]
            if self._is_outer_norm_except_final(name):
                return cast_like(tiny_rows(args[0]), args[0]), *args[1:]
            return None

        def after(name: str, args: tuple[Any, ...], output: Any) -> None:
            layer, part = split_layer_path(name)
            module = self._module_spec(name)
            if name == "norm" or isinstance(module, NormSpec):
                canonical = module.reference[0] if module is not None else "final_norm"
                normed = output[0] if isinstance(output, tuple) else output
                x = tiny(args[0].shape[1])[: len(normed)]
                expected = self.reference.run_norm(layer, canonical, x)
                self.findings.append(
                    self._compare(f"{name}.eps", layer, f"{part}.eps", "norm", normed, expected)
                )
            elif self._is_outer_norm_except_final(name):
                expected = self.reference.run_norm(None, name, tiny_rows(args[0]))
                self.findings.append(
                    self._compare(f"{name}.eps", None, f"{part}.eps", "norm", output, expected)
                )
            elif isinstance(module, QueryRopeSpec) and layer is not None:
                q = output.reshape(len(output), -1)
                heads = self.reference.norm_and_rope_queries(
                    layer, tiny(args[0].shape[1])[:, : q.shape[1]]
                )
                if heads is not None:
                    self.findings.append(
                        self._compare(
                            f"{name}.eps", layer, f"{part}.eps", module.arithmetic, q, heads
                        )
                    )

        self._run_with_hooks(before, after)

    def check_extreme_inputs(self) -> None:
        """Check modules with bounds on values beyond these; call after ``check_modules``."""
        runner = self._extreme_inputs
        assert runner is not None, "the modules are checked first"

        def after(name: str, args: tuple[Any, ...], output: Any) -> None:
            del output
            layer, _ = split_layer_path(name)
            for found in runner.run(name, layer, self._module_spec(name), args):
                self.findings.append(self._compare(
                    f"{name}.bound", layer, found.label, found.arithmetic, found.ours,
                    found.expected, name, noise=found.noise,
                ))  # fmt: skip

        self._run_with_hooks(None, after)
        if self.reference.qkv_bound is not None:
            self._record_missing_qkv_clips(runner.clipped_layers)

    def _record_missing_qkv_clips(self, bounded: Collection[int]) -> None:
        """Record the layers whose q, k and v have no bound, where the reference's have one."""
        for layer, spec in enumerate(self.specs):
            if layer not in bounded and any(spec.modules_of_type(RopeCacheSpec)):
                metrics = incomparable_metrics(f"layers.{layer}.attn.qkv_clip")
                limits = module_bound("residual", self.dtype)
                self.findings.append(
                    ToleranceCheckResult(metrics.name, layer, "attn.qkv_clip", metrics, limits)
                )

    def _run_with_hooks(
        self, before: Callable[..., Any] | None, after: Callable[..., Any] | None
    ) -> None:
        head_rows = frozenset(self.head_rows)
        with self.engine_core.model_runner.forward_hooks(before, after):
            TeacherForcedScorer(self.engine_core).run_sequences(
                [self.ids], None, lambda *_: None, lambda _, place: place in head_rows
            )

    def _substitute_reference_inputs(
        self, reference_trace: ReferenceLayerStepper, name: str, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Return a module's arguments with the reference's inputs; None leaves them unchanged."""
        layer, part = split_layer_path(name)
        if name == "head":
            return cast_like(reference_trace.head_trace()["final_norm"].output, args[0]), *args[1:]
        if layer is not None and self._reads_layer_input(layer, part):
            previous = self._reference_branch_and_residual(reference_trace, layer - 1)
            reference_trace.advance_to_layer(layer)
            if previous is None:
                return norm_args_summing_to(reference_trace.stream, args)
            return _norm_args_with_layer_outputs(previous, args)
        if name == "norm":
            previous = self._reference_branch_and_residual(
                reference_trace, self.reference.num_layers - 1
            )
            reference_trace.finish_layer()
            if previous is None:
                return None
            return _norm_args_with_layer_outputs(
                [value[self.head_rows] for value in previous], args
            )
        if name in self._outside:
            inputs = self._outside[name].inputs
            return *map(cast_like, inputs, args), *args[len(inputs) :]
        module, trace = self._module_spec(name), reference_trace.layer_trace
        if module is None or trace is None or layer is None:
            return None
        values = [
            lookup_reference_value(self.specs[layer], value, trace, reference_trace.stream)
            for value in module.reads
        ]
        self._compare_module_inputs(layer, module, args, values)
        replaced = [
            arg if value is None else cast_like(value, arg)
            for value, arg in zip(values, args, strict=False)
        ]
        return *replaced, *args[len(replaced) :]

    def _compare_module_inputs(
        self,
        layer: int,
        module: ModuleSpec,
        args: tuple[Any, ...],
        expected: Sequence[torch.Tensor | None],
    ) -> None:
        """Compare what a module was given, with the bound of the module that has to write it.

        Each module is right on the reference's inputs also where one between them is left out, or
        reads another's output; the bound of a whole layer may hide it where activations are
        rounded.
        """
        for value, arg, right in zip(module.reads, args, expected, strict=False):
            if right is not None and right.numel() == arg.numel():
                writer = self.specs[layer].writer_by_value[value]
                writer_name = f"layers.{layer}.{writer.path}"
                right = self._attention_of_engine_inputs.get(writer_name, right)
                found = self._compare(
                    f"layers.{layer}.{module.path}.input.{value}",
                    layer,
                    f"{module.path}.input",
                    writer.arithmetic,
                    arg.reshape(right.shape),
                    right,
                    writer_name,
                )
                if not found.is_within_bound:  # another row says that it is right
                    self.findings.append(found)

    def _substitute_reference_routing(
        self, name: str, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Return a module's arguments with the reference's choice of experts; None: it reads none.

        Near a tie rounding decides between two experts, and no bound holds.
        """
        layer, _ = split_layer_path(name)
        module = self._module_spec(name)
        if layer not in self.routings or module is None:
            return None
        chosen = {each.writes[0] for each in self.specs[layer].modules_of_type(RoutingSpec)}
        if not chosen & set(module.reads):
            return None
        return (
            tuple(
                cast_like(self.routings[layer][0], arg) if value in chosen else arg
                for value, arg in zip(module.reads, args, strict=False)
            )
            + args[len(module.reads) :]
        )

    def _compare_router_logits(self, name: str, args: tuple[Any, ...]) -> None:
        """Compare what the choice of experts is made from, in a layer that runs freely.

        The choice itself is the reference's, so that a router that reads another value would show
        nowhere else.
        """
        layer, _ = split_layer_path(name)
        module = self._module_spec(name)
        if layer in self._router_logits and isinstance(module, RoutingSpec):
            logits = module.reads[0]
            label = self.specs[layer].writer_by_value[logits].path
            expected = self._router_logits[layer]
            self.findings.append(self._compare(
                f"layers.{layer}.{label}", layer, label, "layer", args[0], expected,
                depth=self.specs[layer].path_lengths[logits] - 1,
            ))  # fmt: skip

    def _is_outer_norm_except_final(self, name: str) -> bool:
        """Return whether a module is a norm outside the layers, beside the last one."""
        return name in self._outside and self._outside[name].arithmetic == "norm"

    def _reads_layer_input(self, layer: int, part: str) -> bool:
        """Return whether a module is the one that reads a layer's (branch, residual)."""
        return part == self.specs[layer].modules[0].path

    def _module_spec(self, name: str) -> ModuleSpec | None:
        """Return what a layer's spec says of a module by its path in the model."""
        layer, part = split_layer_path(name)
        return None if layer is None else self.specs[layer].modules_by_path.get(part)

    def _reference_branch_and_residual(
        self, reference_trace: ReferenceLayerStepper, layer: int
    ) -> list[torch.Tensor] | None:
        """Return the reference's (branch, residual) of the layer that it has entered last."""
        trace = reference_trace.layer_trace
        if trace is None:
            return None
        spec = self.specs[layer]
        values = [
            lookup_reference_value(spec, v, trace, reference_trace.stream) for v in spec.outputs
        ]
        assert all(value is not None for value in values), f"layer {layer} returns such values"
        return [value for value in values if value is not None]

    def _compare_module_output(
        self, reference_trace: ReferenceLayerStepper, name: str, args: tuple[Any, ...], output: Any
    ) -> None:
        """Compare a module's output with the reference."""
        layer, part = split_layer_path(name)
        if layer is None:
            self._compare_non_layer_module(reference_trace, name, output)
            return
        module, trace = self._module_spec(name), reference_trace.layer_trace
        if module is None or trace is None:
            return
        if isinstance(module, RopeCacheSpec):
            self._compare_rope_and_cache(layer, name, args, output, trace)
            return
        attention = trace.get(module.reference[0]) if module.arithmetic == "attention" else None
        if attention is not None and attention.function is not None:
            self._compare_attention(layer, module, name, args, output, attention)
            return
        if isinstance(module, NormSpec) and len(module.writes) > 1:
            normed, stream = output
            if self._reads_layer_input(layer, part) and layer > 0:
                self._compare_residual_stream(layer - 1, stream, reference_trace.stream)
            if module.stream_reference:
                where = module.writes[1]
                expected = concat_reference_outputs(trace, (module.stream_reference,))
                self.findings.append(
                    self._compare(
                        f"layers.{layer}.{where}", layer, where, "residual", stream, expected
                    )
                )
            output = normed
        self._compare_fused_parts(layer, module, name, output, trace)
        if isinstance(module, RoutingSpec):
            router = self.specs[layer].writer_by_value[module.reads[0]]
            self._router_logits[layer] = concat_reference_outputs(trace, router.reference)
        if isinstance(module, RecurrenceSpec):
            self._compare_recurrent_state(layer, module, name, args[-1], trace)
            self._compare_worst_recurrent_head(layer, module, name, output, trace)

    def _compare_attention(
        self,
        layer: int,
        module: ModuleSpec,
        name: str,
        args: tuple[Any, ...],
        output: torch.Tensor,
        attention: ModuleIO,
    ) -> None:
        """Compare attention with the reference's, or with the reference's of what it read.

        The second where the first is out of bounds and what it read is not: the scores may be so
        large that the rounding of the inputs is (accept/attention_inputs.py).
        """
        found = self._compare(name, layer, module.path, module.arithmetic, output, attention.output)
        read = (
            None
            if found.is_within_bound
            else self._attention_inputs_if_within_bound(name, args, attention)
        )
        if read is not None:
            assert attention.function is not None, "the reference keeps the function of attention"
            with torch.no_grad():
                expected = attention.function(*read)
            self._attention_of_engine_inputs[name] = expected
            found = self._compare(name, layer, module.path, module.arithmetic, output, expected)
        self.findings.append(found)

    def _attention_inputs_if_within_bound(
        self, name: str, args: tuple[Any, ...], attention: ModuleIO
    ) -> list[torch.Tensor] | None:
        """Return the queries, keys and values that an attention read.

        None if one of them is out of bounds, as those of another layer's pages are.
        """
        core: Any = self.engine_core.model_runner.model.get_submodule(name)
        read = gather_attention_inputs(attention, core.cache_index, args[0], args[-1])
        if read is None:
            return None
        checked = zip(read, attention.inputs, ATTENTION_INPUT_BOUND_KEYS[: len(read)], strict=True)
        right = all(
            self._compare(name, None, name, arithmetic, ours, expected).is_within_bound
            for ours, expected, arithmetic in checked
        )
        return read if right else None

    def _compare_non_layer_module(
        self, reference_trace: ReferenceLayerStepper, name: str, output: Any
    ) -> None:
        """Compare the embedding, the final norm with the last layer's output, and the logits."""
        if name == "embed":
            self.findings.append(
                self._compare(name, None, "embed", "embedding", output, reference_trace.stream)
            )
        elif name == "norm":
            expected = reference_trace.stream[self.head_rows]
            self._compare_residual_stream(self.reference.num_layers - 1, output[1], expected)
            expected = reference_trace.head_trace()["final_norm"].output
            self.findings.append(self._compare(name, None, "norm", "norm", output[0], expected))
        elif name == "head":
            expected = reference_trace.head_trace()["logits"].output
            self.findings.append(self._compare(name, None, "head", "linear", output, expected))
        elif name in self._outside:
            _, expected, arithmetic = self._outside[name]
            self.findings.append(self._compare(name, None, name, arithmetic, output, expected))

    def _compare_residual_stream(self, layer: int, output: Any, expected: Any) -> None:
        """Compare the residual stream after a layer."""
        self.findings.append(
            self._compare(f"layers.{layer}.output", layer, "output", "residual", output, expected)
        )

    def _compare_fused_parts(
        self, layer: int, module: ModuleSpec, name: str, output: Any, trace: LayerTrace
    ) -> None:
        """Compare a module's output, of a fused linear each part."""
        parent = name.rpartition(".")[0]
        names = module.reference
        expected = [concat_reference_outputs(trace, (part,)) for part in names]
        for ours, canonical, right in zip(
            split_fused_output(output, expected), names, expected, strict=True
        ):
            path = name
            if len(names) > 1:
                is_linear = isinstance(module, LinearSpec)
                leaf = canonical.rpartition(".")[2]
                path = f"{parent}.{leaf}_proj" if is_linear else f"{name}.{leaf}"
            label = path.removeprefix(f"layers.{layer}.")
            self.findings.append(
                self._compare(path, layer, label, module.arithmetic, ours, right, name)
            )

    def _compare_rope_and_cache(
        self, layer: int, name: str, args: tuple[Any, ...], q: torch.Tensor, trace: LayerTrace
    ) -> None:
        """Compare the returned q, and k and v as stored in the KV pages."""
        spec, step, tokens = self._module_spec(name), args[-1], q.shape[0]
        assert isinstance(spec, RopeCacheSpec), f"{name} writes to the KV cache"
        cache = sum(any(each.modules_of_type(RopeCacheSpec)) for each in self.specs[:layer])
        k, v = gather_slots(step.kv.k[cache], step), gather_slots(step.kv.v[cache], step)
        compared = (
            ("q", q, spec.reference[0], spec.arithmetic),
            ("k", k, spec.cache_reference[0], spec.arithmetic),
            ("v", v, spec.cache_reference[1], "residual"),
        )
        for label, ours, canonical, arithmetic in compared:
            expected = concat_reference_outputs(trace, (canonical,))
            where, module = f"{name}.{label}", f"{spec.path}.{label}"
            self.findings.append(
                self._compare(where, layer, module, arithmetic, ours.reshape(tokens, -1), expected)
            )

    def _compare_recurrent_state(
        self, layer: int, spec: RecurrenceSpec, name: str, step: Any, trace: LayerTrace
    ) -> None:
        """Compare the recurrent state behind the last token, as it is in the sequence's slot."""
        module = self.engine_core.model_runner.model.get_submodule(name)
        states = step.state.cache.states[module.state_index]
        state = states[step.state.rows.slots[0]].reshape(1, -1)
        expected = concat_reference_outputs(trace, (spec.state_reference,))
        label = f"{spec.path}.state"
        self.findings.append(
            self._compare(f"{name}.state", layer, label, spec.arithmetic, state, expected)
        )

    def _compare_worst_recurrent_head(
        self, layer: int, spec: RecurrenceSpec, name: str, output: torch.Tensor, trace: LayerTrace
    ) -> None:
        """Compare the outputs of a recurrence's worst head alone; a convolution has no heads.

        Heads that forget slowly return sums over many tokens, beside which a fault of the others
        would not show.
        """
        heads, *sizes = spec.state.shape
        if len(sizes) < 2:
            return
        expected = concat_reference_outputs(trace, spec.reference).float()
        expected = expected.reshape(len(output), heads, -1)
        ours = output.float().view_as(expected)
        errors = (ours - expected).square().sum((0, 2)) / expected.square().sum((0, 2))
        worst = int(errors.nan_to_num(nan=0.0).argmax())
        bound = module_bound(spec.arithmetic, self.dtype, length=len(self.ids))
        # rounded decays move a head's size: the worst seen in bfloat16 is 0.006
        bound = replace(bound, gain=2 * bound.gain)
        metrics = compare_tensors(f"{name}.heads", ours[:, worst], expected[:, worst])
        self.findings.append(
            ToleranceCheckResult(f"{name}.heads", layer, spec.path, metrics, bound)
        )

    def _compare(
        self,
        name: str,
        layer: int | None,
        module: str,
        arithmetic: str,
        ours: torch.Tensor,
        expected: torch.Tensor,
        linear_path: str | None = None,
        depth: int | None = None,
        noise: float = 0.0,
    ) -> ToleranceCheckResult:
        weight_format = self.weight_formats.get(linear_path or name, "dense")
        recipe = (
            weight_format
            if weight_format in weight_formats_with_act_quant()
            or (
                weight_format in formats_with_combined_tolerances() and not self.uses_engine_weights
            )
            else "none"
        )
        if arithmetic == "layer":
            coarse = sorted(
                set(self.weight_formats.values())
                & (
                    weight_formats_with_act_quant()
                    if self.uses_engine_weights
                    else formats_with_combined_tolerances()
                )
            )
            bound = layer_error_bound(
                self.dtype,
                coarse[0] if coarse else "none",
                len(self.ids),
                self.depth if depth is None else depth,
            )
        else:
            bound = module_bound(arithmetic, self.dtype, recipe, length=len(self.ids))
            bound = ErrorBound(bound.rel_l2 + noise, bound.max_rel + noise, bound.gain + noise)
        metrics = compare_tensors(name, ours, expected)
        return ToleranceCheckResult(name, layer, module, metrics, bound)


def _norm_args_with_layer_outputs(
    values: Sequence[torch.Tensor], args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return a norm's (x, residual, …) with a layer's outputs: both, or the stream alone."""
    return *map(cast_like, values, args), *args[len(values) :]


def layer_error_bound(dtype: str, recipe: str, length: int, depth: int) -> ErrorBound:
    """Return the bound of a whole layer that runs freely on the reference's input.

    It is the sum of the modules' bounds along the longest path: independent errors grow with the
    root of the number of modules in a row (``depth``: behind the first norm, whose error is part of
    the product that reads it, to the value that is compared), and adding the residual stream only
    makes the relative error smaller.
    """
    rounded = act_quant_layer_bound(recipe)
    if rounded is not None:
        return rounded
    kinds = ("linear", "rotary", "attention", "activation")
    parts = [module_bound(kind, dtype, recipe, length=length) for kind in kinds]
    root = depth**0.5
    return ErrorBound(
        root * max(b.rel_l2 for b in parts),
        root * max(b.max_rel for b in parts),
        2 * max(b.gain for b in parts),
    )
