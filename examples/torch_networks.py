"""Networks of bilevax in PyTorch, for files that `bilevax export` wrote.

    python examples/torch_networks.py model.safetensors

Needs torch and safetensors, and nothing of bilevax. Fields have the names that the file
uses. Images are `(batch, channels, height, width)` with pixels in [0, 1].
"""

import json
import sys

import torch
from safetensors import safe_open
from torch import nn

ACTIVATIONS = dict(relu=nn.ReLU(), softplus=nn.Softplus(), silu=nn.SiLU())


def conv(inputs, outputs, size=3, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class PreActBlock(nn.Module):
    def __init__(self, inputs, outputs, stride, act):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1, self.conv2 = (
            conv(inputs, outputs, 3, stride),
            conv(outputs, outputs),
        )
        if stride != 1 or inputs != outputs:
            self.shortcut = conv(inputs, outputs, 1, stride)
        self.act = act

    def forward(self, x):
        y = self.conv1(self.act(self.norm1(x)))
        y = self.conv2(self.act(self.norm2(y)))
        return y + (self.shortcut(x) if hasattr(self, "shortcut") else x)


class PostActBlock(nn.Module):
    def __init__(self, inputs, outputs, stride, act):
        super().__init__()
        self.conv1, self.conv2 = (
            conv(inputs, outputs, 3, stride),
            conv(outputs, outputs),
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        if stride != 1 or inputs != outputs:
            self.shortcut = conv(inputs, outputs, 1, stride)
            self.shortcut_norm = nn.BatchNorm2d(outputs)
        self.act = act

    def forward(self, x):
        y = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        side = self.shortcut_norm(self.shortcut(x)) if hasattr(self, "shortcut") else x
        return self.act(y + side)


def stages(block, width, act):
    blocks, inputs = [], width
    for stage in range(4):
        outputs = width * 2**stage
        for stride in (1 if stage == 0 else 2, 1):
            blocks.append(block(inputs, outputs, stride, act))
            inputs = outputs
    return nn.ModuleList(blocks)


class Network(nn.Module):
    """Normalisation, `features`, mean over places, linear layer."""

    def __init__(self, features, classes, normalise):
        super().__init__()
        self.head = nn.Linear(features, classes)
        for name in ("mean", "std"):
            numbers = torch.tensor(normalise[name])[:, None, None]
            self.register_buffer(name, numbers, persistent=False)

    def forward(self, pixels):
        x = self.features((pixels - self.mean) / self.std)
        return self.head(x.mean(dim=(2, 3)))


class PreActResNet18(Network):
    def __init__(self, channels, classes, width, act, normalise):
        super().__init__(8 * width, classes, normalise)
        self.stem = conv(channels, width)
        self.blocks = stages(PreActBlock, width, act)
        self.norm, self.act = nn.BatchNorm2d(8 * width), act

    def features(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.act(self.norm(x))


class ResNet18(Network):
    def __init__(self, channels, classes, width, act, normalise):
        super().__init__(8 * width, classes, normalise)
        self.stem, self.norm = conv(channels, width), nn.BatchNorm2d(width)
        self.blocks, self.act = stages(PostActBlock, width, act), act

    def features(self, x):
        x = self.act(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return x


class SmallConvNet(Network):
    def __init__(self, channels, classes, width, act, normalise):
        super().__init__(2 * width, classes, normalise)
        self.conv1, self.norm1 = conv(channels, width, 3, 2), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = conv(width, 2 * width, 3, 2), nn.BatchNorm2d(2 * width)
        self.act = act

    def features(self, x):
        x = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(x)))


NETWORKS = {
    "preact-resnet18": PreActResNet18,
    "resnet18": ResNet18,
    "small": SmallConvNet,
}


def load(path):
    """The network in the file, ready to classify."""
    with safe_open(path, framework="pt") as file:
        text = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}
    made, normalise = json.loads(text["bilevax.network"]), json.loads(text["normalise"])
    act = ACTIVATIONS[made["activation"]]
    kind = NETWORKS[made["name"]]
    network = kind(made["channels"], made["classes"], made["width"], act, normalise)
    # Torch counts batches beside the running statistics; nothing reads that here.
    missing, strange = network.load_state_dict(arrays, strict=False)
    unread = [name for name in missing if not name.endswith("num_batches_tracked")]
    if unread or strange:
        raise ValueError(f"{path} does not fit: {unread + strange}.")
    return network.eval()


if __name__ == "__main__":
    network = load(sys.argv[1])
    print(network)
