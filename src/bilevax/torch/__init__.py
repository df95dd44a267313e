"""Lower levels as layers of PyTorch: tensors in, tensors and derivatives out.

Not imported by `bilevax` itself; needs the extra `torch`.
"""

try:
    import torch as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "`bilevax.torch` needs PyTorch, which is not installed here: "
        "`pip install 'bilevax[torch]'`, or PyTorch's own instructions for a build "
        "without CUDA."
    ) from error

from .answer import Answer as Answer
from .leader import LeaderValue as LeaderValue, hypergradient as hypergradient
from .model import (
    CvxpyLayer as CvxpyLayer,
    Variables as Variables,
    cvxpy_layer as cvxpy_layer,
)
from .module import Layer as Layer, layer as layer
