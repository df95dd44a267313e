"""Tables, figures and the page."""

import csv
import io
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from bilevax._compare.report import write_report
from bilevax._compare.tables import (
    to_csv,
    to_latex,
    to_markdown,
    to_text,
)

from ..comparisons import ROWS, handmade

TABLE = [
    {"name": "a_b & 50 %", "n": 3, "F": 1 / 3},
    {"name": "c|d", "n": 12345, "F": np.inf},
]


def test_tables_as_text():
    back = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert back[0] == ["name", "n", "F"]
    assert back[1] == ["a_b & 50 %", "3", repr(1 / 3)]
    assert back[2] == ["c|d", "12345", ""]
    latex = to_latex(TABLE).splitlines()
    assert latex[0] == r"\begin{tabular}{lrr}"
    assert latex[4] == r"a\_b \& 50 \% & 3 & 0.3333 \\"
    assert latex[5] == r"c|d & 12345 & - \\"
    assert to_markdown(TABLE).splitlines()[1:] == [
        "| --- | ---: | ---: |",
        "| a_b & 50 % | 3 | 0.3333 |",
        r"| c\|d | 12345 | - |",
    ]
    assert to_text(TABLE).splitlines()[1] == "a_b & 50 %      3  0.3333"


class Reader(HTMLParser):
    """Counts elements, checks that they close, gathers addresses and names."""

    def __init__(self):
        super().__init__()
        self.open, self.count, self.addresses, self.names = [], {}, [], []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        found = dict(attrs)
        self.names += [found["id"]] if "id" in found else []
        for name in ("href", "src", "xlink:href"):
            self.addresses += [found[name]] if name in found else []
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def written(finished, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return finished.report(folder, title="A <title>", intro="Some words.")


def test_the_page_is_whole_and_needs_nothing_else(written, finished):
    text = Path(written["report"]).read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert reader.count["svg"] == 2
    assert reader.count["table"] == 4
    assert "script" not in reader.count
    assert all(address.startswith("#") for address in reader.addresses)
    assert set(re.findall(r"url\(([^)]{2})", text)) <= {"#f"}
    assert len(reader.names) == len(set(reader.names))
    assert "A &lt;title&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "Refuser needs a lower level" in text
    assert "nothing works here" in text
    assert "6 methods on 1 problems, 2 seeds" in text


def test_a_report_has_all_its_files(written):
    for name, path in written.items():
        assert Path(path).stat().st_size > 0, name
    endings = {"csv", "tex", "md"}
    for table in ("results", "targets", "work", "trouble"):
        assert {f"{table}.{ending}" for ending in endings} <= set(written)
    for figure in ("gap-kink", "profiles"):
        assert {f"{figure}.png", f"{figure}.svg"} <= set(written)
    assert Path(written["profiles.png"]).read_bytes()[:4] == b"\x89PNG"
    with open(written["results.csv"]) as file:
        results = {row["method"]: row for row in csv.DictReader(file)}
    assert set(results) == {"descent", "twin", "walk", "other walk", "faulty"}
    assert results["faulty"]["failed"] == "2"
    assert float(results["descent"]["step"]) == pytest.approx(0.1)
    assert results["descent"]["solves of trials"] == "40"
    with open(written["curves"]) as file:
        points = list(csv.DictReader(file))
    assert {p["axis"] for p in points} == {"step", "solves", "seconds"}


def test_a_report_of_handmade_rows_and_of_none_that_ran(tmp_path):
    paths = write_report(tmp_path / "a", ROWS, values_first=True)
    assert {"values.png", "gap-p.svg", "gap-q.svg"} <= set(paths)
    refused = [handmade("q", "C", 0, [], status="refused")]
    paths = write_report(tmp_path / "b", refused)
    assert "It did not." in Path(paths["report"]).read_text()
