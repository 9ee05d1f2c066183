"""Each known fault of another package, shown on the version installed: as long as it is there its test must fail, and where it is not must pass."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.models.packed import gradients, pair
from tests.support.offline import finish, start
from tunecompile._torch import known_bugs
from tunecompile._torch.inductor import _inductor_settings
from tunecompile.ir.pretend_gpu import as_on_gpu

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch for CPUs brings no Triton
    triton = tl = None

ROOT = Path(__file__).parents[2]


def shows(name: str, *raises: type[Exception]):
    """The test says how it should be. It fails where the fault should show and does not, and where it should be gone and shows."""
    fault = getattr(known_bugs, name)
    passing = f"where this passes, it is fixed upstream in {fault.package} {known_bugs.installed(fault.package)}: narrow {name} in tunecompile/_torch/known_bugs.py"
    return pytest.mark.xfail(fault.present, reason=passing, strict=True, raises=(AssertionError, *raises))


@pytest.mark.gpu
@shows("MIX_ORDER_REDUCTION")
def test_mix_order_reduction():
    """Two norms whose scales and shifts are slices of one parameter, on enough rows for Inductor to join their reductions."""

    def norms(x, table):
        first, shift, second, other = table.chunk(4, dim=1)
        x = x + F.layer_norm(x, x.shape[-1:]) * (1 + first) + shift
        x = x + F.layer_norm(x, x.shape[-1:]) * (1 + second) + other
        return x.square().mean()

    x, table = (torch.randn(1, n, 1024, device="cuda", requires_grad=True) for n in (32768, 4))
    expected = torch.autograd.grad(norms(x, table), (x, table))
    got = torch.autograd.grad(torch.compile(norms)(x, table), (x, table))
    assert all((g - e).norm() < 1e-3 * e.norm() for g, e in zip(got, expected))


@shows("GUARD_TAGS")
def test_guard_tags():
    """A crash comes in few processes, whenever the collector runs. torch has switched them off for it."""
    assert not getattr(torch._dynamo.config, "use_recursive_dict_tags_for_guards", False)


class Numbered(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return x * ((self.number % 3) * 0.5)


@pytest.mark.gpu
@shows("CUDNN_GRADIENT_LAYOUT")
def test_cudnn_gradient_layout():
    """The second gradient is the first columns of wider rows, the first one was not."""
    q = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    dense = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    wide = torch.randn(2, 64, 12, 64, device="cuda", dtype=torch.bfloat16)[:, :, :4].transpose(1, 2)

    def gradient(kernel, grad):
        with sdpa_kernel(kernel):
            return torch.autograd.grad(F.scaled_dot_product_attention(q, q, q), q, grad)[0]

    gradient(SDPBackend.CUDNN_ATTENTION, dense)
    ours, right = (gradient(kernel, wide) for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH))
    assert (ours - right).float().norm() < 0.05 * right.float().norm()


@shows("REMAINDERS_OF_SYMBOLS", torch._dynamo.exc.BackendCompilerFailed)
def test_remainders_of_symbols():
    call = torch.compile(lambda layer, x: layer(x), backend="aot_eager")
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for number in (4, 7, 8):
            x = torch.ones(2, requires_grad=True)
            assert torch.equal(call(Numbered(number), x), x * (number % 3) * 0.5)


@pytest.mark.gpu
@shows("PADDING_GUARDS_SIZES")
def test_padding_guards_sizes():
    """Rows are more or fewer than the weight has. Of sizes, only theirs changes: where all may, nothing is padded."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    product = torch.compile(lambda x, weight: x @ weight, backend=counter)
    weight = torch.randn(512, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for rows in (100, 30_000, 7):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        product(x, weight).sum().backward()
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (8, 9),
    reason="needs a GPU of the Ada generation",
)
@shows("ROW_SCALES_ON_ADA")
def test_row_scales_on_ada():
    """What is queued on a stream has to wait for what stands before it there. (Few rows: many hang the GPU.)"""
    scales = torch.ones(64, 1, device="cuda"), torch.ones(1, 128, device="cuda")
    a, b = (torch.zeros(n, 256, device="cuda").to(torch.float8_e4m3fn) for n in (64, 128))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        a.copy_(torch.ones_like(a))
        b.copy_(torch.ones_like(b))
        product = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    assert (product == 256).all()


@shows("GROUPED_MM_IN_FP32", torch._dynamo.exc.TorchRuntimeError)
def test_grouped_mm_in_fp32():
    rows, weights, ends = torch.randn(8, 16), torch.randn(2, 16, 8), torch.tensor([3, 8], dtype=torch.int32)
    expected = torch._grouped_mm(rows, weights, offs=ends)
    torch.testing.assert_close(
        torch.compile(lambda *args: torch._grouped_mm(*args), backend="eager")(rows, weights, ends), expected
    )


