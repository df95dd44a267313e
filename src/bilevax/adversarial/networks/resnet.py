"""ResNet-18 for small images: normalise, then activate, after each convolution."""

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from .batch_norm import BatchNorm
from .layers import Conv, Linear, Normalise, activate, activation_name, dtype_name
from .network import AbstractNetwork
from .stages import stages
from .start import drawn


class PostActBlock(eqx.Module):
    """`act(N(conv(act(N(conv(x))))) + s(x))`.

    `s` is the identity, or a 1x1 convolution with a batch norm where the shape changes.
    """

    conv1: Conv
    norm1: BatchNorm
    conv2: Conv
    norm2: BatchNorm
    shortcut: Conv | None
    shortcut_norm: BatchNorm | None
    activation: str = eqx.field(static=True)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        stride: int,
        activation: str,
        dtype: str,
    ):
        self.conv1 = Conv(inputs, outputs, stride=stride, dtype=dtype)
        self.norm1 = BatchNorm(outputs, dtype=dtype)
        self.conv2 = Conv(outputs, outputs, dtype=dtype)
        self.norm2 = BatchNorm(outputs, dtype=dtype)
        self.shortcut = self.shortcut_norm = None
        if stride != 1 or inputs != outputs:
            self.shortcut = Conv(inputs, outputs, size=1, stride=stride, dtype=dtype)
            self.shortcut_norm = BatchNorm(outputs, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "b h w c"], training: bool):
        y, seen1 = self.norm1(self.conv1(x), training)
        y, seen2 = self.norm2(self.conv2(activate(self.activation, y)), training)
        seen3 = ()
        if self.shortcut is not None and self.shortcut_norm is not None:
            x, seen3 = self.shortcut_norm(self.shortcut(x), training)
        return activate(self.activation, x + y), seen1 + seen2 + seen3


class ResNet18(AbstractNetwork):
    """3x3 stem of stride 1, eight blocks, global average, linear layer.

    He, Zhang, Ren and Sun, Deep residual learning for image recognition, CVPR 2016,
    with the stem that is usual for images of 32x32 pixels.
    """

    normalise: Normalise
    stem: Conv
    norm: BatchNorm
    blocks: tuple[PostActBlock, ...]
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
        width: int = 64,
    ):
        compute, activation = dtype_name(dtype), activation_name(activation)
        self.normalise = Normalise(mean, std, channels)
        self.norm = BatchNorm(width, dtype=compute)
        stem = Conv(channels, width, dtype=compute)
        blocks = stages(PostActBlock, width, activation=activation, dtype=compute)
        head = Linear(8 * width, classes, dtype=compute)
        self.stem, self.blocks, self.head = drawn((stem, blocks, head), key)
        self.classes, self.activation = classes, activation

    def features(self, x, training):
        x, seen = self.norm(self.stem(x), training)
        x = activate(self.activation, x)
        for block in self.blocks:
            x, more = block(x, training)
            seen = seen + more
        return x, seen
