"""TRL's fused head: our scores stand in its forward where they are the same, and nothing else changes."""

import copy
import dataclasses
import inspect
import types

import pytest
import torch

import tunecompile
from tests.support import zoo
from tests.support.models.fused_head import MARKS, headed, padded_left, scored, utils, with_head
from tests.support.models.pairs import adapted_layers, pair, small
from tests.support.notes import find, has
from tests.support.reports import head_tally
from tunecompile.integrations import trl
from tunecompile.integrations.trl import OUTPUTS, ScoreCall
from tunecompile.runtime.loss_head.fused_forward import _scores, _unfit

pytestmark = MARKS


def is_ours(model: torch.nn.Module) -> bool:
    return head_tally(model).rewritten == 1 and not find(tunecompile.report(model), "fused-head-left")


def test_scores_and_gradients():
    models = pair(adapted_layers)
    for model in models:
        with_head(model, temperature=0.7)
        model.train()
    for _ in range(2):
        (ours, gradients), (theirs, reference) = map(scored, models)
        for key in ("loss", *OUTPUTS, "label_mask"):
            a, b = getattr(ours, key), getattr(theirs, key)
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")
        assert max(zoo.errors(gradients, reference, 1e-6).values()) < 1e-4
    assert is_ours(models[0])
    for model in models:
        model.eval()
    with torch.no_grad():
        pairs = [model(**padded_left(), fused_lm_head=True) for model in models]
    for key in OUTPUTS:
        torch.testing.assert_close(*(getattr(each, key) for each in pairs), rtol=2e-5, atol=2e-6)
    assert is_ours(models[0]) and has(models[0], "evaluation-compiled", count=1)
    tunecompile.restore(models[0])
    assert models[0].get_base_model().forward.__func__.__globals__["__name__"] == "trl.trainer.utils"


@pytest.mark.slow
def test_a_head_in_4_bits():
    """TRL's own function takes packed weights for what they are not, and fails."""
    bnb = pytest.importorskip("bitsandbytes")

    def build(packed: bool) -> torch.nn.Module:
        model = small(tie_word_embeddings=False)
        head = bnb.nn.Linear4bit(64, 256, bias=False, quant_type="nf4")
        head.weight = bnb.nn.Params4bit(model.lm_head.weight.data, requires_grad=False, quant_type="nf4")
        head.to("cpu")
        dense = bnb.functional.dequantize_4bit(head.weight.data, head.weight.quant_state)
        if packed:
            model.lm_head = head
        else:
            model.lm_head.weight.data.copy_(dense)
        return with_head(zoo.adapt(model, target_modules=["q_proj"])).train()

    model, reference = tunecompile.optimize(build(True), executor="eager"), build(False)
    (ours, gradients), (theirs, exact) = map(scored, (model, reference))
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=2e-5, atol=2e-6)
    assert max(zoo.errors(gradients, exact, 1e-6).values()) < 1e-4 and is_ours(model)


# -- the forward alone ---------------------------------------------------------------------------------------------------


def run(model: torch.nn.Module, score=lambda call, theirs: _scores(call)) -> tuple[list, torch.Tensor, torch.Tensor]:
    """(reasons, log-probabilities with our scores, log-probabilities as they are)."""
    told: list = []
    ours = trl.with_scores(model.forward, score, told.append)
    inputs = {**padded_left(), "fused_lm_head": True}
    with torch.no_grad():
        return told, ours(**inputs).log_probs, model(**inputs).log_probs


def test_below_wrappers():
    operations = pytest.importorskip("accelerate.utils.operations")
    model = headed()
    wrapped = operations.convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward.__func__))
    model.forward = types.MethodType(wrapped, model)
    before = wrapped.__closure__[0].cell_contents.model_forward
    told, ours, theirs = run(model)
    assert not told and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert trl.home_of_forward(model.forward) == trl.home_of_replacement(model) == "trl.trainer.utils"
    assert wrapped.__closure__[0].cell_contents.model_forward is before
    assert utils._ChunkedLogProbFunction.__module__.startswith("trl.")


