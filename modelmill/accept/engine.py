"""The engine under the measuring rod: its modules' inputs are replaced by the reference's, their outputs compared.

Three passes over the same tokens through the real runtime (its pages, kernels and Step):

* modules: every module reads what the reference's module read, so nothing accumulates and a fault names itself;
* wiring: only the residual stream entering a layer is replaced, so what connects the modules is judged too;
* norms: every norm reads inputs of the size of √eps, where a wrong eps shows in any dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from modelmill.accept.finding import Finding
from modelmill.accept.metrics import compare_tensors
from modelmill.accept.own import spoken
from modelmill.accept.reference import LayerTrace, Reference
from modelmill.accept.tolerances import LAYER_ROUNDED, ROUNDED, Bound, module_bound
from modelmill.accept.walk import OUTPUTS, Other, Walk, inputs, like, pieces, split, stream_args
from modelmill.runtime.loop import Loop

# Rows of the probe for which the final norm and the head are judged: a vocabulary is wide.
HEAD_ROWS = 12


class Bench:
    """One engine and one reference, reading one sequence of ids in one step.

    others: (ids, prompt length) of further sequences that the reference computes along the way, while it holds a
    layer's weights; their residual streams out of the last layer are in ``streams_of_others`` after ``modules``. own:
    the reference computes with the weights that the engine holds (accept.own), so their rounding is no part of it.
    """

    def __init__(
        self,
        loop: Loop,
        reference: Reference,
        ids: Sequence[int],
        others: Sequence[tuple[Sequence[int], int]] = (),
        *,
        own: bool = False,
    ) -> None:
        self.loop = loop
        self.reference = reference
        self.own = own
        self.ids = list(ids)
        self.others = list(others)
        self.streams_of_others: list[torch.Tensor] = []
        self.rows = sorted({round((i + 1) * len(self.ids) / HEAD_ROWS) - 1 for i in range(HEAD_ROWS)} - {-1})
        assert loop.artifact is not None, "a loop made by Loop.open knows its artifact"
        self.dtype = loop.artifact.manifest.build["dtype"]
        self.kinds = spoken(loop.artifact.manifest.weights)
        self.findings: list[Finding] = []
        self._streams: list[torch.Tensor] = []

    # -- the passes -------------------------------------------------------------------------------------------------

    def modules(self, told: Callable[[int], None] = lambda _: None) -> torch.Tensor:
        """Every module on the reference's inputs. Returns the reference's residual stream at the end, [T, H].

        told: called with the number of layers that are done.
        """
        x = self.reference.embed(torch.tensor(self.ids))
        others = [Other(self.reference.embed(torch.tensor(list(ids))), length) for ids, length in self.others]
        state = Walk(self.reference, x, self.rows, others)

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            layer, part = split(name)
            if layer is not None and part == "attn_norm":
                told(layer)
            return self._feed(state, name, args)

        def after(name: str, args: tuple[Any, ...], output: Any) -> None:
            self._judge(state, name, args, output)

        self._run(before, after)
        self._streams = state.streams
        self.streams_of_others = [other.stream for other in others]
        return state.stream

    def wiring(self) -> None:
        """Every layer on the reference's residual stream, its inside left alone; call after ``modules``."""

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            layer, part = split(name)
            if part != "attn_norm" and name != "norm":
                return None
            index = self.reference.num_layers if layer is None else layer
            x, residual = args[0], args[1]
            stream = x if residual is None else x.float() + residual.float()
            expected = self._streams[index] if layer is not None else self._streams[index][self.rows]
            if index > 0:
                self._note(f"layers.{index - 1}", index - 1, "layer", "layer", stream, expected)
            return stream_args(expected, args)

        self._run(before, None)

    def norms(self) -> None:
        """Every norm on inputs of the size of √eps; a norm per head, inside the rotation, too."""
        eps, dtype = self.reference.eps, getattr(torch, self.dtype)
        canonical = {"attn_norm": "input_norm", "mlp_norm": "mlp_norm", "norm": "final_norm"}

        def tiny(width: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(17)
            return (torch.randn(len(self.ids), width, generator=generator) * eps**0.5).to(dtype).float()

        def before(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            part = split(name)[1]
            if part == "attn.rotate":
                return like(tiny(args[0].shape[1]), args[0]), *args[1:]
            return stream_args(tiny(args[0].shape[1])[: len(args[0])], args) if part in canonical else None

        def after(name: str, args: tuple[Any, ...], output: Any) -> None:
            layer, part = split(name)
            if part in canonical:
                x = tiny(args[0].shape[1])[: len(output[0])]
                expected = self.reference.run_norm(layer, canonical[part], x)
                self._note(f"{name}.eps", layer, f"{part}.eps", canonical[part], output[0], expected)
            elif part == "attn.rotate" and layer is not None:
                q = output.reshape(len(output), -1)
                heads = self.reference.normed_heads(layer, tiny(args[0].shape[1])[:, : q.shape[1]])
                if heads is not None:
                    self._note(f"{name}.eps", layer, f"{part}.eps", "q_rot", q, heads)

        self._run(before, after)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _run(self, before: Callable[..., Any], after: Callable[..., Any] | None) -> None:
        wanted = frozenset(self.rows)
        with self.loop.runner.tap(before, after):
            self.loop.scorer().run([self.ids], None, lambda *_: None, lambda _, place: place in wanted)

    def _feed(self, state: Walk, name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The reference's inputs for a module; None leaves it alone."""
        layer, part = split(name)
        if part == "attn_norm" and layer is not None:
            previous = state.trace
            state.enter(layer)
            if previous is None:
                return stream_args(state.stream, args)
            return (
                like(previous["down"].output, args[0]),
                like(previous["post_attn_residual"].output, args[0]),
                *args[2:],
            )
        if name == "norm" and state.trace is not None:
            last = state.trace
            state.leave()
            branch, residual = (last[n].output[self.rows] for n in ("down", "post_attn_residual"))
            return like(branch, args[0]), like(residual, args[0]), *args[2:]
        if name == "head":
            return like(state.final()["final_norm"].output, args[0]), *args[1:]
        trace = state.trace
        if layer is None or trace is None:
            return None
        if part == "mlp_norm":
            return like(trace["o_proj"].output, args[0]), like(state.stream, args[0]), *args[2:]
        given = inputs(part, trace)
        return None if given is None else (like(given, args[0]), *args[1:])

    def _judge(self, state: Walk, name: str, args: tuple[Any, ...], output: Any) -> None:
        """Compare what a module put out."""
        layer, part = split(name)
        if name == "embed":
            self._note(name, None, "embed", "embed", output, state.stream)
        elif name == "norm":
            last = self.reference.num_layers - 1
            self._note(f"layers.{last}.output", last, "output", "output", output[1], state.stream[self.rows])
            self._note(name, None, "norm", "final_norm", output[0], state.final()["final_norm"].output)
        elif name == "head":
            self._note(name, None, "head", "logits", output, state.final()["logits"].output)
        if layer is None or state.trace is None:
            return
        trace, where = state.trace, f"layers.{layer}"
        if part == "attn_norm":
            if layer > 0:
                self._note(f"layers.{layer - 1}.output", layer - 1, "output", "output", output[1], state.stream)
            self._note(name, layer, part, "input_norm", output[0], trace["input_norm"].output)
        elif part == "mlp_norm":
            expected = trace["post_attn_residual"].output
            self._note(f"{where}.attn.residual", layer, "attn.residual", "post_attn_residual", output[1], expected)
            self._note(name, layer, part, "mlp_norm", output[0], trace["mlp_norm"].output)
        elif part in OUTPUTS:
            parent = name.rpartition(".")[0]
            names = [n for n in OUTPUTS[part] if n in trace]
            for piece, canonical in zip(pieces(output, [trace[n].output for n in names]), names, strict=True):
                label = f"{canonical}_proj" if len(names) > 1 else part.rpartition(".")[2]
                path = f"{parent}.{label}"
                self._note(path, layer, path.removeprefix(where + "."), canonical, piece, trace[canonical].output, name)
        elif part == "attn.rotate":
            self._judge_rotation(layer, name, args, output, trace)

    def _judge_rotation(self, layer: int, name: str, args: tuple[Any, ...], q: torch.Tensor, trace: LayerTrace) -> None:
        """q as returned; k and v as they stand in the pages."""
        step = args[2]
        slots, size = step.slots, step.kv.page_size
        rotated = "q_rot" in trace
        tokens = q.shape[0]
        self._note(f"{name}.q", layer, "attn.rotate.q", "q_rot" if rotated else "output", q.reshape(tokens, -1),
                   trace["q_rot" if rotated else "q"].output)  # fmt: skip
        k = step.kv.k[layer][slots // size, :, slots % size].reshape(tokens, -1)
        v = step.kv.v[layer][slots // size, :, slots % size].reshape(tokens, -1)
        self._note(f"{name}.k", layer, "attn.rotate.k", "k_rot" if rotated else "output", k,
                   trace["k_rot" if rotated else "k"].output)  # fmt: skip
        self._note(f"{name}.v", layer, "attn.rotate.v", "output", v, trace["v"].output)

    def _note(
        self,
        name: str,
        layer: int | None,
        module: str,
        canonical: str,
        ours: torch.Tensor,
        expected: torch.Tensor,
        linear: str | None = None,
    ) -> None:
        held = self.kinds.get(linear or name, "dense")
        recipe = held if held in ROUNDED or (held == "int8" and not self.own) else "none"
        if canonical == "layer":
            coarse = sorted(set(self.kinds.values()) & (set(ROUNDED) if self.own else {"int8"}))
            bound = layer_bound(self.dtype, coarse[0] if coarse else "none", len(self.ids))
        else:
            bound = module_bound(canonical, self.dtype, recipe, length=len(self.ids))
        self.findings.append(Finding(name, layer, module, compare_tensors(name, ours, expected), bound))


def layer_bound(dtype: str, recipe: str, length: int) -> Bound:
    """A whole layer run freely on the reference's input: the modules' bounds, added up along its longest path.

    A layer has eight modules in a row; independent errors grow with the root of their number, and the residual
    stream that is added at the end only makes the relative error smaller.
    """
    if recipe in ROUNDED:
        return LAYER_ROUNDED[recipe]
    parts = [module_bound(m, dtype, recipe, length=length) for m in ("q", "q_rot", "attn", "act")]
    root = 8**0.5
    return Bound(
        root * max(b.rel_l2 for b in parts), root * max(b.max_rel for b in parts), 2 * max(b.gain for b in parts)
    )
