"""Measured figures as rows: one JSON line each, with what is needed to measure them again."""

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
from modelmill.core.packages import require

PACKAGES = ("torch", "triton", "transformers", "numpy")


@dataclass(frozen=True)
class Spread:
    """Several measurements of one quantity, in one unit."""

    median: float
    min: float
    max: float
    p25: float
    p75: float
    p99: float
    runs: int

    @staticmethod
    def from_values(values: Sequence[float]) -> Spread:
        """The spread of at least one value. Raises ValueError for none."""
        if not values:
            raise ValueError("no measurement was made")
        ordered = sorted(values)
        return Spread(
            median=statistics.median(ordered),
            min=ordered[0],
            max=ordered[-1],
            p25=quantile(ordered, 0.25),
            p75=quantile(ordered, 0.75),
            p99=quantile(ordered, 0.99),
            runs=len(ordered),
        )

    def scaled(self, factor: float) -> Spread:
        """The same in another unit; factor > 0."""
        return self._transform(lambda value: value * factor)

    def inverse(self, amount: float) -> Spread:
        """Seconds for ``amount`` things become things per second; p99 is what 99 % of the runs
        reach.
        """
        rate = self._transform(lambda value: amount / value if value else 0.0)
        return replace(rate, min=rate.max, max=rate.min, p25=rate.p75, p75=rate.p25)

    def _transform(self, change: Callable[[float], float]) -> Spread:
        kept = {
            "median": self.median,
            "min": self.min,
            "max": self.max,
            "p25": self.p25,
            "p75": self.p75,
        }
        return Spread(
            **{name: change(value) for name, value in kept.items()},
            p99=change(self.p99),
            runs=self.runs,
        )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks of sorted values; q in [0, 1]."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def make_row(
    command: str, figure: str, value: float, unit: str, device: str, **details: Any
) -> dict[str, Any]:
    """One row of benchmarks/results: command, device, versions, date, figure, value and unit, and
    the details.
    """
    return {
        "command": command,
        "figure": figure,
        "value": value,
        "unit": unit,
        "device": device,
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **{
            name: asdict(each) if isinstance(each, Spread) else each
            for name, each in details.items()
        },
    }


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a jsonl file, making its folder.

    Raises UsageError where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as sink:
            sink.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another file") from None


def versions() -> dict[str, str]:
    """Versions of python, modelmill and the packages that decide the speed; absent ones are left
    out.
    """
    import modelmill

    found = {"python": platform.python_version(), "modelmill": modelmill.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's with the number of threads that torch uses."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(torch.device(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name as the system tells it."""
    try:
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def check_plot(path: Path) -> None:
    """To be called before anything is measured: whether ``plot`` could write to ``path``.

    Raises MissingDependency without matplotlib, UsageError for a kind of file that it does not
    write, or a folder.
    """
    require("--plot", "matplotlib", "report")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise UsageError(
            f"--plot {path}: no plot can be written as {path.suffix}; end it in .png, .svg or .pdf"
        )
    if path.is_dir():
        raise UsageError(f"--plot {path}: this is a folder; name a file, as {path / 'plot.png'}")


def plot(path: Path, draw: Any, title: str, shape: tuple[int, int] = (1, 1)) -> None:
    """Draw into a new figure with ``draw(axes)`` and write it to ``path`` (png, svg or pdf).

    shape: rows and columns of diagrams; where there are several, ``draw`` gets the list of their
    axes. Raises MissingDependency without matplotlib, UsageError where the file cannot be written.
    """
    check_plot(path)
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
