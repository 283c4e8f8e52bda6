"""Time as ratios to the floor: method and floor take turns, and each neighbouring pair gives one ratio.

A GPU's clock drifts with heat and power by more than the differences that matter here; what two neighbours share
cancels in their ratio.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MIN_PAIRS, MAX_PAIRS = 3, 60
MAX_BLOCKS = 9


@dataclass(frozen=True)
class Pairs:
    """Times of neighbouring runs of floor and method, in ms, with SM clock (MHz) and power (W) read meanwhile."""

    floor: Sequence[float]
    method: Sequence[float]
    readings: Sequence[tuple[float, float]]

    def figures(self) -> dict[str, Any]:
        """Returns the medians and percentiles as keys of a row."""
        floor, method = np.asarray(self.floor), np.asarray(self.method)
        ratio = method / floor
        clock = power = None
        if self.readings:
            clock, power = (float(value) for value in np.median(np.asarray(self.readings), axis=0))
        return {
            "ms": float(np.median(method)),
            "ms_p20": float(np.percentile(method, 20)),
            "ms_p80": float(np.percentile(method, 80)),
            "floor_ms": float(np.median(floor)),
            "ratio": float(np.median(ratio)),
            "ratio_p20": float(np.percentile(ratio, 20)),
            "ratio_p80": float(np.percentile(ratio, 80)),
            "pairs": len(ratio),
            "sm_mhz": clock,
            "power_w": power,
        }


def median_ms(pairs: Pairs) -> float:
    """Returns the median time of the method."""
    return float(np.median(pairs.method))


def pair_count(seconds: float, pair_seconds: float) -> int:
    """Returns how many pairs fill `seconds`, within bounds."""
    return int(np.clip(seconds / max(pair_seconds, 1e-9), MIN_PAIRS, MAX_PAIRS))


class Sensor:
    """Reads SM clock and power of the first visible GPU, through NVML or else nvidia-smi; `why_not` if neither."""

    def __init__(self, *, gpu: bool) -> None:
        self.why_not: str | None = None if gpu else "no GPU is measured"
        self._read: Callable[[], tuple[float, float]] | None = None
        if not gpu:
            return
        try:
            self._read = _nvml()
        except Exception as error:  # a driver without NVML has many ways to say so; the reason is kept
            self._read, self.why_not = _nvidia_smi(), f"NVML: {error}"
        if self._read is not None:
            try:
                self._read()
                self.why_not = None
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._read, self.why_not = None, f"{self.why_not}; nvidia-smi: {error}"

    def read(self) -> list[tuple[float, float]]:
        """Returns one reading (MHz, W), or none."""
        return [] if self._read is None else [self._read()]

    def watch(self, done: Callable[[], bool], interval: float = 0.02) -> list[tuple[float, float]]:
        """Reads until `done()`; the device is busy meanwhile, so these are readings under load."""
        readings = []
        while not done():
            readings += self.read()
            time.sleep(interval)
        return readings


def _nvml() -> Callable[[], tuple[float, float]]:
    import pynvml  # pyright: ignore[reportMissingImports]

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(_first_visible())

    def read() -> tuple[float, float]:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        return float(clock), pynvml.nvmlDeviceGetPowerUsage(handle) / 1000

    read()
    return read


def _first_visible() -> int:
    """Returns the number, among all of the machine's GPUs, of the first that CUDA may use."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _nvidia_smi() -> Callable[[], tuple[float, float]] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = [
        "nvidia-smi",
        f"--id={_first_visible()}",
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
    ]

    def read() -> tuple[float, float]:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        clock, power = answer.strip().split(",")
        return float(clock), float(power)

    return read


def host_pairs(
    floor: Callable[[], Any],
    run: Callable[[], Any],
    wait: Callable[[Any], None],
    seconds: float,
    sensor: Sensor,
    block_seconds: float,
) -> Pairs:
    """Times pairs with the host's clock, several calls enqueued at once so that what the host adds vanishes.

    Args:
        floor: enqueues one call of the floor and returns its result.
        run: the same of the method.
        wait: blocks until a result is there.
        seconds: time for all pairs.
        sensor: read while the device works.
        block_seconds: the least time of the calls that are enqueued together.
    """
    readings: list[tuple[float, float]] = []

    def block(call: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        result = None
        for _ in range(count):
            result = call()
        wait(result)
        return (time.perf_counter() - start) / count

    calls = []
    for call in (floor, run):
        block(call, 1)
        calls.append((call, max(1, int(np.ceil(block_seconds / block(call, 1))))))
    once = [block(call, count) for call, count in calls]
    pair_seconds = sum(count * each for (_, count), each in zip(calls, once, strict=True))
    times: list[list[float]] = [[], []]
    for _ in range(pair_count(seconds, pair_seconds)):
        for measured, (call, count) in zip(times, calls, strict=True):
            measured.append(1000 * block(call, count))
    if sensor.why_not is None:  # in a block of its own: a reading takes host time
        result = [call() for call, count in calls for _ in range(count)][-1]
        readings += sensor.read()
        wait(result)
    return Pairs(times[0], times[1], readings)


@dataclass(frozen=True)
class Blocks:
    """Times of a step, in ms, each the mean of a block of steps, with SM clock (MHz) and power (W) read meanwhile."""

    times: Sequence[float]
    steps: int  # of a block
    readings: Sequence[tuple[float, float]]

    def figures(self) -> dict[str, Any]:
        """Returns the median and percentiles as keys of a row."""
        clock = power = None
        if self.readings:
            clock, power = (float(value) for value in np.median(np.asarray(self.readings), axis=0))
        return {
            "step_ms": float(np.median(self.times)),
            "step_ms_p20": float(np.percentile(self.times, 20)),
            "step_ms_p80": float(np.percentile(self.times, 80)),
            "blocks": len(self.times),
            "block_steps": self.steps,
            "sm_mhz": clock,
            "power_w": power,
        }


def host_blocks(step: Callable[[], Any], wait: Callable[[], None], seconds: float, sensor: Sensor) -> Blocks:
    """Times steps with the host's clock in blocks; within one the device does not wait for the host.

    Args:
        step: enqueues one step.
        wait: blocks until the last one is done.
        seconds: time for all blocks; 0: time one step, and read no sensor.
        sensor: read while the device works on a block that is not timed.
    """

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        return 1000 * (time.perf_counter() - start) / count

    wait()
    once = block(1) / 1000
    if not seconds:
        return Blocks([1000 * once], 1, [])
    steps = max(1, round(seconds / MAX_BLOCKS / max(once, 1e-9)))
    blocks = int(np.clip(seconds / max(steps * once, 1e-9), MIN_PAIRS, MAX_BLOCKS))
    times = [block(steps) for _ in range(blocks)]
    readings: list[tuple[float, float]] = []
    if sensor.why_not is None:  # in a block of its own: a reading takes host time
        for _ in range(steps):
            step()
        readings += sensor.read()
        wait()
    return Blocks(times, steps, readings)
