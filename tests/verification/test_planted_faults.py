"""Every fault that is planted into an op is found by each of three nets: the op alone, the pass that makes it, a model's training step."""

import pytest

from tests.support.planted import SUBJECTS, Fault, model_holds, op_holds, pass_holds, plant
from tunecompile import ops
from tunecompile.ir.op import Op

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

#: subject -> (what is wrong, the source, what stands there in its place)
PLANTED = {
    "layer norm": [
        ("lost mean of the gradient", "inverse * (scaled - scaled.mean(-1, keepdim=True) - ", "inverse * (scaled - "),
        ("dropped bias", "made if bias is None else made + bias.to(made.dtype)", "made"),
        ("a mean that stays", "centred = wide - wide.mean(-1, keepdim=True)", "centred = wide"),
    ],
    "residual layer norm": [
        ("lost residual gradient", "(dx + grad_total).to(out1.dtype)", "dx.to(out1.dtype)"),
    ],
    "modulated norm": [
        ("dropped 1", "made * (offset + scale", "made * (0 + scale"),
        ("shift's gradient that is scaled", "_as(wide, shift)", "_as(scaled, shift)"),
    ],
    "residual modulated norm": [
        ("lost residual gradient", "(dx + grad_total).to(out1.dtype)", "dx.to(out1.dtype)"),
    ],
    "norm": [
        ("wrong sign of the projection", "dx = r * (scaled - normed", "dx = r * (scaled + normed"),
        ("lost 1/rms", "dx = r * (scaled", "dx = (scaled"),
        ("dropped projection", "(scaled - normed * (scaled * normed).mean(-1, keepdim=True))", "scaled"),
        ("sum in place of mean", "(scaled * normed).mean(-1, keepdim=True)", "(scaled * normed).sum(-1, keepdim=True)"),
        ("gradient without the weight", "scaled = grad.to(wide.dtype) * (offset + weight.to(wide.dtype))", "scaled = grad.to(wide.dtype)"),
        ("weight's gradient of the rows before the norm", "(grad.to(wide.dtype) * factor)", "(grad.to(wide.dtype) * wide)"),
        ("lost epsilon", "normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)", "normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True))"),
        ("lost weight", "return (offset + weight if offset else weight) * normed.to(x.dtype)", "return normed.to(x.dtype)"),
    ],
    "Gemma's norm": [
        ("lost offset", "return (normed * (offset + weight.to(wide.dtype)))", "return (normed * weight.to(wide.dtype))"),
        ("offset twice in the gradient", "* (offset + weight.to(wide.dtype))\n    dx", "* (2 * offset + weight.to(wide.dtype))\n    dx"),
    ],
    "residual norm": [
        ("dropped residual gradient", "(dx + grad_total)", "dx"),
        ("residual gradient twice", "(dx + grad_total)", "(dx + 2 * grad_total)"),
        ("wrong sign of the residual", "        total = x + residual\n", "        total = x - residual\n"),
    ],
    "SwiGLU": [
        ("swapped gradients", "[(wide * up * slope).to(gate.dtype), (wide * value).to(up.dtype)]", "[(wide * value).to(gate.dtype), (wide * up * slope).to(up.dtype)]"),
        ("wrong sign in the slope", "sigmoid * (1 + x * (1 - sigmoid))", "sigmoid * (1 - x * (1 - sigmoid))"),
        ("gradient without the other factor", "(wide * up * slope)", "(wide * slope)"),
        ("swapped operands", 'wide = gate.to(compute_dtype(gate.dtype))\n    if activation == "silu":', 'wide, up = up.to(compute_dtype(gate.dtype)), gate\n    if activation == "silu":'),
        ("another activation", "value = F.silu(wide)", "value = F.gelu(wide)"),
    ],
    "weighted gate": [
        ("gradient without the weight", "reference(wide * weights, gate", "reference(wide, gate"),
        ("weight in its own gradient", "(wide * product).sum", "(wide * weights * product).sum"),
    ],
    "clamped gate": [
        ("gradient beyond the limit", "torch.where(gate_inside, d_gate, 0)", "d_gate"),
        ("no offset of up", "torch.sigmoid(alpha * gate) * (up + 1)", "torch.sigmoid(alpha * gate) * up"),
        ("slope without alpha", "(1 + alpha * gate * (1 - sigmoid))", "(1 + gate * (1 - sigmoid))"),
    ],
    "GeGLU": [
        ("wrong factor in the slope", "(1 + 3 * cubic * x * x)", "(1 + 2 * cubic * x * x)"),
        ("exact in place of the approximation", 'approximate="tanh" if', 'approximate="none" if'),
    ],
    "RoPE": [
        ("gradient turned the wrong way", "- turn(g * sin.to(wide), interleaved)", "+ turn(g * sin.to(wide), interleaved)"),
        ("gradient not turned", " - turn(g * sin.to(wide), interleaved)", ""),
        ("swapped tables", "(x * cos + turn(x, interleaved) * sin)", "(x * sin + turn(x, interleaved) * cos)"),
        ("turned the other way, gradient too", "(-x[..., half:], x[..., :half])", "(x[..., half:], -x[..., :half])"),
        ("halves permuted", "(-x[..., half:], x[..., :half])", "(-x[..., :half], x[..., half:])"),
    ],
    "RoPE of pairs": [
        ("gradient turned the wrong way", "- turn(g * sin.to(wide), interleaved)", "+ turn(g * sin.to(wide), interleaved)"),
        ("gradient of the other layout", "- turn(g * sin.to(wide), interleaved)", "- turn(g * sin.to(wide), not interleaved)"),
        ("turned the other way, gradient too", "torch.arange(-1, 2, 2,", "torch.arange(1, -2, -2,"),
        ("members permuted", ".flip(-1) * signs", " * signs"),
        ("the other layout", "rotate_pairs(x) if interleaved", "rotate_half(x) if interleaved"),
    ],
    "LoRA": [
        ("lost scale", "((xa @ b[i].to(dtype).t()) * scales[i])", "(xa @ b[i].to(dtype).t())"),
        ("lost scale in dA and dx", "gb = (g @ b[i].to(dtype)) * scales[i]", "gb = g @ b[i].to(dtype)"),
        ("lost scale in dB", "((g.t() @ xas[i]) * scales[i])", "(g.t() @ xas[i])"),
        ("dropped share of dx", "base = down.to(x.dtype) if not inputs else None", "base = None"),
        ("wrong sign of dA", "d_a.append((gb.t() @", "d_a.append((-gb.t() @"),
        ("permuted ranks", "d_b.append(((g.t() @ xas[i])", "d_b.append(((g.t() @ xas[i].flip(1))"),
    ],
    "LoRA and bias": [
        ("dropped bias", "delta = delta + biases[i].to(x.dtype)", "pass"),
    ],
    "NF4": [
        ("swapped nibbles", "(flat >> 4, flat & 15)", "(flat & 15, flat >> 4)"),
        ("lost offset of the scales", "code[absmax.long()] * scale[outer] + offset", "code[absmax.long()] * scale[outer]"),
        ("a wrong level", "0.7229568362236023", "0.7329568362236023"),
        ("permuted dimensions", ".to(dtype).reshape(rows, columns)", ".to(dtype).reshape(columns, rows).t().contiguous()"),
    ],
    "loss": [
        ("dropped rows", "rows = (labels != ignore_index)", "rows = (labels > labels.median())"),
        ("dropped mask", "(), dtype=wide, device=hidden.device)\n", "(), dtype=wide, device=hidden.device)\n    labels = labels.clamp(min=0)\n"),
        ("wrong sign of the label's gradient", "label_smoothing - 1)", "label_smoothing + 1)"),
        ("gradient does not follow the loss's", "        _times(out, grad, weight.dtype", "        _times(out, grad.sign(), weight.dtype"),
    ],
    "capped loss": [
        ("lost slope of the cap", "d = d * (1 - t * t)", "pass"),
    ],
    "scaled loss": [
        ("lost scale in the gradient", "d = d * scale", "pass"),
    ],
    "smoothed loss": [
        ("dropped smoothing in the gradient", "d.sub_(label_smoothing / vocabulary)", "pass"),
    ],
    "experts": [
        ("input's gradient without the adapters' share", "dx = dx + by.rows(gb, downs(a, experts, x.dtype), offsets)", "pass"),
        ("lost scale in the gradient", "d_b = split_ups(by.outer(xa, grad, offsets), b, scales)", "d_b = split_ups(by.outer(xa, grad, offsets), b, [1.0] * len(scales))"),
        ("lost adapters", "y = y + by.rows(xa, ups(b, scales, experts, x.dtype), offsets)", "pass"),
        ("rows of another expert", "y = by.rows(x, weight if transposed else weight.transpose(1, 2), offsets)", "y = by.rows(x, (weight if transposed else weight.transpose(1, 2)).flip(0), offsets)"),
    ],
    "experts' weights": [
        ("lost scale in the gradient", "*split_ups(d_up, b, scales)", "*split_ups(d_up, b, [1.0] * len(scales))"),
        ("lost sign", "d_down = torch.bmm(up, wide)", "d_down = torch.bmm(up, -wide)"),
    ],
    "experts' biases": [
        ("lost bias", "y = (y + biases_of_rows(bias, x.shape[0], offsets)).to(x.dtype)", "pass"),
        ("gradient of another expert", "d_bias = bias_gradient(by, grad, offsets, bias)", "d_bias = bias_gradient(by, grad, offsets.flip(0), bias)"),
    ],
    "rows to experts": [
        ("gradient of another row", "collected(grad, places, choices, grad.dtype)", "collected(grad, order, choices, grad.dtype)"),
    ],
    "rows of experts": [
        ("gradient of another row", "spread(grad, order, choices)", "spread(grad, places, choices)"),
    ],
    "delta rule": [
        ("lost decay of what enters", "(chunks.entering * chunks.q) @", "chunks.q @"),
        ("gradient without the final state's", "(incoming, grad_final[:, heads]", "(incoming, 0 * grad_final[:, heads]"),
        ("one of the pairs' gradients", "+ by_system @ k + by_system.mT @ k", "+ by_system @ k"),
        ("lost share of the end's decay", "d_last = d_end.sum((-1, -2)) + ", "d_last = "),
        ("lost scale in the gradient", "unit_q.gradient(dq * scale)", "unit_q.gradient(dq)"),
    ],
    "delta rule by channels": [
        ("lost decay of what enters", "(chunks.entering * chunks.q) @", "chunks.q @"),
        ("lost scale in the gradient", "unit_q.gradient(dq * scale)", "unit_q.gradient(dq)"),
    ],
    "state space": [
        ("a delta", "forward(_CHUNKS, ALL", "forward(Chunks.of, ALL"),
        ("a delta in the gradient", "backward(_CHUNKS, ALL", "backward(Chunks.of, ALL"),
    ],
    "selective scan": [
        ("lost states", "chunks.outputs(states)", "chunks.outputs(0 * states)"),
        ("gradient without the final state's", "chunks.leaving(given, grad_final[:, d].to(wide))", "chunks.leaving(given, 0 * grad_final[:, d].to(wide))"),
    ],
    "short convolution": [
        ("lost bias", "return made if bias is None else made + bias", "return made"),
        ("gradient of another token", "_ahead(given, steps, documents)", "given"),
        ("lost slope", "given * gate * (1 + z * (1 - gate))", "given * gate"),
    ],
    "rows of a forest": [
        ("lost copies", ".to(wide) + _taken(further, own[1])", ".to(wide)"),
    ],
    "first copies": [
        ("gradient at all copies", "torch.where(first, rows, -1)", "rows"),
    ],
    "convolution of documents": [
        ("a leak in the gradient", "torch.where(alike[:, None], moved, 0)\n\n\ndef _stored", "moved\n\n\ndef _stored"),
    ],
    "attention": [
        ("dropped causal mask", "seen = self.distance >= 0", "seen = self.distance >= -99"),
        ("lost scale in the gradient", "keepdim=True)) * slope * scale", "keepdim=True)) * slope"),
        ("dropped share of the softmax", "(change - (weights * change).sum(-1, keepdim=True))", "change"),
        ("one of the heads that share a key", ".sum(2)", "[:, :, 0].contiguous()"),
    ],
    "attention with sinks": [
        ("dropped sinks", "if sinks is not None:", "if False:"),
        ("lost share of a sink", "return -(shares * ", "return -("),
    ],
    "attention of images": [
        ("each sees what stands before it", "if self.causal else", "if True else"),
        ("places without a patch are seen", "self.taken[:, None] | (", "self.taken[:, None] | True | ("),
    ],
    "attention with a cap": [
        ("dropped cap", "made, slope = softcap * bent", "made, slope = made"),
        ("lost slope of the cap", "keepdim=True)) * slope * scale", "keepdim=True)) * scale"),
    ],
    "attention of whole rows": [
        ("a token too many", "place[:, None] < place", "place[:, None] < place - 1"),
        ("scale twice", "_of_each(k, q).mT * scale", "_of_each(k, q).mT * scale * scale"),
        ("one of the heads that share a key", ".sum(2)", "[:, :, 0]"),
        ("lost slope of the sums", "(grad * _wide(out0)).sum(-1, keepdim=True)", "0.0"),
    ],
    "attention of one query": [
        ("lost scale", "_wide(k).mT) * scale", "_wide(k).mT)"),
        ("lost cap", "scores = softcap * torch.tanh(scores / softcap)", "pass"),
        ("lost mask", "else scores + mask", "else scores"),
        ("sinks in another order", "sinks.to(scores.dtype)", "sinks.to(scores.dtype).flip(0)"),
        ("lost sinks", "if sinks is not None:", "if False:"),
    ],
    "attention of branches": [
        ("one of the heads that share a key", ".sum(1)", "[:, 0]"),
        ("scale twice", "_of_heads(k, q).mT * scale", "_of_heads(k, q).mT * scale * scale"),
        ("no prefix", "True, tree, places", "True, None, None"),
        ("places of the row of branches", "tree, places)[0]", "tree, offsets.new_tensor(range(q.shape[0])))[0]"),
        ("lost slope of the cap", "(dweights - delta) * slope", "(dweights - delta)"),
        ("lost slope of the sums", "(dweights - delta)", "dweights"),
    ],
    "attention with dropout": [
        ("kept weights that do not grow", ".to(torch.float32) / (1 - dropout)", ".to(torch.float32)"),
        ("values see all weights", "kept.transpose(-1, -2) @ dout", "weights.transpose(-1, -2) @ dout"),
        ("dropped weights have a gradient", "change * factors, weights * factors", "change, weights * factors"),
        ("other weights in the backward", "drawn_again = _factors(places, q.shape[1], dropout, seed)", "drawn_again = _factors(places, q.shape[1], dropout, seed + 1)"),
        ("lost slope of the sums", "(change - (weights * change).sum(-1, keepdim=True))", "change"),
        ("one of the heads that share a key", "self.tokens(dk, k.shape[1])", "self.tokens(dk)[:, : k.shape[1]]"),
    ],
    "attention in a window": [
        ("a token too many", "(self.distance.abs() < window)", "(self.distance.abs() <= window)"),
    ],
}  # fmt: skip
FAULTS = [Fault(of, *row) for of, rows in PLANTED.items() for row in rows]


