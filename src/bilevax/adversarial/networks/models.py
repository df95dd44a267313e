"""Networks by name."""

from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .network import AbstractNetwork
from .preact_resnet import PreActResNet18
from .resnet import ResNet18
from .small_convnet import SmallConvNet

MODELS = {
    "preact-resnet18": PreActResNet18,
    "resnet18": ResNet18,
    "small": SmallConvNet,
}


def build(
    name: str,
    *,
    key: PRNGKeyArray,
    classes: int,
    channels: int,
    mean,
    std,
    dtype: DTypeLike = "float32",
    activation: str = "relu",
    width: int | None = None,
) -> AbstractNetwork:
    """A network with fresh weights.

    - `name`: "preact-resnet18", "resnet18" or "small".
    - `mean`, `std`: of pixels in `[0, 1]`, one number for each of the `channels`.
    - `dtype`: in which convolutions compute: float32, bfloat16 or float64. Weights are
      float32, or float64 with the last.
    - `activation`: "relu", or for a network that is smooth "softplus" or "silu".
    - `width`: channels of the first layer; by default 64, for "small" 16.
    """
    if name not in MODELS:
        raise ValueError(f"no network {name!r}; there are {', '.join(MODELS)}.")
    if classes < 1 or channels < 1 or (width is not None and width < 1):
        raise ValueError(
            "`classes`, `channels` and `width` are at least 1; got "
            f"{classes}, {channels} and {width}."
        )
    options = {} if width is None else {"width": width}
    return MODELS[name](
        key=key,
        classes=classes,
        channels=channels,
        mean=mean,
        std=std,
        dtype=dtype,
        activation=activation,
        **options,
    )