def test_wrappers_are_not_blamed():
    operations = pytest.importorskip("accelerate.utils.operations")
    model = small()
    assert trl.home_of_replacement(model) is None
    model.forward = types.MethodType(operations.convert_outputs_to_fp32(model.forward.__func__), model)
    assert trl.home_of_replacement(model) is None
    model.forward = lambda **inputs: None
    assert trl.home_of_replacement(model) == __name__


def test_a_function_of_other_parameters_is_left_alone(monkeypatch):
    class Later(utils._ChunkedLogProbFunction):
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, softcap=None, scale=1.0, outputs=()):
            raise AssertionError

        @classmethod
        def apply(cls, *args):
            return theirs.apply(*args)

    theirs = utils._ChunkedLogProbFunction
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Later)
    told, ours, plain = run(headed())
    assert has(told, "fused-head-parameters", subject="softcap, scale") and torch.equal(ours, plain)


def like(device: str = "cpu", **changes) -> ScoreCall:
    x = torch.zeros(1, 4, device=device)
    return ScoreCall(x, x, None, torch.zeros(1, dtype=torch.long, device=device), **changes)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.5, "softcap": 3.0, "logit_scale": 2.0}, {"outputs": ("log_probs", "is_top1")}]
)
def test_what_a_function_computes_decides(changes, device):
    call = like(device, **changes)

    def theirs(call: ScoreCall) -> tuple:
        names = ("hidden", "weight", "bias", "labels", "temperature", None, "softcap", "logit_scale", "outputs")
        return utils._ChunkedLogProbFunction.apply(*(16 if name is None else getattr(call, name) for name in names))

    def doubled(call: ScoreCall) -> tuple:
        log_probs, *rest = _scores(call)
        return 1.1 * log_probs, *rest

    def without_gradient(call: ScoreCall) -> tuple:
        log_probs, *rest = _scores(call)
        return 0.5 * log_probs + 0.5 * log_probs.detach(), *rest

    state = torch.get_rng_state()
    assert trl.same_scores(_scores, theirs, call)
    for wrong in (doubled, without_gradient):
        assert not trl.same_scores(_scores, wrong, call)
    if "softcap" in changes:
        assert not trl.same_scores(_scores, lambda call: theirs(dataclasses.replace(call, softcap=None)), call)
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_score_with_their_own_weights():
    model = tunecompile.optimize(headed().train(), executor="eager")
    assert "tunecompile" in trl.home_of_forward(model.forward)
    assert trl.home_of_replacement(model) == "trl.trainer.utils"
    assert "input_ids" in inspect.signature(model.forward).parameters
    other = copy.deepcopy(model.eval())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
        found, own = (m(**padded_left(), fused_lm_head=True).log_probs for m in (other, model))
    assert not torch.allclose(found, own)


class Wrapped(torch.Tensor):
    """A weight that is no plain tensor: a distributed one, or a packed one."""


def test_heads_that_are_no_plain_matrix_stay_trls():
    weight, gathered = torch.nn.Parameter(torch.ones(5, 3)), torch.nn.Parameter(torch.ones(5, 3))
    gathered.ds_id = 1  # DeepSpeed has it in parts
    call = ScoreCall(torch.ones(2, 3), weight, None, torch.ones(2).long())

    def why(**changes):
        found = _unfit(dataclasses.replace(call, **changes))
        return found and (found.code, found.subject)

    assert why() is None and why(weight=weight.detach()) is None
    assert why(weight=weight.detach().as_subclass(Wrapped)) == ("fused-head-weight", "Wrapped")
    for odd in (weight[0].detach(), gathered):
        assert why(weight=odd) == ("fused-head-weight", type(odd).__name__)
    for unread in (weight.to(torch.int8), weight.detach().to("meta")):
        assert why(weight=unread) == ("fused-head-weight", str(unread.dtype).removeprefix("torch."))
    assert why(temperature=0.0) == ("fused-head-weight", "float32")
    packed = torch.ones(5, 3, dtype=torch.uint8)
    packed.quant_state = "of 4 bits"
    assert why(weight=packed) is None
