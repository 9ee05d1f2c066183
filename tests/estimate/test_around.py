"""What is in force around an estimate, and does not belong to the step, changes nothing of it."""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

import tunecompile
from tunecompile.estimate.meta_model import meta_model

pytest.importorskip("peft")


@contextlib.contextmanager
def setting(read, write, value):
    """A setting of torch's that has no context of its own."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


class Functions(TorchFunctionMode):
    """Of the user: sees all functions, and changes none."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


AROUND = {
    "a default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "a default device": lambda: torch.device("meta"),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic algorithms": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "a mode that sees functions": Functions,
    "autocast of another device": lambda: torch.autocast("cuda", torch.float16),
}


@pytest.fixture(scope="module")
def alone():
    return tunecompile.estimate(meta_model("llama-tiny", "qlora", 8), (2, 64), gpu="h100")


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.parametrize("around", [[*AROUND][:3], [*AROUND][3:]], ids=", ".join)
def test_the_same_estimate(around, alone):
    """Under `inference_mode` no layer was said to be trained."""
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        for each in around:
            stack.enter_context(AROUND[each]())
        assert tunecompile.estimate(meta_model("llama-tiny", "qlora", 8), (2, 64), gpu="h100") == alone
