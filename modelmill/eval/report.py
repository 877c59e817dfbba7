"""Benchmark results as JSON lines with the details needed to repeat the measurement, and plots."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from modelmill.core.errors import UsageError
from modelmill.core.packages import require_package
from modelmill.eval.provenance import provenance

REPORTED_PACKAGES = ("torch", "triton", "transformers", "numpy")


class BenchResult:
    """A measurement, a dataclass, that becomes JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class MeasurementStats:
    """Statistics of several measurements of one quantity, in one unit."""

    median: float
    min: float
    max: float
    p25: float
    p75: float
    p99: float
    runs: int

    @staticmethod
    def from_values(values: Sequence[float]) -> MeasurementStats:
        """Compute the statistics of ``values``. Raises ValueError if there are none."""
        if not values:
            raise ValueError("no measurement was made")
        ordered = sorted(values)
        return MeasurementStats(
            median=statistics.median(ordered),
            min=ordered[0],
            max=ordered[-1],
            p25=quantile(ordered, 0.25),
            p75=quantile(ordered, 0.75),
            p99=quantile(ordered, 0.99),
            runs=len(ordered),
        )

    def scaled(self, factor: float) -> MeasurementStats:
        """Convert to another unit; factor > 0."""
        return self._transform(lambda value: value * factor)

    def to_rate(self, amount: float) -> MeasurementStats:
        """Convert seconds per ``amount`` items to items per second.

        p99 is then the rate that 99 % of the runs reach.
        """
        rate = self._transform(lambda value: amount / value if value else 0.0)
        return replace(rate, min=rate.max, max=rate.min, p25=rate.p75, p75=rate.p25)

    def _transform(self, change: Callable[[float], float]) -> MeasurementStats:
        fields = {
            "median": self.median,
            "min": self.min,
            "max": self.max,
            "p25": self.p25,
            "p75": self.p75,
        }
        return MeasurementStats(
            **{name: change(value) for name, value in fields.items()},
            p99=change(self.p99),
            runs=self.runs,
        )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Interpolate linearly between the closest ranks of sorted values; q in [0, 1]."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def make_row(
    command: str, figure: str, value: float, unit: str, device: str, **details: Any
) -> dict[str, Any]:
    """Make one row of benchmarks/results.

    It has command, device, versions, date, provenance, figure, value and unit, and the details.
    """
    return {
        "command": command,
        "figure": figure,
        "value": value,
        "unit": unit,
        "device": device,
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **provenance(),
        **{
            name: asdict(each) if isinstance(each, MeasurementStats) else each
            for name, each in details.items()
        },
    }


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a jsonl file and create its folder.

    A row that has no provenance gets that of now.

    Raises UsageError if the file cannot be written.
    """
    origin = provenance()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps({**origin, **each}, ensure_ascii=False) + "\n" for each in rows
            )
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file") from None


def versions() -> dict[str, str]:
    """Return the versions of Python, modelmill and the installed packages that affect speed."""
    import modelmill

    result = {"python": platform.python_version(), "modelmill": modelmill.__version__}
    for name in REPORTED_PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def device_name(device: str) -> str:
    """Return the GPU's name, or the CPU's with the number of torch threads."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(torch.device(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name as the operating system reports it."""
    try:
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check_plot_path(path: Path) -> None:
    """Check before a measurement that ``plot`` can write to ``path``.

    Raises:
        MissingDependency: if matplotlib is not installed.
        UsageError: if matplotlib does not support the file format, or ``path`` is a folder.
    """
    require_package("--plot", "matplotlib", "report")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise UsageError(
            f"--plot {path}: the format {path.suffix} is not supported; use .png, .svg or .pdf"
        )
    if path.is_dir():
        raise UsageError(f"--plot {path}: is a folder; give a file, such as {path / 'plot.png'}")


def plot(path: Path, draw: Any, title: str, shape: tuple[int, int] = (1, 1)) -> None:
    """Draw a new figure with ``draw(axes)`` and write it to ``path`` (png, svg or pdf).

    Args:
        path: the file to write.
        draw: gets the axes, or the list of axes if there are several.
        title: title of the figure.
        shape: rows and columns of subplots.

    Raises:
        MissingDependency: if matplotlib is not installed.
        UsageError: if the file cannot be written.
    """
    check_plot_path(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, columns = shape
    size = (9, 5) if shape == (1, 1) else (4.2 * columns, 3 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained")
    try:
        draw(axes if shape == (1, 1) else list(axes.flat))
        axes.set_title(title) if shape == (1, 1) else figure.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write the plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
