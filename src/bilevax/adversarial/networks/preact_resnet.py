"""PreAct-ResNet-18 for small images: normalise and activate before convolutions."""

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from .batch_norm import BatchNorm
from .layers import Conv, Linear, Normalise, activate, activation_name, dtype_name
from .network import AbstractNetwork
from .stages import stages
from .start import drawn


class PreActBlock(eqx.Module):
    """`conv(act(N(conv(act(N(x)))))) + s(x)`.

    `s` is the identity, or a bare 1x1 convolution where the shape changes. It takes the
    raw `x`; some public versions give it `act(N(x))` instead.
    """

    norm1: BatchNorm
    conv1: Conv
    norm2: BatchNorm
    conv2: Conv
    shortcut: Conv | None
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
        self.norm1 = BatchNorm(inputs, dtype=dtype)
        self.conv1 = Conv(inputs, outputs, stride=stride, dtype=dtype)
        self.norm2 = BatchNorm(outputs, dtype=dtype)
        self.conv2 = Conv(outputs, outputs, dtype=dtype)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = Conv(inputs, outputs, size=1, stride=stride, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "b h w c"], training: bool):
        y, seen1 = self.norm1(x, training)
        y = self.conv1(activate(self.activation, y))
        y, seen2 = self.norm2(y, training)
        y = self.conv2(activate(self.activation, y))
        side = x if self.shortcut is None else self.shortcut(x)
        return side + y, seen1 + seen2


class PreActResNet18(AbstractNetwork):
    """3x3 stem of stride 1, eight blocks, batch norm, global average, linear layer.

    He, Zhang, Ren and Sun, Identity mappings in deep residual networks, ECCV 2016, with
    the stem that is usual for images of 32x32 pixels.
    """

    normalise: Normalise
    stem: Conv
    blocks: tuple[PreActBlock, ...]
    norm: BatchNorm
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
        self.norm = BatchNorm(8 * width, dtype=compute)
        stem = Conv(channels, width, dtype=compute)
        blocks = stages(PreActBlock, width, activation=activation, dtype=compute)
        head = Linear(8 * width, classes, dtype=compute)
        self.stem, self.blocks, self.head = drawn((stem, blocks, head), key)
        self.classes, self.activation = classes, activation

    def features(self, x, training):
        x, seen = self.stem(x), ()
        for block in self.blocks:
            x, more = block(x, training)
            seen = seen + more
        x, last = self.norm(x, training)
        return activate(self.activation, x), seen + last
