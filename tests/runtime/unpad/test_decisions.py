"""Decisions about padding, one function at a time: labels, arguments, scores. No model runs."""

import types
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.support.batches import dropping, lengths_mask
from tests.support.decisions import Watch, whole_rows
from tests.support.notes import codes
from tunecompile._torch.fake_tensors import function_mode
from tunecompile.integrations import loss_caller
from tunecompile.runtime.layers import owner_slot
from tunecompile.runtime.step.facts import scores
from tunecompile.runtime.step.rows_refused import RowsRefused
from tunecompile.runtime.step.state import Step
from tunecompile.runtime.unpad import batches
from tunecompile.runtime.unpad import decision as deciding
from tunecompile.runtime.unpad import unpad as module
from tunecompile.runtime.unpad.decision import AS_IT_COMES, PACKED, UnpadDecision, decide, narrows
from tunecompile.runtime.unpad.documents import BOTH_WAYS, read_padding, windows_of
from tunecompile.runtime.unpad.flat_batch import FlatBatch
from tunecompile.runtime.unpad.masks.presume import AHEAD, Presumptions
from tunecompile.runtime.unpad.owner_call import OwnerCall, PastCall
from tunecompile.runtime.unpad.unpad import Unpadding

# -- masks ---------------------------------------------------------------------------------------------------------------


def test_labels_at_padding_are_seen():
    """Behind a row by a loss that shifts labels, and in it."""
    mask = lengths_mask(4, 6)
    labels = torch.where(mask.bool(), 1, -100)
    assert not read_padding(mask, labels).labelled and not read_padding(mask, None).labelled
    for place in (4, 5):
        wrong = labels.clone()
        wrong[0, place] = 3
        assert read_padding(mask, wrong).labelled
    left = mask.flip(1)
    assert read_padding(left, torch.where(left.bool(), 1, -100)).labelled, "the last one at padding predicts a word"
    found = read_padding(mask, labels).documents
    assert (found.count, found.documents, found.longest, found.window) == (10, 2, 6, 0)
    assert torch.equal(found.real, mask.bool()) and found.starts.nonzero().tolist() == [[0, 0], [1, 0]]
    holes = mask.clone()
    holes[1, 2] = 0
    reading = read_padding(holes, labels)
    assert reading.documents is None and reading.interrupted
    nothing = read_padding(torch.zeros_like(mask), labels)
    assert nothing.documents is None and not nothing.interrupted


def test_windows_by_the_layers_code():
    def layer(window=None, causal=None):
        made = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        if window is not None:
            made[1].config = types.SimpleNamespace(sliding_window=window)
        for part, is_causal in zip(made, causal or ()):
            part.is_causal = is_causal
        return made

    assert [windows_of(layer(window)) for window in (None, 4, 0, "all")] == [(0,), (4, 0), (0,), (0,)]
    assert [windows_of(layer(n, causal=(False,))) for n in (4, 1, None)] == [
        (-4, BOTH_WAYS),
        (BOTH_WAYS,),
        (BOTH_WAYS,),
    ]
    assert windows_of(layer(4, causal=(True, False))) == (4, 0)


# -- decisions -----------------------------------------------------------------------------------------------------------


def on_gpu(mask):
    return types.SimpleNamespace(is_cuda=True, shape=mask.shape)


@pytest.fixture
def given(monkeypatch):
    """Labels of the running loss: those, or why they are not known."""
    told = types.SimpleNamespace(labels=None, unknown=None, model=object())
    monkeypatch.setattr(loss_caller, "causal_labels", lambda: (told.labels, told.unknown, told.model))
    return told


