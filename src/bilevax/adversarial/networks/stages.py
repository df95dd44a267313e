"""The body that both ResNet-18 share: four stages of two blocks."""

from typing import TypeVar

Block = TypeVar("Block")


def stages(block: type[Block], width: int, **options) -> tuple[Block, ...]:
    """Eight blocks, of `width` times 1, 2, 4, 8 channels; later stages halve sides."""
    blocks, inputs = [], width
    for stage in range(4):
        outputs = width * 2**stage
        for stride in (1 if stage == 0 else 2, 1):
            one = block(inputs, outputs, stride=stride, **options)  # pyright: ignore
            blocks.append(one)
            inputs = outputs
    return tuple(blocks)
