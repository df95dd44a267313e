"""Readers of formats in which people have networks: TNTP (roads), MATPOWER (power).

They read text, run nothing, and name file, line and cause where a file is damaged.
"""

from .lines import ReaderError as ReaderError
from .matpower import PowerCase as PowerCase, read_matpower as read_matpower
from .tntp import RoadNetwork as RoadNetwork, read_tntp as read_tntp
