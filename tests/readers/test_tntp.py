"""Road networks in the TNTP format."""

import numpy as np
import pytest

from bilevax.readers import ReaderError, read_tntp

from .damage import damaged

NET = """<NUMBER OF ZONES> 2
<NUMBER OF NODES> 3
<FIRST THRU NODE> 1
<NUMBER OF LINKS> 3
<END OF METADATA>

~ \tinit node\tterm node\tcapacity\tlength\tfree flow time\tb\tpower\t;
\t1\t3\t10.5\t6\t6\t0.15\t4\t0\t0\t1\t;
\t3\t2\t20\t4\t4\t0.15\t4\t0\t0\t1\t;
\t1\t2\t5e0\t12\t12\t0\t1\t0\t0\t1\t;
"""
TRIPS = """<NUMBER OF ZONES> 2
<TOTAL OD FLOW> 7.5
<END OF METADATA>

Origin \t1
    1 :      0.0;     2 :    7.5;
Origin \t2
    1 :      0.0;
"""
NODES = """Node\tX\tY\t;
1\t0\t0\t;
2\t10\t0\t;
3\t5\t2.5\t;
"""


def written(folder, **changes):
    """The three files, with the first text replaced by the second in some."""
    paths = []
    for name, text in (("net", NET), ("trips", TRIPS), ("node", NODES)):
        old, new = changes.get(name, ("", ""))
        assert old in text
        path = folder / f"town_{name}.tntp"
        path.write_text(text.replace(old, new, 1) if old else text + new)
        paths.append(path)
    return paths


def test_a_network_is_read_as_it_was_written(tmp_path):
    town = read_tntp(*written(tmp_path))
    assert (town.nodes, town.zones, town.links, town.first_through) == (3, 2, 3, 1)
    np.testing.assert_array_equal(town.tail, [1, 3, 1])
    np.testing.assert_array_equal(town.head, [3, 2, 2])
    np.testing.assert_array_equal(town.capacity, [10.5, 20, 5])
    np.testing.assert_array_equal(town.trips, [[0, 7.5], [0, 0]])
    np.testing.assert_array_equal(town.places, [[0, 0], [10, 0], [5, 2.5]])


def test_what_leaves_the_nodes_is_the_demand(tmp_path):
    town = read_tntp(*written(tmp_path))
    flow = np.array([3.0, 3.0, 4.5])  # all trips of zone 1, on two routes
    np.testing.assert_allclose(town.incidence() @ flow, [7.5, -7.5, 0])


def test_the_delay_is_the_integral_of_the_time(tmp_path):
    town = read_tntp(*written(tmp_path))
    flow, step = np.array([3.0, 2.0, 1.0]), 1e-5
    for link in range(3):
        move = step * np.eye(3)[link]
        change = town.total_delay(flow + move) - town.total_delay(flow - move)
        assert abs(change / (2 * step) - town.time(flow)[link]) < 1e-8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(net=("10.5", "0")), ("line 8", "capacity must be positive")),
        (dict(net=("10.5", "ten")), ("line 8", "`capacity`", "'ten'")),
        (dict(net=("10.5", "nan")), ("line 8", "NaN")),
        (dict(net=("\t1\t3\t", "\t1.5\t3\t")), ("line 8", "`tail`", "whole number")),
        (dict(net=("\t1\t3\t", "\t1\t9\t")), ("node 9", "3 nodes")),
        (dict(net=("\t0.15\t4\t0\t0\t1\t;", ";")), ("line 8", "at least 7 numbers")),
        (dict(net=("LINKS> 3", "LINKS> 4")), ("3 links", "cut off")),
        (dict(net=("<END OF METADATA>", "")), ("no links", "`_net` file")),
        (dict(trips=("7.5;", "-7.5;")), ("line 6", "-7.5")),
        (dict(trips=("2 :", "2")), ("line 6", "zone : trips")),
        (dict(trips=("2 :", "7 :")), ("zone 7", "2 zones")),
        (dict(trips=("Origin", "From")), ("before any `Origin`",)),
        (dict(node=("3\t5\t2.5\t;", "")), ("where node 3 is",)),
        (dict(node=("3\t5", "8\t5")), ("node 8 is not in the network",)),
    ],
)
def test_a_damaged_file_is_named_with_line_and_cause(tmp_path, changes, words):
    with pytest.raises(ReaderError) as info:
        read_tntp(*written(tmp_path, **changes))
    for word in (*words, "town_"):
        assert word in str(info.value)


def test_what_is_no_text_or_not_there_is_named(tmp_path):
    net, trips, _ = written(tmp_path)
    with pytest.raises(ReaderError, match="no such file"):
        read_tntp(tmp_path / "other.tntp", trips)
    net.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(ReaderError, match="no text"):
        read_tntp(net, trips)


def test_no_damage_to_a_file_is_more_than_a_complaint(tmp_path):
    numbers, paths, complaints = np.random.default_rng(0), written(tmp_path), []
    for path in paths:
        whole = path.read_bytes()
        for text in damaged(whole, 500, numbers):
            path.write_bytes(text)
            try:
                town = read_tntp(*paths)
            except ReaderError as error:
                complaints.append(str(error))
            else:
                assert np.all(town.trips >= 0)
                assert town.trips.shape == (town.zones, town.zones)
                assert np.all(town.capacity > 0)
        path.write_bytes(whole)
    assert len(complaints) > 500
    assert all(text.startswith(str(tmp_path)) for text in complaints)
