"""The command `bilevax`; its commands are the files beside this one."""

import argparse
import os
import sys

import jax

import bilevax

from .._files.checkpoint import CheckpointError
from .._status import BilevelError
from . import (
    certify,
    check,
    compare,
    doctor,
    evaluate,
    example,
    experiment,
    explain,
    export,
    profile,
    solve,
    train,
)
from .interrupt import interrupts_kept
from .problem_file import FileError, in_user_lines
from .text import complain, results_alone

_COMMANDS = (
    solve, explain, check, profile, certify, compare, experiment, train, evaluate,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    usual = getattr(options, "dtype", options.usual_precision)
    if (options.precision or usual) == "float64":
        jax.config.update("jax_enable_x64", True)
    try:
        with interrupts_kept(), results_alone(options.json):
            status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader is gone, as with `| head`; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (FileError, CheckpointError, BilevelError) as error:
        return complain(str(error))
    except KeyboardInterrupt:
        print(f"\nInterrupted. {options.kept(options)}", file=sys.stderr)
        return 130
    except Exception as error:
        file = getattr(options, "file", None)
        told = file is not None or isinstance(error, ValueError | ImportError)
        if not told or os.environ.get("BILEVAX_TRACEBACK"):
            raise
        text = str(error) if file is None else in_user_lines(error, file)
        return complain(f"{text}\n(Set BILEVAX_TRACEBACK=1 to see where it came from.)")


# As `bilevax --help` lists them.
_COMMANDS = (
    solve,
    explain,
    check,
    profile,
    certify,
    compare,
    experiment,
    train,
    evaluate,
    export,
    example,
    doctor,
)


class Parser(argparse.ArgumentParser):
    """Tells a mistake in a line or two, without all of the usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="bilevax", description="Constrained bilevel optimisation.")
    top.add_argument(
        "--precision", choices=("float64", "float32"),
        help="of all computations (default: float64; float32 for `train`, "
        "`evaluate` and `export`)",
    )  # fmt: skip
    top.add_argument(
        "--version", action="version", version=f"bilevax {bilevax.__version__}"
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        name = command.__name__.rpartition(".")[2]
        sub = commands.add_parser(name, help=command.TEXT, description=command.TEXT)
        sub.add_argument("--json", action="store_true", help="machine-readable output")
        sub.set_defaults(
            run=command.run,
            usual_precision=getattr(command, "PRECISION", "float64"),
            kept=getattr(command, "kept", lambda options: "Nothing was saved."),
        )
        command.add_arguments(sub)
    return top


if __name__ == "__main__":
    sys.exit(main())
