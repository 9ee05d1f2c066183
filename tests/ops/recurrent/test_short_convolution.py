"""A short causal convolution is torch's, and sees no token of another document."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.ops.checks import assert_fake_is_real, error
from tests.support.ops.recurrent import gradients
from tunecompile.ops import short_convolution


def operands(rows, tokens, channels, width, biased, dtype=torch.float64):
    torch.manual_seed(0)
    made = [torch.randn(rows, tokens, channels), torch.randn(channels, width), torch.randn(channels)]
    made = [x.to(dtype).requires_grad_() for x in made]
    return made if biased else [*made[:2], None]


def by_torch(x, weight, bias, silu):
    made = F.conv1d(x.mT, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    made = made[:, :, : x.shape[1]].mT
    return F.silu(made) if silu else made


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("tokens", "width", "biased"), [(9, 4, True), (2, 4, False), (7, 1, False), (5, 3, True)])
def test_value_and_gradients(tokens, width, biased, silu):
    args = operands(2, tokens, 5, width, biased)
    exact, made = by_torch(*args, silu), short_convolution(*args, None, silu)
    for got, by_definition in zip([made, *gradients([made], args)], [exact, *gradients([exact], args)]):
        torch.testing.assert_close(got, by_definition, rtol=1e-12, atol=1e-12)


def test_documents_are_convolved_by_themselves():
    args, ends = operands(1, 12, 3, 4, True), [0, 1, 3, 8, 11]
    made = short_convolution(*args, torch.tensor(ends), True)
    pieces = [by_torch(args[0][:, a:b], *args[1:], True) for a, b in zip(ends, [*ends[1:], 12])]
    exact = torch.cat(pieces, 1)
    for got, by_definition in zip([made, *gradients([made], args)], [exact, *gradients([exact], args)]):
        torch.testing.assert_close(got, by_definition, rtol=1e-12, atol=1e-12)


def test_rounded_once():
    args = operands(2, 40, 8, 4, True, torch.bfloat16)
    exact = by_torch(*(x.double() for x in args), True)
    assert error(short_convolution(*args, None, True), exact) < torch.finfo(torch.bfloat16).eps


def test_gradients_are_not_padded_behind_alone():
    """torch 2.13 would join each such tensor and its zeros in memory, 4 bytes a channel: four times the gradient of x
    in fp32, and a layer's backward took 78% more."""
    x, weight, grad = torch.randn(1, 9, 4), torch.randn(4, 4), torch.randn(1, 9, 4)
    backward = short_convolution.backward_op.reference
    graph = make_fx(lambda *given: backward(*given, None, None, True))(grad, x, weight).graph
    pads = graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert len(pads) == 9 and all(pad.args[1][2] > 0 for pad in pads)


def test_fakes_and_opcheck():
    args = [x.detach() for x in operands(1, 6, 8, 4, True, torch.bfloat16)]
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    assert_fake_is_real(short_convolution, *args, offsets, True)
    assert_fake_is_real(short_convolution.backward_op, torch.randn_like(args[0]), *args, offsets, True)
    torch.library.opcheck(short_convolution.overload, (*operands(1, 6, 3, 4, False, torch.float32), None, True))