def test_decisions_for_padding(given):
    mask = lengths_mask(4, 6)
    given.labels = torch.where(mask.bool(), 1, -100)
    watch = Watch()
    made = decide(mask, (0,), watch, None)
    assert made.flat.drops and made.reason is None and watch.asked == [given.model]
    long = read_padding((torch.arange(20) < torch.tensor([[11], [20]])).long(), None).documents
    assert FlatBatch.of(long).longest.shape[0] == 32, "lengths are rounded up, so that few of them differ"
    refused = types.SimpleNamespace()
    assert decide(mask, (0,), watch, refused).reason is refused and len(watch.asked) == 1
    assert decide(mask, (0,), Watch("looks"), None).reason == "looks"
    given.labels = torch.ones_like(mask)
    assert decide(mask, (0,), watch, None).reason.code == "labels-at-padding"
    given.labels = torch.ones(2, 5)
    assert decide(mask, (0,), watch, None).reason.code == "labels-shape"
    given.labels, given.unknown = None, "nobody knows"
    assert decide(mask, (0,), watch, None).reason == "nobody knows"
    holes = mask.clone()
    holes[1, 2] = 0
    assert decide(holes, (0,), watch, None).reason.code == "row-interrupted"
    assert decide(lengths_mask(6, 6), (0,), watch, None) is AS_IT_COMES


@pytest.mark.parametrize("waited, total, longest", [(0, 2064, 1064), (2057, 2064, 1064), (2058, 2176, 2048)])
def test_fewer_sizes_where_launches_are_waited_for(given, waited, total, longest):
    """Each size is a recording."""
    flat = decide(lengths_mask(1000, 1057, length=1057), (0,), Watch(), None, waited=waited).flat
    assert (len(flat.index), len(flat.longest)) == (total, longest) and flat.real == 2057
    assert flat.offsets.tolist() == [0, 1000, 2057, total]


def test_decisions_for_documents(given):
    """Nothing is dropped, so that labels do not matter; somebody who looks at hidden states does."""
    document = torch.tensor([[0, 0, 0, 1, 1, 1]])
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(6, 6, dtype=torch.bool).tril()
    made = decide(seen[:, None], (0,), Watch(), "refused")
    assert made.flat.offsets[:3].tolist() == [0, 3, 6] and not made.flat.drops
    bounds = decide(torch.tensor([0, 2, 6], dtype=torch.int32), (0,), Watch(), None).flat
    assert bounds.fills == "attention_mask" and made.flat.fills == "", "layers have a mask already"
    looks = decide(seen[:, None], (0,), Watch("looks"), None)
    assert (looks.flat, looks.reason, looks.batches) == (None, "looks", PACKED)
    whole = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    assert decide(whole, (0,), Watch(), None) is AS_IT_COMES


def test_whole_rows_in_a_window_are_documents_where_kernels_have_windows(given, monkeypatch):
    """Unless somebody looks at hidden states: the mask says all of it then, and there is nothing to tell."""
    whole = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    seen = whole.triu(-2)
    assert decide(seen, (3, 0), Watch(), None) is AS_IT_COMES, "a CPU's have none"
    monkeypatch.setattr(deciding, "narrows", lambda window, mask: narrows(window, on_gpu(mask)))
    flat = decide(seen, (3, 0), Watch(), None).flat
    assert flat.whole and flat.window == 3 and flat.shape == (2, 6)
    assert decide(seen, (3, 0), Watch("looks"), None) is AS_IT_COMES
    assert decide(whole, (3, 0), Watch(), None) is AS_IT_COMES
    assert not narrows(6, on_gpu(seen)) and not narrows(0, on_gpu(seen))
    added = torch.where(whole, 0.0, torch.finfo(torch.float32).min)
    assert decide(added, (0,), Watch(), None).flat.whole, "written out it would be all scores"
    assert decide(added * 0.5, (0,), Watch(), None).reason.code == "masks-not-understood"


class Owner(nn.Module):
    dtype = torch.float32

    def __init__(self, **config):
        super().__init__()
        self.config = types.SimpleNamespace(**config)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return input_ids


def test_settings_that_keep_the_padding(monkeypatch):
    def code(**config):
        found = deciding.refused_now(Owner(**config))
        return found and found.code

    assert code() is None and code(_attn_implementation="eager") is None
    assert code(_attn_implementation="flex_attention") == "other-attention"
    for name in ("output_hidden_states", "output_attentions"):
        assert code(**{name: True}) == "output-required" and code(**{name: False}) is None
    monkeypatch.setattr(deciding, "in_checkpoint", lambda: True)
    assert code() == "checkpoint-around-layers"
    monkeypatch.setattr(deciding.context_parallel, "is_shared", lambda: True)
    assert code() == "context-parallel"


