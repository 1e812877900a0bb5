"""What the cases of bench/peers.py share: where they run, packages, comparing."""
import importlib

import torch

DEVICE = "cuda"


class Missing(Exception):
    """A package that is not there, or lacks what a peer needs."""


def package(name, *functions):
    """A module that has these functions. Raises Missing, which says what is not there."""
    try:
        module = importlib.import_module(name)
    except Exception as problem:  # also a library that its binary does not find
        words = str(problem).strip().splitlines() or [type(problem).__name__]
        raise Missing(f"no {name}: {words[0]}") from None
    for function in functions:
        if not hasattr(module, function):
            raise Missing(f"{name} {version(module)} has no {function}")
    return module


def version(module):
    return getattr(module, "__version__", "of no version")


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def int32(values):
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def expect(got, want, share, what="the result"):
    """Raises unless got is want within `share` of the largest |want|."""
    if got.shape != want.shape:
        raise AssertionError(f"{what} has shape {list(got.shape)}, not {list(want.shape)}")
    off = (got.float() - want.float()).abs().max().item()
    size = want.float().abs().max().item()
    if not off <= share * size:
        raise AssertionError(f"{what} is off by {off:.3g} of {size:.3g}")


class Case:
    """Work that several peers do. peers: {name: function}; such a function returns what is
    timed, and only it asks for its package. check(out) raises if a result is wrong."""

    def peers(self):
        raise NotImplementedError

    def check(self, out):
        raise NotImplementedError
