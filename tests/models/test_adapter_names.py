"""Every linear layer has the name by which an adapter (LoRA, arXiv:2106.09685) addresses it.

An adapter's file names modules as the checkpoint does. Each matrix of the model, those of experts,
routers and gates too, is made from matrices of the checkpoint by a rule that is linear in each of
them: what the rule makes of an adapter's B·A is the change of the engine's matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from modelmill.builder.model_config import find_family, read_model_config
from modelmill.builder.tensor_plan import resolve_rename_rules
from modelmill.checkpoint.open import open_checkpoint
from modelmill.checkpoint.rename import ResolvedRule, apply_rule
from modelmill.nn.linear import Linear
from tests.models.all_families import CASES
from tests.models.family_cases import make_causal_lm
from tests.models.saved_family import label
from tests.models.tiny_models import save_hf

transformers = pytest.importorskip("transformers")

FAMILIES = (*CASES, "gpt2", "llama", "mistral", "qwen2", "qwen3")
NOT_LINEAR = {"baichuan": "head"}
"""A matrix that is no linear function of the checkpoint's: there an adapter is merged before."""


class Adapted:
    """A family's seeded checkpoint, and the rules that make its matrices."""

    def __init__(self, name: str, folder: Path) -> None:
        CASES[name].save(folder) if name in CASES else save_hf(name, folder)
        self.folder, self.checkpoint = folder, open_checkpoint(folder)
        family = find_family(self.checkpoint)
        sizes, _ = read_model_config(self.checkpoint, family)
        with torch.device("meta"):
            model = family.Model(sizes)
        rules = resolve_rename_rules(self.checkpoint, family, sizes)
        self.rules = {
            rule.target.removesuffix(".weight"): rule
            for rule in rules
            if not rule.how.startswith("ones") and all(map(self.is_matrix, rule.sources))
        }
        tied = {"head"} if sizes.tied else set()
        linears = {path for path, each in model.named_modules() if isinstance(each, Linear)}
        self.linears = linears - tied

    def is_matrix(self, source: str) -> bool:
        """Whether a tensor of the checkpoint has rows, or is a stack of such."""
        return len(self.checkpoint.tensor_info(source).shape) >= 2

    def changed(self, rule: ResolvedRule, source: str) -> Iterator[torch.Tensor]:
        """What the rule makes of a source, of a change, and of their sum; other sources are 0."""
        draw = torch.Generator().manual_seed(0)
        shape = self.checkpoint.tensor_info(source).shape
        first, second = (torch.randn(shape, generator=draw) for _ in range(2))

        def getter(values: torch.Tensor) -> Callable[[str], torch.Tensor]:
            return lambda name: (
                values if name == source else torch.zeros(self.checkpoint.tensor_info(name).shape)
            )

        for values in (first, second, first + second):
            yield apply_rule(rule, getter(values)).float()

    def linear_modules(self) -> set[str]:
        """The names of transformers' linear layers that the file has under these names."""
        from transformers.pytorch_utils import Conv1D

        config = transformers.AutoConfig.from_pretrained(self.folder)
        with torch.device("meta"):
            model = make_causal_lm(config)
        names = {
            f"{name}.weight"
            for name, each in model.named_modules()
            if isinstance(each, nn.Linear | Conv1D)
        }
        return names & set(self.checkpoint.names())


@pytest.mark.parametrize("name", FAMILIES, ids=label)
def test_every_linear_layer_has_its_name_in_the_checkpoint(name: str, tmp_path: Path) -> None:
    family = Adapted(name, tmp_path)
    assert family.linears
    assert family.linears <= family.rules.keys()
    for path, rule in family.rules.items():
        if NOT_LINEAR.get(name) == path:
            continue
        for source in rule.sources:
            first, second, both = family.changed(rule, source)
            assert float(first.abs().max()) > 0, (path, source)
            torch.testing.assert_close(first + second, both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=label(name))
        for name in FAMILIES
        if name in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    ],
)
def test_every_module_that_an_adapter_may_name_is_read(name: str, tmp_path: Path) -> None:
    """The names of the linear layers in transformers' class, from which adapters have theirs."""
    family = Adapted(name, tmp_path)
    modules = family.linear_modules()
    assert modules
    assert modules <= {source for rule in family.rules.values() for source in rule.sources}
