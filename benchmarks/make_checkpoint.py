"""Write a checkpoint of a known shape with seeded random weights, in Hugging Face layout.

    python benchmarks/make_checkpoint.py qwen-7b out/qwen7b [--layers N] [--weights normal|uniform]

Every tensor is filled with random values (zeros run faster than real data would). ``normal``:
matrices get a spread of 1/sqrt(inputs), so that activations keep their size and the acceptance
contract has something to see. ``uniform``: everything within 0.001, as vLLM makes weights up; where
power is the limit, what is multiplied decides the time too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.model_shapes import SHAPES, tensors, with_num_layers

NORMAL, UNIFORM = "normal", "uniform"
UNIFORM_RANGE = 1e-3
"""Uniform weights are within it: what vLLM's ``load_format="dummy"`` draws, norms and biases as
well.
"""


def fill(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    weights: str = NORMAL,
) -> torch.Tensor:
    """Fill a tensor with seeded random weights.

    normal: norm weights around 1, embeddings of unit standard deviation, matrices of
    1/sqrt(inputs). uniform: every tensor uniform.
    """
    if weights == UNIFORM:
        drawn = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)
        return ((2 * drawn - 1) * UNIFORM_RANGE).to(dtype).cpu()
    value = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    if len(shape) == 1:
        norm = name.endswith("weight")
        value = value * 0.1 + (1.0 if norm else 0.0)
    elif "wte" not in name and "embed" not in name:
        # Conv1D keeps [in, out]
        inputs = shape[0] if name.startswith("h.") else shape[1]
        value = value * inputs**-0.5
    return value.to(dtype).cpu()


def main() -> None:
    """Write the shards, the index and the config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, help="other than the shape's, for a dry run")
    parser.add_argument(
        "--weights", choices=(NORMAL, UNIFORM), default=NORMAL, help="how they are drawn"
    )
    args = parser.parse_args()
    config = with_num_layers(args.shape, args.layers)
    dtype = getattr(torch, str(config["torch_dtype"]))
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(
        args.seed
    )
    args.out.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for number, shard in enumerate(tensors(config)):
        file = f"model-{number:05d}.safetensors"
        drawn = {
            name: fill(name, shape, dtype, generator, args.weights) for name, shape in shard.items()
        }
        save_file(drawn, args.out / file)
        where |= dict.fromkeys(shard, file)
    (args.out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{args.out}: {len(where)} tensors")


if __name__ == "__main__":
    main()
