"""What passes find in a step of a rollout, which has no gradient: one query over a cache, and 4-bit weights of few rows."""

import importlib

import pytest
import torch
import torch.nn.functional as F

from tests.support.passes.functions import linear_4bit, repeated
from tests.support.passes.run import Recorder, family, random
from tunecompile.ops import dequantize_4bit, dequantize_mxfp4

ATTENTION, LINEAR = family("one_query_attention"), family("nf4", "linear_4bit")
EXPERTS = family("experts", "expert_biases", "nf4", "packed_experts")
ROWS, HEADS, LENGTH, WIDTH = 2, 4, 10, 8


def found(fn, *args, passes, grad=False, tol=1e-5):
    """The ops in the graph, and why nothing was rewritten; the result has to be that of the function."""
    torch._dynamo.reset()
    recorder = Recorder(passes)
    with torch.set_grad_enabled(grad):
        expected = fn(*(arg.clone() for arg in args))
        torch.testing.assert_close(
            torch.compile(fn, backend=recorder)(*(arg.clone() for arg in args)), expected, atol=tol, rtol=tol
        )
    return dict(recorder.seen.ops), recorder.seen.refused


def cached(queries=1, keys=2, grad=False):
    """Queries, a cache, and a mask that hides its end."""
    mask = torch.arange(LENGTH)[None, None, None].expand(ROWS, 1, queries, LENGTH) < 7
    made = [random(ROWS, heads, n, WIDTH, grad=grad) for heads, n in ((HEADS, queries), (keys, LENGTH), (keys, LENGTH))]
    return *made, mask


