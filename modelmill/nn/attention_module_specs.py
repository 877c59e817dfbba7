"""What every kind of attention declares of its modules."""

from __future__ import annotations

from modelmill.nn.layer_spec import LinearRowBlock, LinearSpec, ModuleSpec, linear_tensor_names


def input_projection_spec(
    name: str, writes: str, parts: tuple[LinearRowBlock, ...], *, bias: bool
) -> LinearSpec:
    """A projection of the attention's input."""
    return LinearSpec(
        path=f"attn.{name}",
        reads=("attn_input",),
        writes=(writes,),
        site="qkv",
        parts=parts,
        tensors=linear_tensor_names(bias),
    )


def attention_core_spec(tensors: tuple[str, ...]) -> ModuleSpec:
    """The attention of queries over the cached keys and values, with tensors of its own."""
    return ModuleSpec(
        path="attn.core",
        reads=("q",),
        writes=("attn",),
        reference=("attn",),
        arithmetic="attention",
        tensors=tensors,
        op="paged_attention",
    )


def o_proj_spec(hidden: int, *, reads: str, split_columns: str, bias: bool) -> LinearSpec:
    """The output projection of an attention."""
    return LinearSpec(
        path="attn.o_proj",
        reads=(reads,),
        writes=("attn_out",),
        site="o",
        parts=(LinearRowBlock("o_proj", hidden),),
        split_columns=split_columns,
        tensors=linear_tensor_names(bias),
    )
