"""Data parallelism: the batch is spread over devices, everything else is on all."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def mesh(devices) -> Mesh:
    """One axis, over which batches are cut."""
    return Mesh(np.array(devices), ("batch",))


def batch_sharding(devices) -> NamedSharding | None:
    """For arrays whose leading axis is the batch; None on one device."""
    if len(devices) == 1:
        return None
    return NamedSharding(mesh(devices), PartitionSpec("batch"))


def everywhere(tree, devices):
    """`tree` with a copy of every array on every device, of all processes."""
    if len(devices) == 1:
        return jax.device_put(tree, devices[0])
    return jax.device_put(tree, NamedSharding(mesh(devices), PartitionSpec()))


def connect(coordinator: str | None, processes: int | None, index: int | None) -> None:
    """Join the processes of a distributed run; nothing where none are asked for."""
    if (coordinator, processes, index) == (None, None, None):
        return
    if coordinator is None or processes is None or index is None:
        raise ValueError(
            "a distributed run needs the address of its first process, how many there "
            "are, and which one this is (--coordinator, --processes, --process)."
        )
    jax.distributed.initialize(coordinator, processes, index)
