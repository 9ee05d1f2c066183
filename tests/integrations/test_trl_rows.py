"""Rows that TRL's fused head scores: selected without a wait for the device, and only where they are TRL's own."""

import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tunecompile
from tests.support import zoo
from tests.support.models.fused_head import MARKS, headed, padded_left, scored, with_head
from tests.support.models.pairs import adapted_layers, pair
from tunecompile.integrations.trl.fused_head import LabelledRows

pytestmark = MARKS
WAITS = {"aten.nonzero", "aten.masked_select", "aten.item", "aten._local_scalar_dense"}


class Waits(TorchDispatchMode):
    """The operations for which a host waits, those that count what is true in a mask among them."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function).rsplit(".", 1)[0]
        masks = [each for each in (args[1] if name == "aten.index" else ()) if each is not None]
        if name in WAITS or any(each.dtype == torch.bool for each in masks):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_only_the_first_call_waits_for_the_number_of_rows():
    """Another call's mask would be read on a GPU behind all layers, and PEFT's switch of adapters comes next."""
    model, reference = pair(lambda: adapted_layers())
    with_head(model), with_head(reference)
    for turn in range(3):
        inputs = padded_left()
        inputs["labels"][:, turn : turn + 2] = -100
        (ours, gradients), (theirs, exact) = scored(model, **inputs), scored(reference, **inputs)
        for name in ("log_probs", "entropy", "mean_logits"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=2e-6)
        for name in ("is_top1", "label_mask"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert max(zoo.errors(gradients, exact, 1e-6).values()) < 1e-4
        with Waits() as waits, torch.no_grad():
            model(**inputs, fused_lm_head=True)
        assert "aten.index" not in waits.found


def test_no_row_has_a_label():
    """A batch of a rank whose completions were all cut away still gives every parameter a gradient, of zeros."""
    model = tunecompile.optimize(adapted_layers(), executor="eager")
    with_head(model)
    for labels in (None, -100):
        inputs = padded_left()
        if labels is not None:
            inputs["labels"] = torch.full_like(inputs["labels"], labels)
        found, gradients = scored(model, **inputs)
    assert not found.log_probs.any() and gradients and not any(grad.any() for grad in gradients.values())


def test_rows_that_trl_selects_in_another_way_are_its_own():
    """A version whose code drops other rows, the label 5 here: its own selection stays."""
    model = headed().train()
    code = model.forward.__func__.__code__
    assert -100 in code.co_consts
    other = code.replace(co_consts=tuple(5 if each == -100 else each for each in code.co_consts))

    def changed(forward: types.MethodType) -> types.MethodType:
        inside = forward.__func__
        made = types.FunctionType(other, inside.__globals__, inside.__name__, inside.__defaults__, inside.__closure__)
        made.__kwdefaults__ = inside.__kwdefaults__
        return types.MethodType(made, forward.__self__)

    model.forward = changed(model.forward)
    inputs = zoo.batch(rows=3, length=12)
    inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, 5)
    inputs["labels"][:, ::3] = 5
    with torch.no_grad():
        expected = model(**inputs, fused_lm_head=True).log_probs
        tunecompile.optimize(model, executor="eager")
        for _ in range(3):
            torch.testing.assert_close(model(**inputs, fused_lm_head=True).log_probs, expected, rtol=1e-5, atol=2e-6)


def test_rows_by_labels_that_are_shifted_already():
    labels = torch.tensor([[4, -100, 7], [-100, -100, 2]])
    assert LabelledRows.of({"shift_labels": labels}).places().tolist() == [0, 2, 5]
    assert LabelledRows.of({"labels": labels}).places().tolist() == [1, 3]
    assert LabelledRows.of({"labels": None}) is None and LabelledRows.of({"labels": labels[0]}) is None
