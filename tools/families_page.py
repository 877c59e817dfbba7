"""``python -m tools.families_page``: write docs/families.md, the table of supported families.

A row comes from the family's file: its name and the first sentence of its docstring. Whether a GGUF
is read and what the tests compare with come from the code, too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from modelmill.checkpoint.gguf_hf import ARCHITECTURES, ARCHITECTURES_IF_MOE, REFUSED_ARCHITECTURES
from modelmill.core.model_family import LANGUAGE_ENGINE_TYPE, read_family_options
from modelmill.core.module_lookup import list_module_names
from modelmill.quant.recipe import recipe_names
from tools import generated_page

PAGE = Path("docs/families.md")
ENTRIES = generated_page.ROOT / "tests" / "models" / "families"
WITHOUT_A_CLASS = "transformers has no class"
NONE_IN_LLAMA_CPP = ""
AS_LLAMA = "its files name the architecture `llama`, and are read as that"
WITHOUT_GGUF = {
    **dict.fromkeys(
        (
            "cwm", "diffllama", "flex_olmo", "gpt_neo", "helium", "hyperclovax", "lfm3",
            "opt", "sarvam_mla", "vaultgemma",
        ),
        NONE_IN_LLAMA_CPP,
    ),
    **dict.fromkeys(("internlm", "internlm3", "iquestcoder"), AS_LLAMA),
    "gptj": "llama.cpp has the name of its architecture alone, and no computation of it",
    "internlm2": "files of the architecture `internlm2` have q, k and v apart, and are read as "
    "`llama`",
    "ministral": "its files name the architecture `llama` and no windows: read as that, with a "
    "warning",
    "persimmon": "llama.cpp has given up its architecture",
}  # fmt: skip
"""Why no GGUF is read as a family, where the code does not say it."""
HEAD = """<!-- Made by `make families` from modelmill/models. -->

# Families

A family is the `model_type` of a checkpoint's `config.json` ([what else it needs](models.md)).
Every language model has all recipes ({recipes}),
8-bit pages of the KV cache, tensor parallelism, and an acceptance reference of its own. *keep*,
which leaves the integers of GPTQ, AWQ and GGUF as they are, does so for matrices whose rows are not
reordered: q, k and v of families that rotate neighbouring channels or a part of each head, or that
store them by KV head, are dense instead. SmoothQuant and RPTQ fold no scale into an input that no
norm produces alone: the inputs of OLMo's and EXAONE's layers are quantized as they are, and so is
the output of Gemma 4's attention, whose values are normed.

*GGUF*: the architectures (`general.architecture`) whose files are read as the family, or why there
are none, as of llama.cpp of 2026-11; "–" alone: it has no architecture of the family.

The logits of every family are matched in float32 within 1e-4 with those of transformers. Where it
has no class of the family ({plain}),
they are matched with a plain decoder of our own in float64 (`tests/models/plain_forward.py`),
written from the paper and the published configuration.

| `model_type` | models | GGUF |
|---|---|---|
"""
IMAGE_MODELS = """
Models that read or segment images: {names}
([segmentation](segmentation.md), [vision-language](vision-language.md)).

Of checkpoints of `qwen3_5`, `qwen3_5_moe`, `gemma3`, `gemma4`, `gemma4_unified` and `mistral3` the
text half is read, as `qwen3_5_text`, `qwen3_5_moe_text`, `gemma3_text`, (both) `gemma4_text`, and
`mistral`, `ministral3` or `mistral4`. What hybrids keep instead of keys and values:
[recurrent state](recurrent-state.md).
Older files of Falcon (`RefinedWeb`, `RefinedWebModel`) are read as `falcon`.

GGUFs of `qwen3_next` are read as `qwen3_5_moe_text`, which computes the same from matrices that are
apart. Those of `mistral` are read as `llama`, those of `kimi_k2` and `glm4_moe_lite` as
`deepseek_v3`, and those of `solar_open` as `glm4_moe`: llama.cpp's converter writes both alike, and
they compute the same.

Gemma 4's layers have no common size of keys and values, and the last ones of E2B and E4B none of
their own ([layers](layers.md#keys-and-values-of-layers-that-differ)). Its layers with full
attention have heads of 512 channels, which no GPU kernel computes yet: torch does, without CUDA
graphs. The inputs that its layers have beside the stream need a table as large as the rest of E2B;
it stays in the activations' dtype.

[Which experts](build.md#experts-on-a-gpu) a GPU computes one after another.

Refused by name, within a family: OPT-350M (`do_layer_norm_before`), and any value of a key that
changes the computation and is not listed in the family's file.

Computed unlike transformers 5.24, as the models were trained: Nemotron-H bounds no step Δ, where
transformers bounds those of prompts from below by `time_step_min` (huggingface/transformers#48989),
MPT takes `alibi_bias_max` from the config, where transformers takes 8, and Phi-3.5-MoE uses
LongRoPE's `long_factor` behind the trained length, where transformers stays with `short_factor`.
"""


def render() -> dict[Path, str]:
    """The page by its path below the repository."""
    rows: list[str] = []
    images: list[str] = []
    plain: list[str] = []
    for name in list_module_names("modelmill.models"):
        family = importlib.import_module(f"modelmill.models.{name}")
        if read_family_options(family).ENGINE_TYPE != LANGUAGE_ENGINE_TYPE or name == "minigpt4":
            images.append(f"`{name}`")
            continue
        title = (family.__doc__ or "").partition("\n")[0].rstrip(".")
        gguf = ", ".join(f"`{arch}`" for arch in gguf_architectures(name))
        reason = "" if gguf else reason_without_gguf(name)
        rows.append(f"| `{name}` | {title} | {gguf or '–'}{f' ({reason})' if reason else ''} |")
        if not in_transformers(name):
            plain.append(f"`{name}`")
    recipes = ", ".join(f"`{each}`" for each in recipe_names())
    text = HEAD.format(recipes=recipes, plain=", ".join(plain)) + "\n".join(rows) + "\n"
    return {PAGE: text + IMAGE_MODELS.format(names=", ".join(images))}


def gguf_architectures(model_type: str) -> list[str]:
    """The GGUF architectures that a family's files have."""
    every = (*ARCHITECTURES.items(), *ARCHITECTURES_IF_MOE.items())
    return [
        arch
        for arch, each in every
        if model_type in (*(each.chosen_types or (each.model_type or arch,)), *each.alike_types)
    ]


def reason_without_gguf(model_type: str) -> str:
    """Why there is no GGUF of a family; a new family without one needs a reason here."""
    if model_type in REFUSED_ARCHITECTURES:
        return f"refused: a file {REFUSED_ARCHITECTURES[model_type]}"
    return WITHOUT_GGUF[model_type]


def in_transformers(model_type: str) -> bool:
    """Whether transformers has the family, so that the tests compare with it."""
    entry = ENTRIES / f"{model_type}.py"
    without_class = entry.exists() and WITHOUT_A_CLASS in entry.read_text(encoding="utf-8")
    return not without_class and model_type != "qwen"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; with ``--check`` only say whether it is stale."""
    return generated_page.run_pages(argv, __doc__, "families", lambda _: render())


if __name__ == "__main__":
    sys.exit(main())
