"""What a training run gives, and the four of them by name."""

from typing import NamedTuple


class Run(NamedTuple):
    """One loss curve, and what computed it."""

    losses: list[float]  # one a step, from before the step's update
    implementation: str  # of the loss
    platform: str  # "cpu", "cuda", ...
    device: str  # its name
    seconds: float  # compilation included


class Curve(NamedTuple):
    """Which framework trains, and with which loss."""

    framework: str
    fused: bool


CURVES = {
    "torch-fused": Curve("torch", True),
    "torch-unfused": Curve("torch", False),
    "jax-fused": Curve("jax", True),
    "jax-unfused": Curve("jax", False),
}
