"""What torch is told of an op."""

import types
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tunecompile.errors import InvalidOp
from tunecompile.ir import op as ir_op
from tunecompile.ir.op import OPS, Cost, has_triton, op, refuse_gpu, refuse_spills
from tunecompile.ir.pretend_gpu import as_on_gpu, pretending


def test_torch_may_trace_every_op():
    """By this tag Dynamo's `only_allow_pt2_compliant_ops` knows that an op has shapes and gradients for it."""
    assert OPS and all(torch.Tag.pt2_compliant_tag in overload.tags for overload in OPS)


def test_a_name_that_is_taken_is_refused():
    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(InvalidOp, match=r"rms_norm.*taken.*tunecompile\.ops"):
        op(cost=Cost.POINTWISE)(rms_norm)


@op(cost=Cost.MATMUL)
def op_test_scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x * y * scale


@op(cost=Cost.MATMUL)
def op_test_dear(x: Tensor) -> Tensor:
    return x * 2


@op_test_dear.backward(saves=("x",), gives=("x",))
def op_test_dear_backward(grad: Tensor, x: Tensor) -> list[Tensor]:
    return [grad * 2]


@op(cost=Cost.MATMUL)
def op_test_cheap_behind(x: Tensor) -> Tensor:
    return x * 2


@op_test_cheap_behind.backward(saves=(), gives=("x",), cost=Cost.POINTWISE, flops=lambda grad: 7)
def op_test_cheap_behind_backward(grad: Tensor) -> list[Tensor]:
    return [grad * 2]


def test_a_backward_costs_what_its_op_does_unless_it_says_so():
    assert op_test_dear.backward_op.cost is Cost.MATMUL and op_test_dear.backward_op.flops is None
    cheap = op_test_cheap_behind.backward_op
    assert cheap.cost is Cost.POINTWISE and cheap.flops(None) == 7 and OPS[cheap.overload] is cheap
    x = torch.ones(2, requires_grad=True)
    (op_test_dear(x) + op_test_cheap_behind(x)).sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]


@pytest.fixture
def providers():
    """Those that a test registers, by name."""
    yield op_test_scaled.providers
    op_test_scaled.providers.clear()


def register(name, run, **options):
    assert op_test_scaled.provider(name, **{"supports": lambda scale: scale > 0, **options})(run) is run


def test_a_provider_is_registered_as_it_says(providers):
    register("first", lambda x, y, scale: ("first", x, y, scale), because="it is faster")
    register(
        "exact", lambda x, y, scale: None, refuses=lambda scale: "too large" if scale > 2 else None, precision="fp8"
    )
    first, second = providers
    assert (first.name, first.precision, first.because) == ("first", None, "it is faster")
    assert (second.name, second.precision, second.because) == ("exact", "fp8", "")
    assert first.run(1, 2, 3) == ("first", 1, 2, 3)
    assert first.supports(1, 2, 3) and not first.supports(1, 2, -3) and first.refuses(1, 2, -3)
    assert second.refuses(1, 2, 3) == "too large" and second.refuses(1, 2, 1) is None


def test_which_provider_runs(providers):
    """The first that supports a call; those of a lower precision where it is allowed, and the others behind them."""
    register("small", lambda x, y, scale: None, supports=lambda scale: scale < 3)
    register("any", lambda x, y, scale: None)
    register("narrow", lambda x, y, scale: None, supports=lambda scale: scale < 2, precision="fp8")
    asked = [(-1, None), (1, None), (2, None), (5, None), (1, "fp8"), (2, "fp8"), (5, "fp8"), (1, "fp4")]
    chosen = [op_test_scaled.choose((0, 0, scale), precision).name for scale, precision in asked]
    assert chosen == ["small", "small", "small", "any", "narrow", "small", "any", "small"]
    providers.pop(0)
    assert op_test_scaled.choose((0, 0, -1)).run is op_test_scaled.reference
    assert list(op_test_scaled.refusals((0, 0, -1), None)) == ["any"]
    assert list(op_test_scaled.refusals((0, 0, 2), "fp8")) == ["narrow"] and not op_test_scaled.refusals(
        (0, 0, 2), None
    )


def test_arguments_by_name(providers):
    """A provider may name a few; what lowering fills in goes to it as well."""
    register("named", lambda *, scale, used=None, **more: (scale, used, more))
    assert providers[0].run(1, 2, 3) == (3, None, {"x": 1, "y": 2})
    assert providers[0].run(1, 2, 3, used=(True,)) == (3, (True,), {"x": 1, "y": 2})


@pytest.mark.parametrize(
    "run, options, reason",
    [
        (lambda x, y: None, {}, r"'other' takes \('x', 'y'\), the reference takes \('x', 'y', 'scale'\)"),
        (lambda y, x, scale: None, {}, "the reference takes"),
        (lambda *, factor, **more: None, {}, r"'other' takes \('factor',\)"),
        (lambda x, y, scale: None, {"supports": None}, "'other' has neither"),
    ],
)
def test_providers_that_are_refused(providers, run, options, reason):
    with pytest.raises(InvalidOp, match=f"op_test_scaled.*{reason}"):
        register("other", run, **options)
    assert not providers


