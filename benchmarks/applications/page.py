"""The page of the applications, from their rows.

python -m benchmarks.applications.page ROWS.jsonl > benchmarks/applications.md
"""

import argparse
import json
import pathlib

HEAD = """# Applications

Real problems with known best values, each by one default call of `solve` with `DSBLO`.
`F` at the returned `x` is computed again by another solver: DAQP, or Newton's method
where the follower is not quadratic. The gap is `(F - F*) / |F*|`. `x0` is zero or the
middle of the domain. Seconds are CPU seconds on one core of a shared machine, of the
first call (compilation included) and of the same call again; megabytes are the largest
resident memory of the process so far. A dash is a time that was not kept. What has no
row here has not been run with this version. `page.py` made this from
[results/applications.jsonl](results/applications.jsonl).
"""
COLUMNS = (
    "instance", "F", "gap", "bar", "reached", "status", "starts", "first, s",
    "second, s", "memory, MB",
)  # fmt: skip


def line(row: dict) -> str:
    told = lambda value: "-" if value is None else f"{value:g}"
    return (
        f"| {row['instance']} | {row['value']:.9g} | {row['gap']:.1e} | "
        f"{row['bar']:.1g} | {'yes' if row['reached'] else 'no'} | {row['status']} | "
        f"{row['starts']} | {told(row['first'])} | {told(row['second'])} | "
        f"{row['memory']} |"
    )


def page(rows: list[dict]) -> str:
    """Of an instance that was run twice the later row counts."""
    last = {row["instance"]: row for row in rows}
    rule = "|---|---:|---:|---:|---|---|---:|---:|---:|---:|"
    top = f"| {' | '.join(COLUMNS)} |"
    return "\n".join([HEAD, top, rule, *(line(last[name]) for name in sorted(last))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=pathlib.Path)
    text = parser.parse_args().rows.read_text()
    print(page([json.loads(row) for row in text.splitlines()]))


if __name__ == "__main__":
    main()
