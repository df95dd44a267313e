"""100 000 hostile lower levels: right, flagged, refused, silently wrong or hanging.

Run from the repository root: `python -m benchmarks.hostile [--count N] [--seed S]
[--classes A,B] [--json OUT]`; `--only CLASS --index I` shows one member alone. Another
checkout is judged by `--engine ITS/src`. The classes and their truths are in
`hostile_classes.py`, the layout in `hostile_layout.py`, the verdicts in
`hostile_judge.py`. Batches are mixed over all classes and solved by one program in a
process of its own with a time limit. Exits with 1 on any silent error or hang.

- right: value, answer, multipliers, rows and gradient (where there is one) are right, a
  kink is called one, an empty set empty.
- flagged: answer and value are right; the status warns where nothing is wrong, or
  weak rows are told apart from others in another way at a kink.
- refused: no value. `against` counts those whose data decide the answer.
- wrong: the status says that the value is right, and something is not; or a feasible
  member is called infeasible.
- hanging: members of batches that do not come back. The first such batches
  (`--bisect N`) are bisected: there only the members that keep the batch from coming
  back count, and `beside` counts the others, which are judged without them.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from .hostile_classes import APART, CLASSES, draw
from .hostile_judge import FLAGGED, REFUSED, RIGHT, WRONG, certify, consistent, judge
from .hostile_layout import joined, posed, restored, taken, trimmed

BATCH = 1000
# So many groups of members that hang are looked for in one batch.
ROUNDS = 4
VERDICTS = (RIGHT, FLAGGED, REFUSED, WRONG, "hanging", "no reference")


class Engine:
    """The program in a process of its own, stopped where it does not return."""

    def __init__(self, source: str | None, limit: float, folder: str):
        self.source, self.limit, self.folder = source, limit, Path(folder)
        self.process, self.ready = None, set()

    def start(self):
        path = [self.source] if self.source else []
        path += [os.getcwd(), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.hostile_engine"],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(path),
                # A process that was stopped leaves its program to the next one.
                "JAX_COMPILATION_CACHE_DIR": str(self.folder / "programs"),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready = set()

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def __call__(self, data: dict, dtype, limit: float | None = None):
        """The answers, or None where they did not come within the limit."""
        if self.process is None:
            self.start()
        shape = (dtype, data["A"].shape)
        # A batch that is known to return compiles the program first.
        limit = limit or self.limit
        if shape not in self.ready:
            if self.ask(only(data, []), dtype, 600) is None:
                raise RuntimeError("the program does not compile, see above")
            self.ready.add(shape)
        return self.ask(data, dtype, limit)

    def ask(self, data, dtype, limit):
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        source, target = self.folder / "in.npz", self.folder / "out.npz"
        np.savez(source, **data)
        self.process.stdin.write(f"{source} {target} {np.dtype(dtype).name}\n")
        self.process.stdin.flush()
        ready = select.select([self.process.stdout], [], [], limit)[0]
        if not ready:
            self.stop()
            return None
        if not self.process.stdout.readline():
            raise RuntimeError("the process ended, see above")
        with np.load(target) as answers:
            return dict(answers)


def without_hangs(engine, data, dtype, bisect: bool):
    """Answers of a batch and which of its members hang; all, if it is not bisected.

    Suspects are halved while a half alone still hangs; the other places of the batch
    hold trivial members. What hangs only together is left together, and where groups
    remain after `ROUNDS` all members count.
    """
    began = time.perf_counter()
    out = engine(data, dtype)
    spent = time.perf_counter() - began
    count = len(data["x"])
    if out is not None:
        return out, np.zeros(count, bool), spent
    if not bisect:
        return engine(only(data, []), dtype), np.ones(count, bool), spent
    hanging = np.zeros(count, bool)
    limit = min(engine.limit, 20)
    for _ in range(ROUNDS):
        if out is not None:
            return out, hanging, spent
        suspects = np.flatnonzero(~hanging)
        while len(suspects) > 1:
            for half in np.array_split(suspects, 2):
                if engine(only(data, half), dtype, limit) is None:
                    suspects = half
                    break
            else:
                break
        hanging[suspects] = True
        print(f"hanging: {len(suspects)} members together", flush=True)
        out = engine(only(data, np.flatnonzero(~hanging)), dtype, limit)
    if out is not None:
        return out, hanging, spent
    return engine(only(data, []), dtype), np.ones(count, bool), spent


def only(data, index):
    """A batch of the same size in which all other members are trivial ones."""
    out = {name: np.zeros_like(part) for name, part in data.items()}
    size = out["H"].shape[1]
    out["H"][:] = out["G"][:] = np.eye(size)
    out["d"][:] = 1
    out["b"][:] = np.inf
    for name, part in data.items():
        out[name][index] = part[index]
    return out


def batches(classes, count, seed):
    """Mixed batches: class and index of each member, the members, dtype and sizes."""
    share = np.diff(np.linspace(0, count, len(classes) + 1).astype(int))
    sizes = dict(zip(classes, share.tolist(), strict=True))
    mixed = [name for name in classes if name not in APART]
    groups = [(mixed, np.float64, None)]
    groups += [([name], *APART[name]) for name in classes if name in APART]
    for group, dtype, size in groups:
        if not sum(sizes[name] for name in group):
            continue
        members = joined([draw(name, seed, sizes[name]) for name in group])
        names = np.concatenate([np.full(sizes[name], name) for name in group])
        index = np.concatenate([np.arange(sizes[name]) for name in group])
        order = np.random.default_rng(seed).permutation(len(names))
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            yield names[part], index[part], taken(members, part), dtype, size


def padded(data, size):
    """A last batch in the size of the others, so that nothing compiles anew."""
    count = len(data["x"])
    return {
        n: np.resize(part, (size, *part.shape[1:])) for n, part in data.items()
    }, count


def run(options, engine):
    classes = options.classes.split(",") if options.classes else list(CLASSES)
    unknown = set(classes) - set(CLASSES)
    if unknown:
        sys.exit(f"no such class: {', '.join(sorted(unknown))}; {', '.join(CLASSES)}")
    counts = {name: Counter() for name in classes}
    reasons = {name: Counter() for name in classes}
    failures, done, began = [], 0, time.perf_counter()
    per_class = options.count // len(classes)
    size = min(BATCH, max(1, options.count))
    bisected = 0
    for names, index, members, dtype, sizes in batches(
        classes, options.count, options.seed
    ):
        assert certify(members).all(), "a planted truth is not one"
        assert consistent(members).all(), "a truth is not one"
        data = posed(members) if sizes is None else trimmed(posed(members), sizes)
        data, real = padded(data, size)
        out, hanging, spent = without_hangs(
            engine, data, dtype, bisected < options.bisect
        )
        if sizes is not None:
            out = restored(out, sizes)
        out = {name: part[:real] for name, part in out.items()}
        hanging = hanging[:real]
        bisected += hanging.any()
        verdicts = judge(members, out, dtype)
        verdict = np.where(hanging, "hanging", verdicts["verdict"])
        for i, name in enumerate(names.tolist()):
            counts[name][str(verdict[i])] += 1
            counts[name]["decided"] += bool(verdicts["decided"][i])
            counts[name]["beside"] += bool(hanging.any() and not hanging[i])
            if verdict[i] == REFUSED and verdicts["decided"][i]:
                counts[name]["against"] += 1
            if verdict[i] not in (RIGHT, "hanging", "no reference"):
                reasons[name][f"{verdict[i]}: {verdicts['reason'][i]}"] += 1
            if verdict[i] in (WRONG, "hanging") or (
                verdict[i] == REFUSED and verdicts["decided"][i]
            ):
                failures.append(
                    dict(
                        name=name,
                        index=int(index[i]),
                        verdict=str(verdict[i]),
                        reason=str(verdicts["reason"][i]),
                        status=str(verdicts["status"][i]),
                        error=float(verdicts["error"][i]),
                    )
                )
        done += real
        passed = time.perf_counter() - began
        print(f"{done} of {options.count}, {passed:.0f} s ({spent:.1f} s)", flush=True)
    show(counts, reasons)
    if options.json:
        result = dict(
            count=options.count, seed=options.seed, per_class=per_class,
            seconds=time.perf_counter() - began, counts=counts, reasons=reasons,
            failures=failures,
        )  # fmt: skip
        Path(options.json).write_text(json.dumps(result, indent=1))
    for failure in failures[: options.show]:
        print(
            "{name} {index}: {verdict}, {reason}; {status}, error {error:.1e}".format(
                **failure
            )
        )
    return sum(c[WRONG] + c["hanging"] for c in counts.values())


def show(counts, reasons):
    columns = ("members", *VERDICTS, "decided", "against", "beside")
    print("\n| class | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    total = sum(counts.values(), Counter())
    for name, count in (*counts.items(), ("total", total)):
        members = sum(count[verdict] for verdict in VERDICTS)
        numbers = [members, *(count[column] for column in columns[1:])]
        print(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
    print()
    for name, found in reasons.items():
        if found:
            text = ", ".join(f"{reason} {n}" for reason, n in found.most_common())
            print(f"{name}: {text}")


def show_one(options, engine):
    """One member with its truth and its answer, alone."""
    members = draw(options.only, options.seed, options.index + 1)
    members = taken(members, [options.index])
    dtype, sizes = APART.get(options.only, (np.float64, None))
    data = posed(members) if sizes is None else trimmed(posed(members), sizes)
    out = engine(data, dtype)
    np.set_printoptions(linewidth=120, precision=9)
    n, rows = int(members["size"][0]), members["rows"][0]
    equal = members["E"][0].any(1)
    shown = {name: part[0] for name, part in members.items()}
    for name in ("A", "B", "b", "lam", "rho", "strong", "weak"):
        shown[name] = shown[name][rows]
    for name in ("E", "D", "e", "mu", "sigma"):
        shown[name] = shown[name][equal]
    for name in ("H", "G", "A", "E", "R"):
        shown[name] = shown[name][..., :n]
    for name in ("H", "C", "c", "G", "S", "t", "d", "q", "h", "f", "s", "z", "p", "P"):
        shown[name] = shown[name][:n]
    print("natural units; posed are y = z / s, rows times rho and sigma")
    for name, part in shown.items():
        if name not in ("rows", "feasible", "sets", "exact", "stiff", "size"):
            print(f"{name} = {np.asarray(part).tolist()}")
    if out is None:
        print("does not come back")
        return 1
    out = out if sizes is None else restored(out, sizes)
    verdicts = judge(members, out, dtype)
    print("\nanswer, in natural units")
    print("status:", out["status"][0], " verdict:", verdicts["verdict"][0], end=" ")
    print(verdicts["reason"][0], " decided by the data:", verdicts["decided"][0])
    print("z:", (out["y"] * members["s"])[0, :n])
    split = members["rho"].shape[1]
    lam, mu = out["multipliers"][:, :split], out["multipliers"][:, split:]
    print("lam:", (lam * members["rho"])[0, rows])
    print("mu:", (mu * members["sigma"])[0, equal])
    print("active:", out["active"][0, :split][rows].astype(int), end=" ")
    print("weak:", out["weak"][0, :split][rows].astype(int))
    print(f"value: {out['value'][0]}, true {verdicts['value'][0]}")
    print(f"grad: {out['grad'][0]}, true {verdicts['grad'][0]}")
    return int(verdicts["verdict"][0] == WRONG)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", help="names with commas; default all")
    parser.add_argument("--only", choices=CLASSES, help="one member of this class")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--json", help="write counts and every failure here")
    parser.add_argument("--show", type=int, default=20, help="failures to print")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a batch")
    parser.add_argument(
        "--bisect", type=int, default=1, help="batches that hang to bisect"
    )
    parser.add_argument("--engine", help="the src folder of another checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(options.engine, options.limit, folder)
        try:
            failed = (show_one if options.only else run)(options, engine)
        finally:
            engine.stop()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