def test_what_is_filled_in_is_no_parameter_of_the_reference(providers):
    register("filled", lambda x, y, scale, *, used, dying: (used, dying))
    assert providers[0].run(1, 2, 3, used=(), dying=("x",)) == ((), ("x",))


def test_a_backward_takes_the_gradients_and_what_is_saved():
    def op_test_wrong_backward(grad: Tensor, y: Tensor) -> list[Tensor]:
        return [grad * y]

    with pytest.raises(InvalidOp, match=r"takes \('y',\) behind 1 incoming gradients, but saves=\('x',\)"):
        op_test_scaled.backward(saves=("x",), gives=("x",))(op_test_wrong_backward)
    assert op_test_scaled.backward_op is None


@op(cost=Cost.MATMUL)
def op_test_plain(x: Tensor, more: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    return x * scale, x * 1


@op_test_plain.backward(gives=("x",))
def op_test_plain_backward(grad, x, more, scale, out1):
    return [grad * scale]


def test_a_backward_saves_its_parameters_which_have_the_types_of_the_ops():
    assert op_test_plain.formula.saves == ("x", "more", "scale", "out1")
    schema = op_test_plain.backward_op.overload._schema
    assert [str(each.type) for each in schema.arguments] == ["Tensor", "Tensor", "List[Tensor]", "float", "Tensor"]
    assert [str(each.type) for each in schema.returns] == ["List[Tensor]"]


def on_a_gpu(dtype=torch.float16):
    return types.SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))


def refused(*tensors, **options):
    """The code of the reason, and its detail."""
    reason = refuse_gpu(*tensors, **options)
    return reason and (reason.code, str(reason))


def test_what_templates_refuse(monkeypatch):
    """Whatever is on a CPU, wide, in bfloat16 where that is emulated, and all where Triton is missing."""
    there = {"bfloat16": True, "triton": True}
    monkeypatch.setattr(ir_op, "has_bfloat16", lambda device: there["bfloat16"])
    monkeypatch.setattr(ir_op, "has_triton", lambda: there["triton"])
    half, narrow, wide = map(on_a_gpu, (torch.float16, torch.bfloat16, torch.float32))
    assert refused(half, narrow) is None and refused() is None
    assert refused(half, torch.ones(1))[0] == "not-on-gpu"
    assert refused(half, wide) == ("not-half-precision", "in float32, not in half precision")
    assert refused(wide, made=torch.bfloat16) is None, "packed weights"
    there["bfloat16"] = False
    assert refused(half, narrow)[0] == refused(half, made=torch.bfloat16)[0] == "gpu-without-bfloat16"
    assert refused(half, half) is None
    there["triton"] = False
    assert refused(half)[0] == "no-triton" and refused(half, triton=False) is None
    with as_on_gpu():
        assert refuse_gpu(torch.ones(1, dtype=torch.half), triton=False) is None
    assert refuse_gpu(torch.ones(1, dtype=torch.half), triton=False).code == "not-on-gpu"


@pytest.mark.parametrize("hip, warp, code", [("6.4", 32, "registers-spill"), ("6.4", 64, None), (None, 32, None)])
def test_kernels_that_fill_the_registers_are_refused_on_small_cards(hip, warp, code, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ir_op, "warp_size", lambda device: warp)
    found = refuse_spills(on_a_gpu())
    assert (found and found.code) == code and refuse_spills(torch.ones(1)) is None


def test_triton_is_there_where_it_can_be_imported(monkeypatch):
    for spec in (None, "a module"):
        monkeypatch.setattr(ir_op.importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert has_triton.__wrapped__() is (spec is not None)


def test_a_guard_with_names_of_its_own_is_given_all_arguments(providers):
    asked = []
    register("all", lambda x, y, scale: None, supports=lambda *given: asked.append(given) or True)
    register("others", lambda x, y, scale: None, supports=lambda x, y, factor: asked.append((x, y, factor)) or False)
    first, second = providers
    assert first.supports(1, 2, 3) and not second.supports(1, 2, 3) and asked == [(1, 2, 3)] * 2
    assert second.refuses(1, 2, 3).code == "arguments-not-supported"


def test_triton_has_a_driver_where_there_is_no_gpu(monkeypatch):
    """As long as graphs are lowered as if there were one: torch asks for the target of a kernel."""
    triton = pytest.importorskip("triton")
    driver = triton.runtime.driver
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = vars(driver).get("_active", vars(driver).get("active"))
    with as_on_gpu():
        target = driver.active.get_current_target()
        assert (target.backend, target.arch, target.warp_size) == ("cuda", 90, 32)
        assert driver.active.get_current_device() == 0 and pretending()
    assert vars(driver).get("_active", vars(driver).get("active")) is before and not pretending()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with as_on_gpu():
        assert vars(driver).get("_active", vars(driver).get("active")) is before, "a GPU has its own"
