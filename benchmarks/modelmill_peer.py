"""Run modelmill as one side of a comparison.

    python -m benchmarks.modelmill_peer '{"engine": …, "run": {…}}'
    python -m benchmarks.modelmill_peer '{"shape": …, "weight_format": …, "run": {…}}'

The second form holds random matrices in a format of ``weight_formats.py``, without an engine on
disk.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peer_process import Prepared, serve_requests, take_over_stdout


def main() -> None:
    """Open the engine and serve.

    run: fields of RunConfig; prompts are never answered from the prefix cache.
    """
    pipe = take_over_stdout()
    options = json.loads(sys.argv[1])
    from modelmill.core.config import RunConfig
    from modelmill.eval.bench_targets import greedy_request
    from modelmill.eval.report import device_name, versions
    from modelmill.runtime.engine_core import EngineCore

    config = RunConfig(**options["run"], enable_prefix_caching=False)
    facts: dict[str, Any] = {}
    if "engine" in options:
        loop = EngineCore.open(Path(options["engine"]), config)
    else:
        from benchmarks.model_step import random_model, weight_bytes

        model = random_model(options["shape"], options["weight_format"])
        facts["weight_bytes"] = weight_bytes(model)
        loop = EngineCore(model, config)
        loop.warm_up()
    count = 0

    def prepare(prompts: Sequence[list[int]], outputs: Sequence[int]) -> Prepared:
        nonlocal count
        requests = []
        for prompt, output in zip(prompts, outputs, strict=True):
            requests.append(greedy_request(f"side-{count}", prompt, output))
            count += 1

        def call() -> int:
            # in the order given: which order it is, is the driver's choice for both sides
            for request in requests:
                loop.add(request)
            tokens = ended = 0
            while ended < len(requests):
                for token in loop.step():
                    tokens += token.token_id is not None
                    ended += token.finish_reason is not None
            return tokens

        return call

    facts |= {
        "device": device_name(loop.device),
        "versions": versions(),
        "kernels": dict(loop.ops.backends),
    }
    serve_requests(prepare, facts, pipe)


if __name__ == "__main__":
    main()
