"""Layers of a calibrated recipe: read dense, quantized on the calibration tokens, and written.

In memory are the embedding, one layer in float32, the next one as the checkpoint stores it, and the
calibration tokens. Layers that an interrupted build has finished are read back and only run
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from modelmill.artifact.shard import ShardReader, ShardWriter
from modelmill.artifact.store import EngineStaging
from modelmill.builder.calibration_data import embed_sample_images, load_calibration_samples
from modelmill.builder.plan import BuildPlan
from modelmill.builder.tensor_plan import PlannedTensor
from modelmill.nn.linear import Linear
from modelmill.ops import registry
from modelmill.quant.calibrate import quantize_layer
from modelmill.quant.calibration_state import EMBEDDING_MODULES, CalibrationState, QuantizableLayer
from modelmill.weights import base
from modelmill.weights.dense import DenseWeight as Dense


class LayerQuantizer:
    """Quantizes the layers of one build, from the first to the last; ``close`` must be called.

    Raises:
        UsageError: if the calibration data cannot be used.
    """

    def __init__(self, plan: BuildPlan, staging: EngineStaging) -> None:
        assert plan.recipe is not None, "a build with a recipe"
        assert plan.calibration is not None, "a recipe that is calibrated"
        self.plan = plan
        self.recipe = plan.recipe
        self.staging = staging
        self.device = plan.device
        sizes = plan.model_config
        self.model = plan.family.Model(sizes)
        for name, buffer in list(self.model.named_buffers()):
            if not buffer.is_meta:
                self._set_model_tensor(name, buffer.to(self.device))
        files = plan.checkpoint.tokenizer_files()
        self.samples = load_calibration_samples(
            plan.calibration, files, self.model, plan.config.seed
        )
        self._calibration: CalibrationState | None = None
        self._reader = ThreadPoolExecutor(1)
        self._prefetched: (
            tuple[Sequence[PlannedTensor], Future[list[dict[str, torch.Tensor]]]] | None
        ) = None

    def close(self) -> None:
        """Stop the thread that reads the next layer ahead."""
        self._reader.shutdown()

    def forward_finished_layer(
        self, layer: int, planned_tensors: Iterable[PlannedTensor], shard: str
    ) -> None:
        """Run the calibration tokens through a layer that is already written."""
        reader = ShardReader(self.staging.path / shard)
        self._load_into_model(
            planned_tensors,
            lambda piece: {name: reader.get_tensor(name) for name in piece.stored_info},
        )
        self.calibration_state.forward_layer(QuantizableLayer(self.model.layers[layer]))
        self._release_layer(layer)

    def quantize_and_write(
        self,
        layer: int,
        planned_tensors: Sequence[PlannedTensor],
        writer: ShardWriter,
        next_tensors: Sequence[PlannedTensor] = (),
    ) -> None:
        """Quantize a layer and write it, and record its facts.

        next_tensors: those of the next layer, read meanwhile.
        """
        came, self._prefetched = self._prefetched, None
        read = (
            came[1].result()
            if came is not None and came[0] is planned_tensors
            else self._read_layer_tensors(planned_tensors)
        )
        del came
        if next_tensors:
            self._prefetched = (
                next_tensors,
                self._reader.submit(self._read_layer_tensors, next_tensors),
            )
        self._load_into_model(planned_tensors, lambda _: read.pop(0))
        block = QuantizableLayer(self.model.layers[layer])
        with torch.inference_mode():
            recipe = self.recipe.module_recipe(f"layers.{layer}.")
            facts, scales = quantize_layer(
                block,
                recipe,
                self.calibration_state,
                dtype=self.plan.dtype,
                layer_name=f"layers.{layer}",
            )
        self.staging.write_quant_report_and_scales(layer, facts, scales)
        for planned in planned_tensors:
            for name, tensor in self._tensors_to_store(planned).items():
                planned.check_no_overflow(tensor)
                writer.add_tensor(name, tensor)
        self._release_layer(layer)

    @property
    def calibration_state(self) -> CalibrationState:
        """Return the calibration tokens; the first layer embeds them."""
        if self._calibration is None:
            parts = [
                planned
                for planned in self.plan.tensors
                if planned.module.partition(".")[0] in EMBEDDING_MODULES
            ]
            self._load_into_model(parts, self._read_planned_tensor)
            ops = registry.select_backends(self.device, self.plan.config.kernels)
            ids = [sample.ids for sample in self.samples]
            shown = embed_sample_images(self.samples, self.model, self._load_submodules, ops)
            self._calibration = CalibrationState.from_ids(self.model, ids, ops, self.device, shown)
            for planned in parts:  # a table of layers' inputs may be the largest tensor
                if planned.module.partition(".")[0] != "embed":
                    self._set_model_tensor(planned.rule.target, torch.empty(0, device="meta"))
        return self._calibration

    def _read_planned_tensor(self, planned: PlannedTensor) -> dict[str, torch.Tensor]:
        """Return a tensor of the checkpoint by its name in the model."""
        [tensor] = planned.read(self.plan.checkpoint, self.plan.dtype).values()
        return {
            planned.rule.target: tensor
            if planned.weight_format is not None
            else tensor.to(planned.dtype)
        }

    def _read_layer_tensors(
        self, planned_tensors: Iterable[PlannedTensor]
    ) -> list[dict[str, torch.Tensor]]:
        return [self._read_planned_tensor(planned) for planned in planned_tensors]

    def _load_submodules(self, prefix: str) -> None:
        self._load_into_model(
            [planned for planned in self.plan.tensors if planned.rule.target.startswith(prefix)],
            self._read_planned_tensor,
        )

    def _load_into_model(
        self,
        planned_tensors: Iterable[PlannedTensor],
        read: Callable[[PlannedTensor], Mapping[str, torch.Tensor]],
    ) -> None:
        for planned in planned_tensors:
            tensors = read(planned)
            module = self.model.get_submodule(planned.module)
            if planned.weight_format is None:
                self._set_model_tensor(
                    planned.rule.target, tensors[planned.rule.target].to(self.device).float()
                )
            elif set(tensors) == {f"{planned.module}.weight"}:
                assert isinstance(module, Linear)
                # transfer in the stored dtype, then widen: half the bytes
                module.weight = Dense(
                    tensors[f"{planned.module}.weight"].to(self.device).float().contiguous()
                )
            else:
                assert isinstance(module, Linear)
                parts = {name.rpartition(".")[2]: t for name, t in tensors.items()}
                module.weight = base.from_tensors(planned.weight_format, parts).to(self.device)

    def _tensors_to_store(self, planned: PlannedTensor) -> dict[str, torch.Tensor]:
        if planned.weight_format is None:
            return {
                planned.rule.target: self.model.get_buffer(planned.rule.target).to(
                    "cpu", planned.dtype
                )
            }
        module = self.model.get_submodule(planned.module)
        assert isinstance(module, Linear)
        parts = module.weight.to("cpu").tensors()
        if planned.weight_format == "dense":
            parts = {"weight": parts["weight"].to(planned.dtype)}
        return {f"{planned.module}.{suffix}": part for suffix, part in parts.items()}

    def _set_model_tensor(self, name: str, value: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(module), leaf, value)

    def _release_layer(self, layer: int) -> None:
        self.model.layers[layer] = torch.nn.Identity()
