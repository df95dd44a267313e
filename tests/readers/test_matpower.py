"""Cases of MATPOWER."""

import numpy as np
import pytest

from bilevax.readers import ReaderError, read_matpower

from .damage import damaged

CASE = """function mpc = triangle
% Three buses in a triangle.
mpc.version = '2';
mpc.baseMVA = 100;
%% bus data
mpc.bus = [
\t10\t3\t0\t0\t0\t0\t1\t1\t0\t135\t1\t1.05\t0.95;
\t20\t2\t0\t0\t0\t0\t1\t1\t0\t135\t1\t1.05\t0.95;
\t30\t1\t90\t30\t0\t0\t1\t1\t0\t135\t1\t1.05\t0.95; % the load
];
mpc.gen = [
\t10\t0\t0\t0\t0\t1\t100\t1\t200\t10;
\t20\t0\t0\t0\t0\t1\t100\t1\t80\t0;
\t20\t0\t0\t0\t0\t1\t100\t0\t80\t0;
];
mpc.branch = [
\t10\t20\t0.01\t0.1\t0\t60\t0\t0\t0\t0\t1\t-360\t360;
\t10\t30\t0.01\t0.1\t0\t0\t0\t0\t0\t0\t1\t-360\t360;
\t20\t30\t0.01\t0.1\t0\t50\t0\t0\t0\t0\t1\t-360\t360;
\t20\t30\t0.01\t0.1\t0\t50\t0\t0\t0\t0\t0\t-360\t360;
];
mpc.gencost = [
\t2\t0\t0\t3\t0.02\t2\t5;
\t2\t0\t0\t2\t3\t1\t0;
\t2\t0\t0\t3\t9\t9\t9;
];
"""


def written(folder, old="", new=""):
    assert old in CASE
    path = folder / "triangle.m"
    path.write_text(CASE.replace(old, new, 1) if old else CASE + new)
    return path


def test_a_case_is_read_as_it_was_written(tmp_path):
    case = read_matpower(written(tmp_path))
    np.testing.assert_array_equal(case.buses, [10, 20, 30])
    np.testing.assert_array_equal(case.load, [0, 0, 90])
    # What is out of service is left out.
    np.testing.assert_array_equal(case.generator_bus, [0, 1])
    np.testing.assert_array_equal(case.cost, [[0.02, 2, 5], [0, 3, 1]])
    np.testing.assert_array_equal(case.limit, [60, np.inf, 50])
    np.testing.assert_array_equal(case.least, [10, 0])


def test_power_goes_by_reactance(tmp_path):
    """In an even triangle two thirds take the short way."""
    case = read_matpower(written(tmp_path))
    at_30 = case.shift_factors()[:, 2]
    np.testing.assert_allclose(at_30, [-1 / 3, -2 / 3, -1 / 3])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("\t10\t3\t0", "\t10\t1\t0", ("reference bus",)),
        ("\t20\t2\t0", "\t10\t2\t0", ("listed twice",)),
        ("90\t30", "ninety\t30", ("line 9", "mpc.bus", "'ninety'")),
        ("90\t30", "nan\t30", ("line 9", "NaN")),
        ("\t0.1\t0\t60", "\t0\t0\t60", ("no reactance",)),
        ("\t60\t0\t0\t0\t0\t1", "\t60\t0\t0\t0\t5\t1", ("phase shifters",)),
        ("\t2\t0\t0\t3\t0.02", "\t1\t0\t0\t3\t0.02", ("generator 1", "polynomial")),
        ("];\nmpc.gen = [", "mpc.gen = [", ("mpc.bus",)),
        ("\t10\t0\t0\t0\t0\t1\t100\t1\t200\t10;", "\t77\t0\t0\t0\t0\t1\t100\t1\t9\t1;",
         ("bus 77",)),
        ("mpc.gen = [", "mpc.generators = [", ("no `mpc.gen`",)),
        ("", "mpc.bus(:, 3) = 2 * mpc.bus(:, 3);\n", ("changes the case", "savecase")),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, old, new, words):
    with pytest.raises(ReaderError) as info:
        read_matpower(written(tmp_path, old, new))
    for word in (*words, "triangle.m"):
        assert word in str(info.value)


def test_a_network_in_two_parts_has_no_shift_factors(tmp_path):
    apart = written(tmp_path, "\t10\t30\t0.01\t0.1\t0\t0\t0\t0\t0\t0\t1",
                    "\t10\t30\t0.01\t0.1\t0\t0\t0\t0\t0\t0\t0")  # fmt: skip
    text = apart.read_text().replace("\t50\t0\t0\t0\t0\t1", "\t50\t0\t0\t0\t0\t0")
    apart.write_text(text)
    with pytest.raises(ReaderError, match="not connected"):
        read_matpower(apart).shift_factors()


def test_no_damage_to_a_file_is_more_than_a_complaint(tmp_path):
    path, complaints = tmp_path / "case.m", []
    for text in damaged(CASE.encode(), 1500, np.random.default_rng(0)):
        path.write_bytes(text)
        try:
            case = read_matpower(path)
        except ReaderError as error:
            complaints.append(str(error))
        else:
            assert len(case.start) == len(case.end) == len(case.limit)
            assert len(case.least) == len(case.generator_bus)
    assert len(complaints) > 500
    assert all(text.startswith(str(tmp_path)) for text in complaints)
