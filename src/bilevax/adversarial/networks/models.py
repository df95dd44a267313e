"""Networks by name."""

from typing import Any

import jax
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


def description(network: AbstractNetwork) -> dict[str, Any] | None:
    """What `build` needs to make such a network; None for one that it cannot make."""
    names = {kind: name for name, kind in MODELS.items()}
    if type(network) not in names:
        return None
    known: Any = network
    first = known.conv1 if isinstance(network, SmallConvNet) else known.stem
    return dict(
        name=names[type(network)],
        classes=network.classes,
        channels=len(network.normalise.mean),
        mean=list(network.normalise.mean),
        std=list(network.normalise.std),
        dtype=first.dtype,
        activation=known.activation,
        width=first.weight.shape[-1],
    )


def computing_in(network: AbstractNetwork, dtype: str) -> AbstractNetwork:
    """The same weights in a network that computes in `dtype`, if `build` made it."""
    described = description(network)
    if described is None or described["dtype"] == dtype:
        return network
    described["dtype"] = dtype
    other = build(key=jax.random.key(0), **described)
    leaves, structure = jax.tree.flatten(other)
    pairs = zip(jax.tree.leaves(network), leaves, strict=True)
    return structure.unflatten([leaf.astype(like.dtype) for leaf, like in pairs])
