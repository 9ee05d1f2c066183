"""Functions with kernels of other packages behind them: an op is traced in their place, where they are transformers' own."""

import importlib
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import hybrids
from tunecompile.integrations.kernel_functions import meanings
from tunecompile.integrations.kernel_functions.substitute import _has_unknown, knows_documents, substitute

pytest.importorskip("transformers.models.qwen3_5")


def test_functions_are_known_under_autocast():
    """As a plan traces them: in bf16 the loop over chunks was unrolled, and a plan of 2,048 tokens took seven minutes."""
    import transformers.models.bamba.modeling_bamba as bamba
    import transformers.models.mamba.modeling_mamba as mamba
    import transformers.models.qwen3_5.modeling_qwen3_5 as home

    for file, name in (
        (home, "torch_chunk_gated_delta_rule"),
        (home, "causal_conv1d_fn"),
        (bamba, "mamba2_chunk_scan"),
        (mamba, "mamba_selective_scan"),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            assert meanings.agrees(getattr(file, name).__wrapped__, meanings.MEANINGS[name]), name


class Multiplied(TorchDispatchMode):
    """Notes the most multiplications of one product."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.most = max(self.most, args[0].numel() * args[1].shape[-1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_examples_are_too_small_for_products_in_bf16(family):
    """oneDNN multiplies larger ones so where `set_float32_matmul_precision("medium")` is set, on CPUs that can: no
    function would have been known. This CPU may be none of them."""
    home = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    for name in meanings.MEANINGS.keys() & vars(home).keys():
        with Multiplied() as seen:
            assert meanings.agrees(getattr(home, name).__wrapped__, meanings.MEANINGS[name])
        assert seen.most <= 16**3, name


def test_a_function_without_chunks_is_compared_too():
    import transformers.models.qwen3_5.modeling_qwen3_5 as home

    def alone(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False):
        options = dict(initial_state=initial_state, output_final_state=output_final_state)
        rule = home.torch_chunk_gated_delta_rule.__wrapped__
        return rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options)

    assert meanings.agrees(alone, meanings.MEANINGS["torch_chunk_gated_delta_rule"])


def test_a_layer_that_was_asked_of_before_its_functions_were_compared(monkeypatch):
    """They are compared later where the first attempt was under a mode; the layer was taken for one without ops."""
    module = importlib.import_module("tunecompile.integrations.kernel_functions.substitute")
    monkeypatch.setattr(module, "_taken", {})
    layer = hybrids.make("qwen3_5").model.layers[0]
    assert not knows_documents(layer)
    with FakeTensorMode():
        assert substitute({type(inner) for inner in layer.modules()}) is None
    assert substitute({type(inner) for inner in layer.modules()})
    assert knows_documents(layer)


def test_what_gives_something_else_is_no_op():
    import transformers.models.qwen3_5.modeling_qwen3_5 as home

    written = home.torch_chunk_gated_delta_rule.__wrapped__
    rule = meanings.MEANINGS["torch_chunk_gated_delta_rule"]
    assert meanings.agrees(written, rule)
    assert not meanings.agrees(lambda *args, **kwargs: (2 * written(*args, **kwargs)[0], None), rule)
    assert not meanings.agrees(lambda query: query, rule)
    import transformers.models.bamba.modeling_bamba as bamba

    assert meanings.agrees(bamba.mamba2_chunk_scan.__wrapped__, meanings.MEANINGS["mamba2_chunk_scan"])
    short_cut = meanings.MEANINGS["mamba2_split_conv1d_scan_combined"]
    assert meanings.agrees(bamba.mamba2_split_conv1d_scan_combined.__wrapped__, short_cut)
    assert not meanings.agrees(lambda *args, **kwargs: torch.ones(()), short_cut)
    import transformers.models.mamba.modeling_mamba as mamba

    scan = meanings.MEANINGS["mamba_selective_scan"]
    assert meanings.agrees(mamba.mamba_selective_scan.__wrapped__, scan)
    assert not meanings.agrees(lambda *args, z, **kw: mamba.mamba_selective_scan.__wrapped__(*args, **kw), scan)
    assert meanings.agrees(mamba.mamba_inner_fn.__wrapped__, meanings.MEANINGS["mamba_inner_fn"])
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    channels = meanings.MEANINGS["chunk_kimi_delta_attention"]
    assert meanings.agrees(kimi.chunk_kimi_delta_attention.__wrapped__, channels)
    assert not meanings.agrees(written, channels)
    convolution = meanings.MEANINGS["causal_conv1d_fn"]
    assert meanings.agrees(home.causal_conv1d_fn.__wrapped__, convolution)
    assert not meanings.agrees(lambda x, w, b, activation: home.causal_conv1d_fn.__wrapped__(x, w, b), convolution)


def test_calls_that_no_op_has():
    called = []

    def itself(*args, **kwargs):
        called.append(kwargs)
        return args[0], None

    rule, convolution = meanings.delta_rule(itself), meanings.convolution(itself)
    q, g, offsets = torch.randn(2, 3, 1, 4), torch.zeros(2, 3, 1), torch.tensor([0, 2, 3])
    rule(q, q, q, g=g, beta=g, cu_seqlens=offsets)  # of two rows
    rule(q, q, q, g=g, beta=g, scale=0.5)
    rule(q, q, q, g, g, 32)
    x, weight = torch.randn(2, 4, 3), torch.randn(4, 4)
    convolution(x, weight, None, "gelu")
    convolution(x, weight, seq_idx=torch.zeros(2, 3))
    convolution(x, weight, cu_seq_lens_q=offsets)
    assert len(called) == 6
    rule(q[:1], q[:1], q[:1], g=g[:1], beta=g[:1], cu_seqlens=offsets)
    convolution(x[:1], weight, activation="silu", cu_seq_lens_q=offsets, seq_idx=torch.zeros(1, 3), use_cache=False)
    assert len(called) == 6


def test_functions_of_other_files_are_no_concern(monkeypatch):
    class Layer(torch.nn.Module):
        pass

    monkeypatch.setattr(sys.modules[__name__], "causal_conv1d_fn", lambda *_, **__: None, raising=False)
    assert substitute({Layer}) == []
    with FakeTensorMode():  # nothing can be compared, and nothing is remembered
        assert substitute({Layer}) is None
    Layer.__module__ = "transformers.models.absent.modeling_absent"
    assert substitute({Layer}) == []


@pytest.mark.parametrize(
    ("family", "apart"), [("Lfm2", True), ("Qwen3_5", True), ("Mamba2", True), ("Jamba", True), ("Jamba", False)]
)
def test_which_files_keep_documents_apart(family, apart, monkeypatch):
    """Where a scan is no op, states would cross."""
    import transformers as tf

    if not apart:
        monkeypatch.delitem(meanings.MEANINGS, "mamba_selective_scan")
    _has_unknown.cache_clear()
    home = sys.modules[getattr(tf, f"{family}Model").__module__]
    layer = next(kind for name, kind in vars(home).items() if name.endswith(("DecoderLayer", "Mamba2Block")))
    substitute({layer})
    made = layer.__new__(layer)
    torch.nn.Module.__init__(made)
    assert knows_documents(made) == apart
    _has_unknown.cache_clear()