def test_gpus_that_have_no_kernel_keep_the_padding(monkeypatch):
    """Told before layers are compiled in vain: cards before Ampere, and numbers of 32 bits."""
    owner, told = Owner(), types.SimpleNamespace(old=False, autocast=False)
    parameters = [
        types.SimpleNamespace(is_meta=True),
        types.SimpleNamespace(is_meta=False, device=torch.device("cuda")),
    ]
    owner.parameters = lambda: iter(parameters)
    monkeypatch.setattr(deciding, "older_than", lambda device, card: told.old and device.type == "cuda")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: told.autocast)

    def code():
        found = deciding.refused_now(owner)
        return found and found.code

    assert code() == "no-unpadded-kernel"
    told.autocast = True
    assert code() is None
    owner.dtype, told.autocast = torch.bfloat16, False
    assert code() is None
    told.old = True
    assert code() == "gpu-without-kernel"
    parameters.pop()
    assert code() is None


# -- calls of the owner --------------------------------------------------------------------------------------------------


def unpadding(head_is_called=True, members=(), **step):
    return Unpadding(Owner(), lambda: members, Step(**step), lambda: head_is_called)


@pytest.mark.parametrize("scores_tokens", [False, True])
@pytest.mark.parametrize("flattened", [0, 2])
@pytest.mark.parametrize("called", [False, True])
def test_scores_without_padding(scores_tokens, flattened, called):
    """Where the model's forward gives scores alone; or as training steps came, if no step ever called the head."""
    made = unpadding(called, scores_tokens=scores_tokens)
    made.flattened = flattened
    stays = made._why_scores_stay_padded()
    assert (stays is None) is (scores_tokens or (bool(flattened) and not called))
    assert stays is None or stays.code == "no-labels"


def test_scores_are_computed_as_steps_of_whole_rows_were():
    """By their code, whose rounding would be read as a change of the policy; before any step, by the model's own."""
    made, ran = unpadding(), []
    made._run = lambda *given: ran.append(given)
    ids, options = torch.ones(2, 6), {"use_cache": False}
    with torch.no_grad():
        assert made.score((ids,), options) is ids and not ran
        made._count(OwnerCall({}, whole=True, decided=True))
        assert made.score((ids,), options) is ids and not ran, "no step ran"
    made._count(OwnerCall({}, whole=True, decided=True))
    with torch.no_grad():
        made.score((ids,), options)
        assert len(ran) == 1


def test_a_presumed_mask_is_read_behind_the_second_layer():
    """A layer outside of any call, a checkpoint's repetition, reads none."""
    made, read = unpadding(), []
    made.layer_ran()
    presumed = [types.SimpleNamespace(mask="one", read=lambda: read.append("one"))]
    for call in (OwnerCall({}), OwnerCall({}, presumed=presumed)):
        made.running = call
        for count in range(1, AHEAD + 1):
            made.layer_ran()
            assert read == ["one"] * (call.presumed is presumed and count == AHEAD)


def test_a_call_that_is_run_again_keeps_what_it_kept(monkeypatch):
    """Scores whose logits are read at padding, and a mask that was taken for whole rows and is none."""
    refused, presumed = [], [(UnpadDecision(FlatBatch.of_whole_rows(2, 6, 0, torch.device("cpu"))), "a mask")]
    monkeypatch.setattr(batches, "decide", lambda mask, windows, watch, why, *_: refused.append(why) or AS_IT_COMES)
    monkeypatch.setattr(Presumptions, "presume", lambda *_: presumed.pop() if presumed else None)
    monkeypatch.setattr(Presumptions, "hold", lambda self, masks: not masks)
    made, layer, mask = unpadding(), nn.Linear(2, 2), torch.zeros(2, 1, 6, 6)
    made.owner.forward = lambda x, use_cache: made.batch_of(layer, (x,), {"attention_mask": mask})
    made.flattened = 1
    with torch.no_grad():
        assert made.score((torch.ones(2, 6, 4),), {"use_cache": False}) is None
    assert [why.code for why in refused] == ["no-labels"] and not presumed


