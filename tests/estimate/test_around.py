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


AROUND = [
    lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    lambda: torch.device("meta"),
    torch.no_grad,
    torch.inference_mode,
    lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    Functions,
    lambda: torch.autocast("cuda", torch.float16),
]


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_the_same_estimate():
    """Under `inference_mode` no layer was said to be trained."""

    def estimated():
        torch._dynamo.reset()
        return tunecompile.estimate(meta_model("llama-tiny", "lora", 8), (2, 64), gpu="h100")

    alone = estimated()
    with contextlib.ExitStack() as stack:
        for around in AROUND:
            stack.enter_context(around())
        assert estimated() == alone
