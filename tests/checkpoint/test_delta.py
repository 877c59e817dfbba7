from __future__ import annotations

import pytest
import torch

from modelmill.checkpoint import delta as module
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.errors import CheckpointError, TensorMismatch
from tests.checkpoint.checkpoint_factory import LLAMA_CONFIG, llama_state, write_folder


def folders(tmp_path, base, added, config=None):
    one = write_folder(tmp_path / "base", base)
    two = write_folder(tmp_path / "delta", added, config)
    return one, two


def test_base_and_delta_add_up_and_new_token_rows_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    target = {name: tensor.half() for name, tensor in llama_state(1, vocabulary=21).items()}
    base = {name: tensor.half() for name, tensor in llama_state(2).items()}
    added = {}
    for name, tensor in target.items():
        rows = base[name].shape[0]
        # As the published deltas were made: float16 minus float16, with zeros where the base has no
        # row.
        padded = torch.zeros_like(tensor)
        padded[:rows] = base[name]
        added[name] = tensor - padded
    config = {**LLAMA_CONFIG, "vocab_size": 21}
    one, two = folders(tmp_path, base, added, config)
    (two / "tokenizer.model").write_bytes(b"new")
    (one / "tokenizer.model").write_bytes(b"old")
    opened = open_checkpoint(one, delta=two)
    assert opened.config["vocab_size"] == 21
    assert opened.tokenizer_files() == {"tokenizer.model": b"new"}
    assert sorted(opened.names()) == sorted(target)
    for name, tensor in target.items():
        actual = opened.get(name)
        assert opened.tensor_info(name).shape == actual.shape == tensor.shape
        assert opened.tensor_info(name).decoded_dtype == actual.dtype == torch.float16
        rows = base[name].shape[0]
        assert torch.equal(actual[:rows], base[name] + added[name][:rows])
        assert torch.equal(actual[rows:], tensor[rows:])
        torch.testing.assert_close(actual, tensor, atol=4e-3, rtol=0)
    assert len(opened.raw_container.files()) == 2
    assert opened.fingerprint() != open_checkpoint(one).fingerprint()


def test_rotary_buffers_may_be_on_either_side_only(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    one, two = folders(tmp_path, llama_state(1) | buffer, llama_state(2))
    opened = open_checkpoint(one, delta=two)
    assert torch.equal(opened.get(next(iter(buffer))), torch.ones(4))
    assert opened.tensor_info(next(iter(buffer))).shape == (4,)
    swapped = open_checkpoint(two, delta=one)
    assert next(iter(buffer)) not in swapped.names()


def test_tensors_on_one_side_only_are_named(tmp_path):
    base, added = llama_state(1), llama_state(2)
    del added["model.norm.weight"]
    one, two = folders(tmp_path, base, added)
    with pytest.raises(TensorMismatch, match=r"in one of them only: model\.norm\.weight"):
        open_checkpoint(one, delta=two)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.up_proj.weight", (50, 32)),
        ("model.embed_tokens.weight", (19, 32)),
        ("model.embed_tokens.weight", (20, 31)),
        ("model.norm.weight", (33,)),
    ],
)
def test_only_vocabulary_rows_may_grow(tmp_path, name, shape):
    added = llama_state(2) | {name: torch.zeros(shape)}
    one, two = folders(tmp_path, llama_state(1), added)
    with pytest.raises(TensorMismatch, match="another model"):
        open_checkpoint(one, delta=two)


def test_another_family_is_refused(tmp_path):
    one, two = folders(
        tmp_path, llama_state(1), llama_state(2), {**LLAMA_CONFIG, "model_type": "qwen2"}
    )
    with pytest.raises(CheckpointError, match="delta is of model_type qwen2"):
        open_checkpoint(one, delta=two)
