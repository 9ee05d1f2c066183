"""Metrics for Prometheus. Each scrape collects a new snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from tunecompile.cli.monitor.gpu import MachineSnapshot, Process
from tunecompile.errors import BadOption

GPU = (  # name, description, how to read it
    ("gpu_memory_used_bytes", "Device memory in use, by all processes.", lambda gpu: gpu.used),
    ("gpu_memory_total_bytes", "Device memory in all.", lambda gpu: gpu.total),
    (
        "gpu_utilization_ratio",
        "Fraction of the last sampling period in which a kernel ran.",
        lambda gpu: None if gpu.busy is None else gpu.busy / 100,
    ),
)
TRAINING = (
    ("training_steps", "Training forwards of the model since it was optimized.", lambda p: p.status.steps),
    ("training_tokens_per_second", "Tokens through the layers, over the last steps.", lambda p: p.status.tokens_per_s),
    (
        "training_step_seconds",
        "From one training forward to the next, the median of the last steps.",
        lambda p: None if p.status.step_ms is None else p.status.step_ms / 1e3,
    ),
    ("training_updated_timestamp_seconds", "When the process last wrote its figures.", lambda p: p.status.updated),
    ("memory_allocated_bytes", "Memory in tensors on the device.", lambda p: p.status.allocated),
    ("memory_budget_bytes", "The memory budget.", lambda p: p.status.budget),
    ("memory_peak_predicted_bytes", "Peak of a step under the plan.", lambda p: p.status.predicted_peak),
    ("memory_peak_measured_bytes", "Peak of a step as the allocator counted it.", lambda p: p.status.measured_peak),
    ("host_memory_resident_bytes", "Host memory of the process.", lambda p: p.resident),
)
PROCESS = ("pid", "model", "device", "gpu_uuid", "rank")  #: labels of a training
FINDINGS = ("training_health_findings", "Lines of `tunecompile.watch` so far, by their code.")


class Collector:
    """Collects a new snapshot for each scrape."""

    def __init__(self, look: Callable[[], MachineSnapshot]):
        self.look = look

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Describe nothing, as registration would otherwise collect."""
        yield from ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics of a new snapshot."""
        snapshot = self.look()
        yield from _families(
            GPU, snapshot.gpus, ("gpu", "uuid", "name"), lambda gpu: (str(gpu.index), gpu.uuid, gpu.name)
        )
        yield from _families(TRAINING, snapshot.processes, PROCESS, _process_labels)
        found = GaugeMetricFamily(f"tunecompile_{FINDINGS[0]}", FINDINGS[1], labels=(*PROCESS, "code"))
        for process in snapshot.processes:
            for code, count in process.status.found.items():
                found.add_metric((*_process_labels(process), code), count)
        yield found


def _families(
    table: tuple, items: tuple, labels: tuple[str, ...], values: Callable[[Any], tuple[str, ...]]
) -> Iterator[GaugeMetricFamily]:
    """The metrics of a table. Unknown figures are omitted, as Prometheus recommends."""
    for name, text, read in table:
        family = GaugeMetricFamily(f"tunecompile_{name}", text, labels=labels)
        for item in items:
            if (value := read(item)) is not None:
                family.add_metric(values(item), value)
        yield family


def _process_labels(process: Process) -> tuple[str, ...]:
    status = process.status
    rank = "" if status.rank is None else str(status.rank)
    return str(status.pid), status.model, status.device, status.gpu or "", rank


def serve(look: Callable[[], MachineSnapshot], host: str, port: int) -> WSGIServer:
    """Serve http://host:port/metrics from a new thread, until the server is shut down.

    Raises:
        BadOption: the address cannot be bound.
    """
    registry = CollectorRegistry()
    registry.register(Collector(look))
    try:
        return start_http_server(port, host, registry)[0]
    except OSError as error:
        raise BadOption(
            option="--prometheus", value=f"{host}:{port}", reason=f"it cannot be bound ({error.strerror or error})"
        ) from error