def named(faults):
    return [pytest.param(fault, id=f"{fault.of}: {fault.what}") for fault in faults]


MADE_OF_OTHERS = {"lora_mlp", "lora_mlp_tiled", "linear_cross_entropy_rows"}


def test_every_op_with_a_gradient_has_faults():
    """But for those that are tested, bit for bit or in fp64, against the ops that they are made of."""
    differentiable = {op.name for op in vars(ops).values() if isinstance(op, Op) and op.backward_op is not None}
    assert MADE_OF_OTHERS < differentiable
    assert differentiable - MADE_OF_OTHERS <= {SUBJECTS[fault.of].op for fault in FAULTS}
    assert {fault.of for fault in FAULTS} == set(SUBJECTS)


@pytest.mark.parametrize("of", SUBJECTS)
def test_what_is_right_goes_through_the_nets(of, monkeypatch):
    subject = SUBJECTS[of]
    assert op_holds(plant(monkeypatch, subject), subject)
    assert not subject.passes or pass_holds(subject)


@pytest.mark.parametrize("fault", named(FAULTS))
def test_the_op_alone_shows_it(fault, monkeypatch):
    subject = SUBJECTS[fault.of]
    assert not op_holds(plant(monkeypatch, subject, fault.old, fault.new), subject)


@pytest.mark.parametrize("fault", named(fault for fault in FAULTS if SUBJECTS[fault.of].passes))
def test_the_pass_shows_it(fault, monkeypatch):
    subject = SUBJECTS[fault.of]
    plant(monkeypatch, subject, fault.old, fault.new)
    assert not pass_holds(subject)


@pytest.mark.slow
@pytest.mark.parametrize("of", [of for of, subject in SUBJECTS.items() if subject.model])
def test_a_right_step_is_verified(of, monkeypatch):
    plant(monkeypatch, SUBJECTS[of])
    assert model_holds(SUBJECTS[of], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("fault", named(fault for fault in FAULTS if SUBJECTS[fault.of].model))
def test_verification_of_a_model_shows_it(fault, monkeypatch):
    plant(monkeypatch, SUBJECTS[fault.of], fault.old, fault.new)
    assert not model_holds(SUBJECTS[fault.of], monkeypatch)