def over_cache(q, k, v, mask):
    k, v = (repeated(x, q.shape[1] // x.shape[1]) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def after_a_token(q, k, v, mask):
    at, token = torch.tensor([6]), q[:, :2]
    k.index_copy_(2, at, token)
    v.index_copy_(2, at, 2 * token)
    return over_cache(q, k, v, mask)


def added(q, k, v, mask):
    return over_cache(q, k, v, torch.where(mask, 0.0, -1e9))


def written_out(sinks=True, cap=0.0):
    """As transformers writes gpt-oss, and Gemma 2."""

    def attention(q, k, v, mask):
        k, v = (repeated(x, q.shape[1] // x.shape[1]) for x in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
        scores = torch.tanh(scores / cap) * cap if cap else scores
        scores = scores + torch.where(mask, 0.0, -1e9)
        if not sinks:
            return torch.matmul(scores.softmax(-1), v)
        column = torch.linspace(-1, 1, HEADS).reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        scores = torch.cat([scores, column], dim=-1)
        scores = scores - scores.max(dim=-1, keepdim=True).values
        return torch.matmul(F.softmax(scores, dim=-1)[..., :-1], v)

    return attention


def written_between(q, k, v, mask):
    """Keys are repeated before they are written to: the call reads the old ones."""
    old = repeated(k, 2)
    k.mul_(2.0)
    return F.scaled_dot_product_attention(q, old, repeated(v, 2), attn_mask=mask, scale=0.3) + k.sum()


@pytest.mark.parametrize("fn", [over_cache, after_a_token, added, written_out(), written_out(False, cap=2.0)])
@pytest.mark.parametrize("keys", [2, 4])
def test_one_query_over_a_cache(fn, keys):
    if fn is after_a_token and keys != 2:
        pytest.skip("two heads are written")
    assert found(fn, *cached(keys=keys), passes=ATTENTION)[0] == {"one_query_attention": 1}


def per_head(q, k, v, mask):
    return over_cache(q, k, v, mask.expand(-1, HEADS, -1, -1) & (torch.arange(HEADS)[None, :, None, None] < 9))


def of_all_heads(q, k, v, mask):
    """A mask for each head, in scores that are written out."""
    return written_out()(q, k, v, mask.expand(-1, HEADS, -1, -1) & (torch.arange(HEADS)[None, :, None, None] < 9))


@pytest.mark.parametrize(
    ("fn", "args", "grad"),
    [
        (over_cache, cached(queries=2), False),
        (over_cache, cached(grad=True), True),
        (per_head, cached(), False),
        (of_all_heads, cached(), False),
        (written_out(), cached(queries=2), False),
        (written_out(), cached(grad=True), True),
        (written_between, cached(), False),
    ],
)
def test_what_stays_torchs(fn, args, grad):
    assert found(fn, *args, passes=ATTENTION, grad=grad)[0] == {}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """The op's reference runs on the CPU."""
    for name, asked in (("nf4", "refuse"), ("experts.packed", "refuse_packed")):
        module = importlib.import_module(f"tunecompile.passes.recognize.{name}")

        def refuse(*args, refused=getattr(module, asked)):
            reason = refused(*args)
            return None if reason is None or reason.code == "not-on-gpu" else reason

        monkeypatch.setattr(module, asked, refuse)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"double": False}, {"quant_type": "fp4"}], ids=str)
def test_linears_of_few_rows(on_a_gpu, options):
    layer = linear_4bit(n=128, k=128, **options).requires_grad_(False)
    assert found(layer, random(3, 128, grad=False), passes=LINEAR)[0] == {"linear_4bit": 1}


def test_linears_of_many_rows_or_with_a_gradient(on_a_gpu):
    layer = linear_4bit(n=128, k=128).requires_grad_(False)
    assert found(layer, random(65, 128, grad=False), passes=LINEAR)[0] == {"dequantize_4bit": 1}
    assert found(layer, random(3, 128), passes=LINEAR, grad=True)[0] == {"dequantize_4bit": 1}


def by_mxfp4(x, codes, exponents, ends, bias, ids):
    """As gpt-oss has its stacks: turned."""
    stack = dequantize_mxfp4(codes, exponents, 4 * 64, 128, x.dtype).view(4, 64, 128).transpose(1, 2)
    return torch._grouped_mm(x, stack, offs=ends) + bias[ids]


def by_4_bits(x, codes, absmax, ends, bias, ids):
    stack = dequantize_4bit(codes, absmax, None, None, None, 4 * 64, 128, 64, "nf4", x.dtype).view(4, 64, 128)
    return torch._grouped_mm(x, stack.transpose(1, 2), offs=ends)


def turned_otherwise(x, codes, absmax, ends, bias, ids):
    """Codes run along what is not summed over: no row of theirs is one of a matrix."""
    stack = dequantize_4bit(codes, absmax, None, None, None, 4 * 128, 64, 64, "nf4", x.dtype).view(4, 128, 64)
    return torch._grouped_mm(x, stack, offs=ends)


@pytest.mark.parametrize("fn", [by_mxfp4, by_4_bits, turned_otherwise])
@pytest.mark.parametrize("rows", [10, 600])
def test_packed_experts_of_few_rows(on_a_gpu, fn, rows):
    codes, scales = (torch.randint(low, high, (4 * 64 * 128 // by,), dtype=torch.uint8) for low, high, by in FORMAT)
    ends = torch.tensor([3, 3, rows - 3, rows], dtype=torch.int32)
    ids = torch.arange(rows).ge(ends[:, None]).sum(0)
    x, bias = (random(n, k, grad=False, dtype=torch.bfloat16) for n, k in ((rows, 128), (4, 64)))
    scales = scales if fn is by_mxfp4 else torch.rand(4 * 64 * 128 // 64)
    ops, _ = found(fn, x, codes, scales, ends, bias, ids, passes=EXPERTS, tol=2e-2)
    few = rows == 10 and fn is not turned_otherwise
    assert ops == {"packed_experts": 1} if few else "packed_experts" not in ops


FORMAT = ((0, 256, 2), (120, 127, 32))  #: of MXFP4: from, to, weights
