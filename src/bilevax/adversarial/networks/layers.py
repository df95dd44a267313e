"""Layers without state: normalisation of pixels, convolution, linear map, activation.

Images are batches `(B, H, W, C)`. Weights keep their own precision; each layer casts
its inputs and weights to the `dtype` it computes in. A layer begins with the shapes of
its weights alone; `drawn` fills them in.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

ACTIVATIONS = {"relu": jax.nn.relu, "softplus": jax.nn.softplus, "silu": jax.nn.silu}
# Names of compute types, with the precision in which weights are kept.
WEIGHT_DTYPES = {"float32": "float32", "bfloat16": "float32", "float64": "float64"}


def dtype_name(dtype: DTypeLike) -> str:
    """The name of a compute type that the networks know."""
    name = jnp.dtype(dtype).name
    if name not in WEIGHT_DTYPES:
        raise ValueError(f"`dtype` is one of {', '.join(WEIGHT_DTYPES)}; got {name}.")
    if name == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore
        raise ValueError(
            "`dtype` is float64, which JAX has switched off; call "
            'jax.config.update("jax_enable_x64", True) first.'
        )
    return name


def activate(name: str, x: Array) -> Array:
    """The activation called `name`, elementwise."""
    return ACTIVATIONS[name](x)


def activation_name(name: str) -> str:
    """`name`, if there is such an activation."""
    if name not in ACTIVATIONS:
        raise ValueError(
            f"`activation` is one of {', '.join(ACTIVATIONS)}; got {name!r}."
        )
    return name


class Normalise(eqx.Module):
    """`(pixel - mean) / std` by channel.

    Part of the network, so that attacks move pixels in `[0, 1]`. The constants are
    static: no optimiser sees them.
    """

    mean: tuple[float, ...] = eqx.field(static=True)
    std: tuple[float, ...] = eqx.field(static=True)

    def __init__(self, mean, std, channels: int):
        self.mean = tuple(float(m) for m in mean)
        self.std = tuple(float(s) for s in std)
        if not len(self.mean) == len(self.std) == channels:
            raise ValueError(
                f"`mean` and `std` need one number for each of {channels} channels; "
                f"got {len(self.mean)} and {len(self.std)}."
            )
        if not all(s > 0 and math.isfinite(s) for s in self.std):
            raise ValueError(f"`std` must be positive; got {self.std}.")

    def __call__(
        self, images: Float[Array, "b h w c"], dtype
    ) -> Float[Array, "b h w c"]:
        mean, std = jnp.asarray(self.mean, dtype), jnp.asarray(self.std, dtype)
        return (images.astype(dtype) - mean) / std


class Conv(eqx.Module):
    """A convolution without bias; weights `(height, width, in, out)`.

    In float32 the hardware multiplies as precisely as `jax.default_matmul_precision`
    says, which on recent GPUs is less than float32 unless it is set to "highest".
    """

    weight: Float[Array, "h w i o"]
    stride: int = eqx.field(static=True)
    dtype: str = eqx.field(static=True)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        size: int = 3,
        stride: int = 1,
        dtype: str,
    ):
        self.weight = _blank((size, size, inputs, outputs), dtype)
        self.stride, self.dtype = stride, dtype

    @property
    def fan_in(self) -> int:
        """How many numbers enter each sum."""
        return math.prod(self.weight.shape[:3])

    def __call__(self, x: Float[Array, "b h w i"]) -> Float[Array, "b p q o"]:
        # Half the window on each side, whatever the stride; "SAME" would pad unevenly.
        pad = self.weight.shape[0] // 2
        return jax.lax.conv_general_dilated(
            x.astype(self.dtype),
            self.weight.astype(self.dtype),
            window_strides=(self.stride, self.stride),
            padding=((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class Linear(eqx.Module):
    """A linear map with bias; factors in `dtype`, sums in the precision of weights."""

    weight: Float[Array, "i o"]
    bias: Float[Array, " o"]
    dtype: str = eqx.field(static=True)

    def __init__(self, inputs: int, outputs: int, *, dtype: str):
        self.weight = _blank((inputs, outputs), dtype)
        self.bias = _blank((outputs,), dtype)
        self.dtype = dtype

    @property
    def fan_in(self) -> int:
        """How many numbers enter each sum."""
        return self.weight.shape[0]

    def __call__(self, x: Float[Array, "b i"]) -> Float[Array, "b o"]:
        product = jnp.matmul(
            x.astype(self.dtype),
            self.weight.astype(self.dtype),
            preferred_element_type=self.weight.dtype,
        )
        return product + self.bias


def _blank(shape, dtype) -> Any:
    """A shape without numbers: whoever forgets to draw them gets an error."""
    return jax.ShapeDtypeStruct(shape, WEIGHT_DTYPES[dtype])