@shows("TRITON_ANALYSIS_REPEATED")
def test_triton_analysis_repeated(monkeypatch):
    """Two analyses of one kernel with arguments of the same types generate its IR once."""
    pytest.importorskip("triton")
    wrap = pytest.importorskip("torch._higher_order_ops.triton_kernel_wrap")
    analyse = getattr(wrap, "identify_accessed_tensors", None) or wrap.identify_mutated_tensors

    @triton.jit
    def kernel(x, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)

    generated, generate = [], wrap.generate_ttir
    monkeypatch.setattr(wrap, "generate_ttir", lambda *args: generated.append(args) or generate(*args))
    with FakeTensorMode():
        x = torch.empty(64)
    before = dict(vars(triton.runtime.driver))
    with as_on_gpu():
        answers = [str(analyse(kernel, {"x": x, "n": 64, "BLOCK": 64}, {})) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(generated) == 1
    assert vars(triton.runtime.driver).get("_active") is before.get("_active")


@pytest.mark.slow
@shows("DELTA_RULE_ON_SM_100")
def test_delta_rule_on_sm_100():
    pytest.importorskip("triton")
    assert [line["name"] for line in finish(start("delta_operands", "100"))] == ["delta_operands"]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9",
)
@shows("FLA_ON_HOPPER", RuntimeError)
def test_fla_on_hopper():
    """fla raises there, since its gradients would be wrong."""
    rule = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    args = [torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    g = -torch.rand(1, 128, 2, device="cuda")
    rule(*args, g=g, beta=torch.rand(1, 128, 2, device="cuda"), use_qk_l2norm_in_kernel=True)[0].sum().backward()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="needs a CPU with AVX512: bitsandbytes has code of its own for these",
)
@shows("BLOCKS_ACROSS_ROWS")
def test_blocks_across_rows():
    packed, state, values = quantized(8, 160)
    got = torch.ops.bitsandbytes.dequantize_4bit.default(packed, state.absmax, 64, "nf4", [8, 160], torch.float32)
    torch.testing.assert_close(got, values)


@shows("DEQUANTIZED_IN_FP64")
def test_dequantized_in_fp64():
    packed, state, values = quantized(8, 64)
    got = torch.ops.bitsandbytes.dequantize_4bit.default(packed, state.absmax, 64, "nf4", [8, 64], torch.float64)
    torch.testing.assert_close(got, values.double())


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@shows("PACKED_FOR_EVALUATION")
def test_packed_for_evaluation():
    bnb = pytest.importorskip("bitsandbytes")
    if not bnb.functional.has_avx512bf16():
        pytest.skip("needs a CPU with AVX512-BF16: only there does bitsandbytes pack weights")
    linear = bnb.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32).to("cpu")
    x = torch.randn(2, 64)
    linear.eval()(x)
    linear.train()(x.requires_grad_()).sum().backward()
    assert x.grad is not None


def quantized(rows: int, columns: int):
    """(codes, what bitsandbytes knows of them, the values they stand for)."""
    packed, state = pytest.importorskip("bitsandbytes").functional.quantize_4bit(
        torch.randn(rows, columns), blocksize=64, quant_type="nf4"
    )
    codes = torch.stack((packed.reshape(-1) >> 4, packed.reshape(-1) & 15), -1).reshape(-1)
    return packed, state, (state.code[codes.long()] * state.absmax.repeat_interleave(64)).reshape(rows, columns)


@pytest.mark.filterwarnings("ignore")
@shows("ADAPTED_4_BIT_STACKS", RuntimeError)
def test_adapted_4_bit_stacks():
    """Two steps, in which every adapter gets a gradient."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    model, dense = pair("mixtral")
    for _ in range(2):
        assert gradients(model).keys() == gradients(dense).keys()


@pytest.mark.parametrize("name", known_bugs.FAULTS)
def test_every_fault_is_shown_and_avoided(name):
    assert f"test_{name.lower()}" in globals()
    sources = [
        path
        for folder in ("tunecompile", "passes", "templates")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "known_bugs.py"
    ]
    assert any(name in path.read_text(encoding="utf-8") for path in sources), (
        "nothing asks for it any more: leave it out"
    )


@pytest.mark.parametrize(
    "version, present",
    [
        ("2.9.1", False),
        ("2.10.0", True),
        ("2.13.0+cpu", True),
        ("2.15.0a0+git1234567", True),
        ("2.15.0", False),
        (None, False),
    ],
)
def test_a_fault_is_where_its_versions_say(version, present, monkeypatch):
    monkeypatch.setattr(known_bugs, "installed", lambda package: version and known_bugs.TorchVersion(version))
    assert known_bugs.Fault("torch", "It fails", "It is left out", since=(2, 10), fixed=(2, 15)).present == present
    assert not present or known_bugs.Fault("torch", "It fails", "It is left out").present


def test_a_fault_in_words():
    fault = known_bugs.Fault("torch", "it fails", "It is left out", issue="pytorch#1")
    assert str(fault) == f"torch {torch.__version__}: it fails (pytorch#1). It is left out"


def test_graphs_of_changing_sizes_pad_no_products_where_that_guards(monkeypatch):
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = ShapeEnv().create_unbacked_symint()
    for fixed in (None, (2, 10)):
        fault = dataclasses.replace(known_bugs.PADDING_GUARDS_SIZES, fixed=fixed)
        monkeypatch.setattr(known_bugs, "PADDING_GUARDS_SIZES", fault)
        settings = [_inductor_settings([*sizes, torch.ones(2)], None, None, True) for sizes in ([], [size])]
        assert ["shape_padding" in each for each in settings] == [False, fixed is None]
