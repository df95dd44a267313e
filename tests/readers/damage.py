"""Files with some bytes changed, cut out or put in."""

from collections.abc import Iterator

import numpy as np


def damaged(whole: bytes, count: int, numbers: np.random.Generator) -> Iterator[bytes]:
    for _ in range(count):
        text = bytearray(whole)
        for _ in range(numbers.integers(1, 4)):
            at, kind = numbers.integers(len(text)), numbers.integers(3)
            if kind == 0:
                text[at] = numbers.integers(256)
            elif kind == 1:
                del text[at : at + numbers.integers(1, 40)]
            else:
                text[at:at] = bytes(numbers.integers(32, 127, 3).tolist())
        yield bytes(text)