def test_keys_that_the_caller_is_returned_are_those_of_a_padded_call():
    """Layers put them into a mapping, without padding: so the call is made again, and later ones keep their padding."""
    made, shared, ran = unpadding(), {}, []

    def forward(x):
        ran.append(made.running.refused)
        if made.running.refused is None:
            made.running.drops, made.running.mappings[id(shared)] = True, shared
        return x, shared

    made.owner.forward = forward
    for calls in (2, 3):
        _, returned = made.call((torch.ones(2, 6, 4),), {})
        assert returned is shared and len(ran) == calls and made.flattened == 0
        assert ran[-1].code == "output-holds-more"
    assert codes(made.report()) == ["padding-kept", "output-holds-more"]


def test_masks_are_recorded_where_all_layers_may_take_documents(monkeypatch):
    """Nothing else reads a mask that is not made; and recording it is of no use to a call that stays as it is."""
    made, given = unpadding(), {"input_ids": torch.ones(1, 8192, device="meta")}

    def records(**call):
        call = OwnerCall(given, **call)
        with made._recording(call):
            assert (function_mode() is not None) is (call.recorder is not None)
        assert function_mode() is None
        return call.recorder is not None

    assert records() and not records(refused="a reason")
    made.members = lambda: (nn.Linear(1, 1),)
    assert not records(), "a layer that is not compiled"
    made.members = tuple
    monkeypatch.setattr(module, "compiled_parts", lambda owner: True)
    assert not records()
    monkeypatch.undo()
    given["input_ids"] = torch.ones(1, 512, device="meta")
    assert not records()


def test_forwards_whose_scores_are_compared():
    owner = Owner(use_cache=True)
    with torch.no_grad():
        assert not scores(owner, (1,), {}), "it makes a cache"
        assert scores(owner, (1,), {"use_cache": False}) and scores(nn.Linear(1, 1), (1, 2, 3, 4), {})
        assert not scores(owner, (1,), {"use_cache": False, "past_key_values": 1})
        assert not scores(owner, (1, 2, 3), {"use_cache": False}), "which may be the cache"
        owner.config.use_cache = False
        assert scores(owner, (1,), {}) and not scores(owner, (1,), {"use_cache": True})
        assert not scores(owner.eval(), (1,), {})
    assert not scores(owner.train(), (1,), {}), "gradients are on"
    with torch.inference_mode():
        assert not scores(owner, (1,), {})


def test_a_mask_of_rows_is_read_by_layers_that_know_documents(monkeypatch):
    monkeypatch.setattr(batches, "knows_documents", lambda layer: layer is knows)
    knows, other = nn.Linear(1, 1), nn.Linear(1, 1)
    made = unpadding()
    made.running = OwnerCall({})
    flat, decided = whole_rows().flat, []
    monkeypatch.setattr(made, "_decided", lambda layer, mask: decided.append(mask) or UnpadDecision(flat))
    hidden, rows = torch.zeros(2, 6, 3), lengths_mask(4, 6)
    assert made.batch_of(knows, (hidden,), {"attention_mask": rows}) == (flat, None) and decided == [rows]
    assert made.batch_of(other, (hidden,), {"attention_mask": rows}) is None and len(decided) == 1
    pairs = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    assert made.batch_of(knows, (hidden, pairs), {"attention_mask": rows}) == (flat, pairs)
    made.running.drops = True
    with pytest.raises(RowsRefused):
        made.batch_of(other, (hidden,), {})
    made.running.by_rows = flat
    assert made.batch_of(knows, (hidden,), {}) == (flat, None)
    made.running.drops = False
    assert made.batch_of(knows, (hidden,), {}) == (flat, None) and made.batch_of(other, (hidden,), {}) is None
    for where in ("in_backward", "in_checkpoint"):
        with monkeypatch.context() as patch:
            patch.setattr(batches, where, lambda: True)
            assert made.batch_of(knows, (hidden,), {}) is None, "it would be repeated without knowing"


