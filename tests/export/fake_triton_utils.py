"""What Triton gives a Python backend, for tests without Triton: the parts of its module that the
backend uses.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

import numpy

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """What ``initialize`` raises."""


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = range(4)

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class Tensor:
    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value

    def as_numpy(self) -> Any:
        return self._value


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.values = {tensor.name: tensor.as_numpy() for tensor in output_tensors}
        self.error, self.last = error, False


class Sender:
    """Keeps what is sent; raises where Triton would."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[InferenceResponse] = queue.SimpleQueue()
        self.ended = self.cancelled = False

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not self.ended, "sent after the final response"
        self.ended = response.last = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self.sent.put(response)

    def is_cancelled(self) -> bool:
        return self.cancelled


class Request:
    def __init__(self, **values: Any) -> None:
        self.sender = Sender()
        self.tensors = {name: Tensor(name, _array(value)) for name, value in values.items()}

    def get_response_sender(self) -> Sender:
        return self.sender

    def answer(self) -> tuple[str, list[int], str, int]:
        """(text, ids, finish_reason, responses) to its end; an error is raised."""
        text, ids, count = "", [], 0
        while True:
            response = self.sender.sent.get(timeout=60)
            if response.error is not None:
                assert response.last
                raise Refused(response.error.message, response.error.code)
            count += 1
            text += response.values["text_output"][0].decode()
            ids += response.values["output_ids"].tolist()
            finish = response.values["finish_reason"][0].decode()
            assert bool(finish) == response.last
            if finish:
                return text, ids, finish, count


class Refused(Exception):
    """The error of a response: (message, code)."""


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return request.tensors.get(name)


class Logger:
    lines: list[str] = []  # noqa: RUF012  Triton's has no instances

    @classmethod
    def log_error(cls, line: str) -> None:
        cls.lines.append(line)


class MetricFamily:
    GAUGE, COUNTER = 1, 0
    page: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.kind = name, kind

    def Metric(self, labels: Mapping[str, str]) -> MetricFamily:
        assert set(labels) == {"model", "version"}
        return self

    def set(self, value: float) -> None:
        assert self.kind == self.GAUGE
        self.page[self.name] = value

    def increment(self, value: float) -> None:
        assert self.kind == self.COUNTER
        assert value > 0
        self.page[self.name] = self.page.get(self.name, 0.0) + value


def _array(value: Any) -> Any:
    if isinstance(value, str | bytes):
        value = [value.encode() if isinstance(value, str) else value]
    if isinstance(value, list) and value and isinstance(value[0], str | bytes):
        return numpy.array(
            [v.encode() if isinstance(v, str) else v for v in value], dtype=numpy.object_
        )
    dtypes = {bool: numpy.bool_, int: numpy.int64, float: numpy.float32}
    listed = value if isinstance(value, list) else [value]
    return numpy.array(listed, dtype=dtypes[type(listed[0])] if listed else numpy.int32)
