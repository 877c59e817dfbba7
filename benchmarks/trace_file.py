"""The conversation trace that benchmarks serve: a file, or ``azure``, which fetches it.

Source: the conversation trace of Azure's LLM inference data set of 2023 (CC BY 4.0), published with
"Splitwise: Efficient generative LLM inference using phase splitting" (Patel et al., ISCA 2024).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import urllib.request
from pathlib import Path

from modelmill.core.env import cache_dir

AZURE = "azure"
URL = (
    "https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
    "b469a113cedca53ddc3bdea71a143dc4b7d8700c/data/AzureLLMInferenceTrace_conv.csv"
)
SHA256 = "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8"
TIMEOUT_S = 60
HELP = f"csv with ContextTokens and GeneratedTokens, or {AZURE!r}: fetched from {URL} (CC BY 4.0)"


def parse_trace(word: str) -> Path:
    """The trace's path from an option's value; for argparse.

    Raises:
        argparse.ArgumentTypeError: no such file, the download failed, or gave another file.
    """
    if word == AZURE:
        return fetch_azure_trace(cache_dir() / "traces" / URL.rpartition("/")[2])
    path = Path(word)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{word} is no file; --trace {AZURE} fetches the trace")
    return path


def fetch_azure_trace(path: Path, url: str = URL, sha256: str = SHA256) -> Path:
    """Return ``path``, downloaded unless it is there; a file with another hash is replaced.

    Raises:
        argparse.ArgumentTypeError: the download failed, or gave another file.
    """
    if path.is_file() and _sha256(path.read_bytes()) == sha256:
        return path
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            content = answer.read()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot fetch {url}: {error}; fetch it elsewhere and give --trace FILE"
        ) from error
    if _sha256(content) != sha256:
        raise argparse.ArgumentTypeError(f"{url} is another file than SHA-256 {sha256} names")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)
    return path


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
