"""Checks an engine's modules: their inputs are replaced by the reference's, outputs compared.

Three passes run over the same tokens through the real runtime (its pages, kernels and Step).
Modules: every module reads the reference's input, so that errors do not accumulate and the faulty
module is named. Wiring: only the residual stream entering a layer is replaced, so that the
connections of modules are checked too. Norms: every norm reads inputs of the size of √eps, where a
wrong eps shows in any dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from modelmill.accept.finding import Finding
from modelmill.accept.metrics import compare_tensors
from modelmill.accept.quantized_reference import language_formats
from modelmill.accept.reference import LayerTrace, ReferenceModel
from modelmill.accept.reference_trace import (
    MODULE_OUTPUTS,
    OtherSequence,
    ReferenceTrace,
    cast_like,
    norm_args_for_stream,
    reference_input,
    split_layer_path,
    split_output,
)
from modelmill.accept.token_scorer import TokenScorer
from modelmill.accept.tolerances import (
    ErrorBound,
    act_quant_formats,
    act_quant_layer_bound,
    module_bound,
    whole_formats,
)
from modelmill.runtime.engine_core import EngineCore

# Rows of the probe for which the final norm and the head are checked: a vocabulary is wide.
HEAD_ROWS = 12


class ModuleCheck:
    """One engine and one reference on one sequence of ids in one step.

    other_sequences are (ids, prompt length) of further sequences that the reference computes while
    it has a layer's weights; after ``check_modules`` their residual streams behind the last layer
    are in ``other_streams``. With uses_engine_weights the reference computes with the engine's
    weights (accept.quantized_reference), so that the rounding of weights is not part of the
    difference.
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
            {round((i + 1) * len(self.ids) / HEAD_ROWS) - 1 for i in range(HEAD_ROWS)} - {-1}
        )
        assert engine_core.artifact is not None, (
            "an engine core made by EngineCore.open knows its artifact"
        )
        self.dtype = engine_core.artifact.manifest.build["dtype"]
        self.weight_formats = language_formats(engine_core.artifact.manifest.weight_formats)
        self.findings: list[Finding] = []
        self._streams: list[torch.Tensor] = []

    def check_modules(self, on_layer: Callable[[int], None] = lambda _: None) -> torch.Tensor:
        """Check every module on the reference's inputs.

        on_layer: called with the number of finished layers.

        Returns:
            The reference's final residual stream, [T, H].
        """
        x = self.reference.embed(torch.tensor(self.ids))
        others = [
            OtherSequence(self.reference.embed(torch.tensor(list(ids))), length)
            for ids, length in self.other_sequences
        ]
        state = ReferenceTrace(self.reference, x, self.head_rows, others)

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            layer, part = split_layer_path(name)
            if layer is not None and part == "attn_norm":
                on_layer(layer)
            return self._replace_inputs(state, name, args)

        def after(name: str, args: tuple[Any, ...], output: Any) -> None:
            self._compare_output(state, name, args, output)

        self._run_with_hooks(before, after)
        self._streams = state.streams
        self.other_streams = [other.stream for other in others]
        return state.stream

    def check_wiring(self) -> None:
        """Check every layer on the reference's residual stream; call after ``check_modules``."""

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            layer, part = split_layer_path(name)
            if part != "attn_norm" and name != "norm":
                return None
            index = self.reference.num_layers if layer is None else layer
            x, residual = args[0], args[1]
            stream = x if residual is None else x.float() + residual.float()
            expected = (
                self._streams[index] if layer is not None else self._streams[index][self.head_rows]
            )
            if index > 0:
                self._add_finding(
                    f"layers.{index - 1}", index - 1, "layer", "layer", stream, expected
                )
            return norm_args_for_stream(expected, args)

        self._run_with_hooks(before, None)

    def check_norms(self) -> None:
        """Check every norm, including QK norms, on inputs of the size of √eps."""
        eps, dtype = self.reference.eps, getattr(torch, self.dtype)
        canonical = {"attn_norm": "input_norm", "mlp_norm": "mlp_norm", "norm": "final_norm"}

        def tiny(width: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(17)
            return (
                (torch.randn(len(self.ids), width, generator=generator) * eps**0.5)
                .to(dtype)
                .float()
            )

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            part = split_layer_path(name)[1]
            if part == "attn.rope_cache":
                return cast_like(tiny(args[0].shape[1]), args[0]), *args[1:]
            return (
                norm_args_for_stream(tiny(args[0].shape[1])[: len(args[0])], args)
                if part in canonical
                else None
            )

        def after(name: str, args: tuple[Any, ...], output: Any) -> None:
            layer, part = split_layer_path(name)
            if part in canonical:
                x = tiny(args[0].shape[1])[: len(output[0])]
                expected = self.reference.run_norm(layer, canonical[part], x)
                self._add_finding(
                    f"{name}.eps", layer, f"{part}.eps", canonical[part], output[0], expected
                )
            elif part == "attn.rope_cache" and layer is not None:
                q = output.reshape(len(output), -1)
                heads = self.reference.norm_and_rope_queries(
                    layer, tiny(args[0].shape[1])[:, : q.shape[1]]
                )
                if heads is not None:
                    self._add_finding(f"{name}.eps", layer, f"{part}.eps", "q_rot", q, heads)

        self._run_with_hooks(before, after)

    def _run_with_hooks(self, before: Callable[..., Any], after: Callable[..., Any] | None) -> None:
        head_rows = frozenset(self.head_rows)
        with self.engine_core.model_runner.forward_hooks(before, after):
            TokenScorer(self.engine_core).run(
                [self.ids], None, lambda *_: None, lambda _, place: place in head_rows
            )

    def _replace_inputs(
        self, reference_trace: ReferenceTrace, name: str, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Return a module's arguments with the reference's inputs; None leaves them unchanged."""
        layer, part = split_layer_path(name)
        if part == "attn_norm" and layer is not None:
            previous = reference_trace.layer_trace
            reference_trace.enter_layer(layer)
            if previous is None:
                return norm_args_for_stream(reference_trace.stream, args)
            return (
                cast_like(previous["down"].output, args[0]),
                cast_like(previous["post_attn_residual"].output, args[0]),
                *args[2:],
            )
        if name == "norm" and reference_trace.layer_trace is not None:
            last = reference_trace.layer_trace
            reference_trace.finish_layer()
            branch, residual = (
                last[n].output[self.head_rows] for n in ("down", "post_attn_residual")
            )
            return cast_like(branch, args[0]), cast_like(residual, args[0]), *args[2:]
        if name == "head":
            return cast_like(reference_trace.head_trace()["final_norm"].output, args[0]), *args[1:]
        trace = reference_trace.layer_trace
        if layer is None or trace is None:
            return None
        if part == "mlp_norm":
            return (
                cast_like(trace["o_proj"].output, args[0]),
                cast_like(reference_trace.stream, args[0]),
                *args[2:],
            )
        reference_args = reference_input(part, trace)
        return None if reference_args is None else (cast_like(reference_args, args[0]), *args[1:])

    def _compare_output(
        self, reference_trace: ReferenceTrace, name: str, args: tuple[Any, ...], output: Any
    ) -> None:
        """Compare a module's output with the reference."""
        layer, part = split_layer_path(name)
        if layer is None:
            self._compare_outside_layers(reference_trace, name, output)
            return
        if reference_trace.layer_trace is None:
            return
        trace = reference_trace.layer_trace
        if part == "attn_norm":
            if layer > 0:
                self._compare_stream(layer - 1, output[1], reference_trace.stream)
            self._add_finding(
                name, layer, part, "input_norm", output[0], trace["input_norm"].output
            )
        elif part == "mlp_norm":
            expected = trace["post_attn_residual"].output
            residual = f"layers.{layer}.attn.residual"
            self._add_finding(
                residual, layer, "attn.residual", "post_attn_residual", output[1], expected
            )
            self._add_finding(name, layer, part, "mlp_norm", output[0], trace["mlp_norm"].output)
        elif part in MODULE_OUTPUTS:
            self._compare_projections(layer, part, name, output, trace)
        elif part == "attn.rope_cache":
            self._compare_rope_and_cache(layer, name, args, output, trace)

    def _compare_outside_layers(
        self, reference_trace: ReferenceTrace, name: str, output: Any
    ) -> None:
        """Compare the embedding, the final norm with the last layer's output, and the logits."""
        if name == "embed":
            self._add_finding(name, None, "embed", "embed", output, reference_trace.stream)
        elif name == "norm":
            expected = reference_trace.stream[self.head_rows]
            self._compare_stream(self.reference.num_layers - 1, output[1], expected)
            expected = reference_trace.head_trace()["final_norm"].output
            self._add_finding(name, None, "norm", "final_norm", output[0], expected)
        elif name == "head":
            expected = reference_trace.head_trace()["logits"].output
            self._add_finding(name, None, "head", "logits", output, expected)

    def _compare_stream(self, layer: int, output: Any, expected: Any) -> None:
        """Compare the residual stream after a layer."""
        self._add_finding(f"layers.{layer}.output", layer, "output", "output", output, expected)

    def _compare_projections(
        self, layer: int, part: str, name: str, output: Any, trace: LayerTrace
    ) -> None:
        """Compare each projection of a fused linear."""
        parent = name.rpartition(".")[0]
        names = [n for n in MODULE_OUTPUTS[part] if n in trace]
        outputs = split_output(output, [trace[n].output for n in names])
        for ours, canonical in zip(outputs, names, strict=True):
            label = f"{canonical}_proj" if len(names) > 1 else part.rpartition(".")[2]
            path = f"{parent}.{label}"
            module = path.removeprefix(f"layers.{layer}.")
            expected = trace[canonical].output
            self._add_finding(path, layer, module, canonical, ours, expected, name)

    def _compare_rope_and_cache(
        self, layer: int, name: str, args: tuple[Any, ...], q: torch.Tensor, trace: LayerTrace
    ) -> None:
        """Compare the returned q, and k and v as stored in the KV pages."""
        step = args[2]
        slots, size = step.slots, step.kv.page_size
        rotated = "q_rot" in trace
        tokens = q.shape[0]
        self._add_finding(f"{name}.q", layer, "attn.rope_cache.q", "q_rot" if rotated else "output",
                   q.reshape(tokens, -1),
                   trace["q_rot" if rotated else "q"].output)  # fmt: skip
        k = step.kv.k[layer][slots // size, :, slots % size].reshape(tokens, -1)
        v = step.kv.v[layer][slots // size, :, slots % size].reshape(tokens, -1)
        self._add_finding(f"{name}.k", layer, "attn.rope_cache.k", "k_rot" if rotated else "output",
            k,
                   trace["k_rot" if rotated else "k"].output)  # fmt: skip
        self._add_finding(f"{name}.v", layer, "attn.rope_cache.v", "output", v, trace["v"].output)

    def _add_finding(
        self,
        name: str,
        layer: int | None,
        module: str,
        reference_module: str,
        ours: torch.Tensor,
        expected: torch.Tensor,
        linear_path: str | None = None,
    ) -> None:
        weight_format = self.weight_formats.get(linear_path or name, "dense")
        recipe = (
            weight_format
            if weight_format in act_quant_formats()
            or (weight_format in whole_formats() and not self.uses_engine_weights)
            else "none"
        )
        if reference_module == "layer":
            coarse = sorted(
                set(self.weight_formats.values())
                & (act_quant_formats() if self.uses_engine_weights else whole_formats())
            )
            bound = layer_bound(self.dtype, coarse[0] if coarse else "none", len(self.ids))
        else:
            bound = module_bound(reference_module, self.dtype, recipe, length=len(self.ids))
        self.findings.append(
            Finding(name, layer, module, compare_tensors(name, ours, expected), bound)
        )


def layer_bound(dtype: str, recipe: str, length: int) -> ErrorBound:
    """Return the bound of a whole layer that runs freely on the reference's input.

    It is the sum of the modules' bounds along the longest path: a layer has eight modules in a row,
    independent errors grow with the root of their number, and adding the residual stream only makes
    the relative error smaller.
    """
    rounded = act_quant_layer_bound(recipe)
    if rounded is not None:
        return rounded
    parts = [module_bound(m, dtype, recipe, length=length) for m in ("q", "q_rot", "attn", "act")]
    root = 8**0.5
    return ErrorBound(
        root * max(b.rel_l2 for b in parts),
        root * max(b.max_rel for b in parts),
        2 * max(b.gain for b in parts),
    )
