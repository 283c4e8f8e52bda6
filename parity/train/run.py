"""What a training run gives, the four of them by name, and what their losses run."""

from typing import NamedTuple

# What a fused loss asks for by name, (framework, platform) -> implementation: the kernels, where the machine has a GPU.
# In float32 the default of JAX there is XLA GEMMs, which are faster and would not test the kernels. On any
# other platform it is the default that runs, which is CHUNKED.
KERNELS = {("torch", "cuda"): "triton", ("jax", "gpu"): "pallas_triton"}
CHUNKED = "chunked"


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
