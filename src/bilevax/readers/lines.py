"""Files of text, line by line, and complaints that name the line."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn


class ReaderError(ValueError):
    """A file that is not what it should be: which, where, and what was expected."""


class Lines:
    """The lines of a text file that hold something, and where they are."""

    def __init__(self, path: str | os.PathLike, comment: str):
        self.path, self.number = Path(path), 0
        try:
            text = self.path.read_text(encoding="utf-8-sig")
        except FileNotFoundError:
            raise ReaderError(f"{path}: there is no such file.") from None
        except UnicodeDecodeError as error:
            raise ReaderError(
                f"{path}: byte {error.start} is no text (UTF-8 is read). Is this the "
                "file itself, or an archive that holds it?"
            ) from None
        except OSError as error:
            raise ReaderError(f"{path} cannot be read: {error.strerror}.") from error
        self._lines = text.splitlines()
        self._comment = comment

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, start=1):
            self.number = number
            line = line.split(self._comment)[0].strip()
            if line:
                yield line

    def refuse(self, cause: str) -> NoReturn:
        raise ReaderError(f"{self.path}, line {self.number}: {cause}")

    def float(self, word: str, name: str) -> float:
        try:
            # Python would read 1_000 as a number.
            value = float(word.replace("_", "?"))
        except ValueError:
            self.refuse(f"`{name}` must be a number; got {word[:40]!r}.")
        if math.isnan(value):
            self.refuse(f"`{name}` is NaN.")
        return value

    def index(self, word: str, name: str) -> int:
        value = self.float(word, name)
        if not (value.is_integer() and 1 <= value < 2**31):
            self.refuse(f"`{name}` must be a whole number from 1 on; got {word[:40]}.")
        return int(value)
