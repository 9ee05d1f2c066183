"""Templates run on the GPU where there is one, else in Triton's interpreter on the CPU: one test for both."""

import pytest
import torch


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """torch.empty returns NaNs (255 for bytes), so that a kernel that leaves an element unwritten is seen."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(t):
        return t.fill_(float("nan") if t.is_floating_point() else min(255, torch.iinfo(t.dtype).max))

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.fixture
def gpu_only(device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def exact_fp8(monkeypatch):
    """Triton's interpreter (3.9) forgets the carry when it rounds to e4m3, and truncates its smallest numbers: torch converts instead."""
    if torch.cuda.is_available():
        return
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    theirs = interpreter._convert_float

    def convert(values, source, target, rounding):
        if (source, target) == (tl.float32, tl.float8e4nv):  # saturating, as the GPU's instruction
            return (
                torch.from_numpy(values.view(numpy.float32).copy())
                .clamp(-448, 448)
                .to(torch.float8_e4m3fn)
                .view(torch.uint8)
                .numpy()
            )
        if (source, target) == (tl.float8e4nv, tl.float32):
            return (
                torch.from_numpy(values.view(numpy.uint8).copy())
                .view(torch.float8_e4m3fn)
                .float()
                .numpy()
                .view(numpy.uint32)
            )
        return theirs(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def relative_error(value, reference):
    """||value - reference|| / ||reference|| in fp64; the norm of the error where the reference is zero."""
    assert value.shape == reference.shape, (value.shape, reference.shape)
    value, reference = value.detach().double(), reference.detach().double()
    norm = reference.norm()
    error = (value - reference).norm()
    return float(error / norm) if norm > 0 else float(error)


def tolerance(dtype):
    """The most that one rounding to ``dtype`` can do to a norm, and a little: eps/2, or eps where bf16 is truncated (``cast``)."""
    if dtype == torch.float32:
        return 2e-6
    return torch.finfo(dtype).eps * (1.1 if dtype == torch.bfloat16 and not torch.cuda.is_available() else 0.55)


def cast(value, dtype):
    """``value`` (fp32) in ``dtype`` as a kernel stores it: rounded, except that Triton's interpreter truncates to bf16."""
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        value = (value.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return value.to(dtype)


@pytest.fixture(name="cast")
def _cast():
    return cast


@pytest.fixture(name="error")
def _error():
    return relative_error


@pytest.fixture(name="bound")
def _bound():
    return tolerance
