"""Networks, and what they are made of."""

from .batch_norm import BatchNorm as BatchNorm
from .layers import Conv as Conv, Linear as Linear, Normalise as Normalise
from .models import build as build
from .network import AbstractNetwork as AbstractNetwork
from .start import drawn as drawn
