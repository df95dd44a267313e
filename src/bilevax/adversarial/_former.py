"""Module paths of version 0.1, which warn and lead to the rooms of today."""

import importlib
import sys
import types
import warnings

_ROOMS = {
    "networks": "layers batch_norm network start stages resnet preact_resnet "
    "small_convnet models",
    "data": "images cifar_files npz_files augment batches",
    "attacks": "losses boxes attack pgd apgd restarts ensemble survivors evaluate",
    "training": "lower_level signed_steps problem settings schedules recipes "
    "devices curves watch run_folder weights",
}


class _Former(types.ModuleType):
    """A module that is somewhere else now."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        now = self.__dict__["_now"]
        warnings.warn(
            f"{self.__name__} is {now} now; the former path goes with version 0.3.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(now), name)


def keep_former_paths(package: str) -> None:
    """Let `package.<module>` be imported although it lies in a room."""
    for room, modules in _ROOMS.items():
        for name in modules.split():
            former = _Former(f"{package}.{name}")
            former.__dict__["_now"] = f"{package}.{room}.{name}"
            sys.modules[former.__name__] = former