@pytest.mark.parametrize("packs", [False, True])
def test_bounds_of_documents_are_decided_once(packs, monkeypatch):
    """A checkpoint repeats layers of an earlier call, which counts as packed where they were."""
    made, bounds = unpadding(), torch.tensor([0, 2, 6])
    decided, decision = [], UnpadDecision(whole_rows().flat) if packs else AS_IT_COMES
    monkeypatch.setattr(made, "_decide", lambda *given: decided.append(given) or decision)
    for _ in range(2):
        made.running = call = OwnerCall({})
        assert made._repeatable("layer", bounds) is decision
        assert call.decided and call.packs is packs and len(decided) == 1
    made.running = None
    assert made._repeatable("layer", bounds) is decision and made._repeatable("layer", bounds.clone()) is AS_IT_COMES


def test_a_cache_that_the_model_made_is_left_out(monkeypatch):
    monkeypatch.setattr(owner_slot, "is_cache", lambda value: value == "cache")
    without = owner_slot._without_cache
    made = without(OrderedDict(last_hidden_state=1, past_key_values="cache"))
    assert type(made) is OrderedDict and made == {"last_hidden_state": 1}
    for kept in (OrderedDict(last_hidden_state=1), OrderedDict(past_key_values=None), (1, "cache"), "cache"):
        assert without(kept) is kept


def test_the_last_call_is_known_by_its_hidden_states():
    hidden = torch.randn(2, 6, 3)
    batch = dropping(6, 4, length=6)
    call = PastCall.of((1,), {}, (hidden, None), batch)
    assert call.returned(hidden) and call.returned(hidden.view(2, 6, 3)) and not call.returned(hidden[:1])
    assert not call.returned(hidden.clone()) and PastCall.of((), {}, "nothing", batch) is None
    assert PastCall.of((), {}, types.SimpleNamespace(last_hidden_state=hidden), batch).returned(hidden)
    del hidden
    assert call.memory() is None and not call.returned(torch.zeros(2, 6, 3))
    row = torch.randn(1, 16, 3)  # as of a norm that skips padding: what its caller holds is a view of the same tensor
    hidden = row[0, :12].unflatten(0, (2, 6))
    call, seen = PastCall.of((), {}, hidden, batch), hidden[:, slice(0, None)]
    del hidden
    assert call.returned(seen) and not call.returned(row[0, 1:13].unflatten(0, (2, 6)))


def test_a_batch_that_stays_padded_says_why():
    made = unpadding()
    call = OwnerCall({"attention_mask": lengths_mask(4, 6)})
    made._tell_of_call(OwnerCall({"attention_mask": lengths_mask(6, 6)}))
    assert not made.notes and made.looks == module.LOOKS - 1
    made._tell_of_call(call)
    assert codes(list(made.notes)) == ["padding-kept", "no-mask-in-layers"]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    made.notes.clear()
    for given in (
        {"position_ids": positions},
        {"position_ids": torch.arange(6)[None]},
        {"position_ids": torch.arange(6)},
    ):
        made._tell_of_call(OwnerCall(given))
    assert codes(list(made.notes)) == ["packing-kept", "sequences-see-each-other"]
    made.notes.clear()
    made.looks = 0
    made._tell_of_call(call)
    assert not made.notes and made.looks == 0


def test_layers_that_are_not_ours_keep_the_padding():
    ours, other = nn.Linear(1, 1), nn.Linear(1, 1)
    made = unpadding(members=(ours,))
    ours._compiled_call_impl = types.SimpleNamespace(padding=made)
    assert made._why_others_read_padding() is None
    made.members = lambda: (ours, other)
    assert made._why_others_read_padding().code == "layer-not-compiled"


def test_short_rows_come_in_few_sizes():
    """Each is recorded by itself, and kernels are launched for the longest document."""

    def row_of(first, second):
        mask = torch.arange(max(first, second)) < torch.tensor([[first], [second]])
        return FlatBatch.of(read_padding(mask.long(), None).documents)

    sizes = set()
    for first in range(10, 150, 7):
        for second in range(10, 150, 11):
            flat = row_of(first, second)
            assert max(first, second) <= len(flat.longest) <= len(flat.index)
            sizes.add((len(flat.index), len(flat.longest)))
    assert len(sizes) < 2.5 * len({total for total, _ in sizes})
    assert len(row_of(1500, 1100).longest) == 1504
