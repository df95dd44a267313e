"""A network of two convolutions, for trials that must end in seconds on a CPU."""

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .batch_norm import BatchNorm
from .layers import Conv, Linear, Normalise, activate, activation_name, dtype_name
from .network import AbstractNetwork
from .start import drawn


class SmallConvNet(AbstractNetwork):
    """Twice convolution of stride 2, batch norm, activation; average, linear layer.

    Of `width` and `2 width` channels.
    """

    normalise: Normalise
    conv1: Conv
    norm1: BatchNorm
    conv2: Conv
    norm2: BatchNorm
    head: Linear
    classes: int = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        *,
        key: PRNGKeyArray,
        classes: int,
        channels: int,
        mean,
        std,
        dtype: DTypeLike = "float32",
        activation: str = "relu",
        width: int = 16,
    ):
        compute, activation = dtype_name(dtype), activation_name(activation)
        self.normalise = Normalise(mean, std, channels)
        self.norm1 = BatchNorm(width, dtype=compute)
        self.norm2 = BatchNorm(2 * width, dtype=compute)
        conv1 = Conv(channels, width, stride=2, dtype=compute)
        conv2 = Conv(width, 2 * width, stride=2, dtype=compute)
        head = Linear(2 * width, classes, dtype=compute)
        self.conv1, self.conv2, self.head = drawn((conv1, conv2, head), key)
        self.classes, self.activation = classes, activation

    def features(self, x, training):
        x, seen1 = self.norm1(self.conv1(x), training)
        x = activate(self.activation, x)
        x, seen2 = self.norm2(self.conv2(x), training)
        return activate(self.activation, x), seen1 + seen2
