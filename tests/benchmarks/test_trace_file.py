"""``--trace``: a file, or the trace that is fetched, checked and kept."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import pytest

from benchmarks import trace_file
from modelmill.eval.datasets import sample_request_lengths

CSV = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
SHA256 = hashlib.sha256(CSV).hexdigest()


def _source(tmp_path: Path) -> str:
    source = tmp_path / "source.csv"
    source.write_bytes(CSV)
    return source.as_uri()


def test_the_trace_is_fetched_once_and_kept(tmp_path: Path) -> None:
    url, path = _source(tmp_path), tmp_path / "cache" / "trace.csv"
    trace_file.fetch_azure_trace(path, url, SHA256)
    assert sample_request_lengths(path, 1) == [(374, 44)]
    (tmp_path / "source.csv").unlink()
    assert trace_file.fetch_azure_trace(path, url, SHA256) == path
    assert [each.name for each in path.parent.iterdir()] == ["trace.csv"]


def test_another_file_is_refused_and_replaced(tmp_path: Path) -> None:
    url, path = _source(tmp_path), tmp_path / "trace.csv"
    path.write_bytes(CSV + b"cut")
    with pytest.raises(argparse.ArgumentTypeError, match="another file"):
        trace_file.fetch_azure_trace(path, url, "0" * 64)
    trace_file.fetch_azure_trace(path, url, SHA256)
    assert path.read_bytes() == CSV


def test_no_network_names_the_source(tmp_path: Path) -> None:
    url = (tmp_path / "absent.csv").as_uri()
    with pytest.raises(argparse.ArgumentTypeError, match=r"absent\.csv.*--trace FILE"):
        trace_file.fetch_azure_trace(tmp_path / "trace.csv", url, SHA256)


def test_a_file_that_is_missing_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="--trace azure fetches"):
        trace_file.parse_trace(str(tmp_path / "absent.csv"))


def test_the_known_hash_is_that_of_the_shared_trace(shared: Path) -> None:
    path = shared / "data/text/azure_conversation_trace.csv"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == trace_file.SHA256
