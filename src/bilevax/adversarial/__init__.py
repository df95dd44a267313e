"""Adversarial training as a bilevel problem: networks, attacks, training, scores."""

from .apgd import apgd as apgd
from .ensemble import robust_ensemble as robust_ensemble
from .evaluate import evaluate as evaluate
from .images import Images as Images, load_images as load_images, split as split
from .models import build as build
from .network import AbstractNetwork as AbstractNetwork
from .pgd import pgd as pgd
from .settings import Settings as Settings
from .training import Trained as Trained, score as score, train as train
from .watch import predict as predict
from .weights import load_network as load_network
