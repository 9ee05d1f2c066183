"""Rows that begin alike are computed as branches of one prefix: gradients are eager's, and what may differ is not shared."""

import random
from itertools import product

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.batches import branches
from tests.support.compare import assert_close, assert_equal
from tests.support.models.pairs import adapted_layers, attending, pair, token_wise, without_mlps
from tests.support.notes import fell_back, has
from tests.support.reports import shared
from tests.support.trainers import arguments
from tunecompile.runtime.model_state import state_of
from tunecompile.runtime.unpad.prefixes import search
from tunecompile.runtime.unpad.prefixes.forest import forest_of
from tunecompile.runtime.unpad.prefixes.search import PrefixSearch
from tunecompile.runtime.unpad.prefixes.shared import SharedPrefixes

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = dict(loss=1e-6, limit=1e-6)


def packed_rows():
    """Several documents a row, by their positions: also two of one row share."""
    batch = branches(40, 50, 4)
    packed = {name: value.reshape(2, 100) for name, value in batch.items()}
    packed["position_ids"] = torch.arange(50).repeat(2)[None].expand(2, -1)
    packed["labels"], packed["use_cache"] = packed["labels"].masked_fill(packed["position_ids"] == 0, -100), False
    return packed


def at_other_positions():
    """Equal tokens at other positions are other tokens."""
    batch = branches()
    batch["position_ids"] = torch.arange(56).expand(3, -1) + torch.arange(3)[:, None]
    return batch


def behind_padding():
    """Padding in front shifts columns, and so positions."""
    batch = branches(side="right")
    batch["input_ids"][1, 1:41] = batch["input_ids"][0, :40]
    batch["attention_mask"] = torch.ones(3, 56, dtype=torch.long)
    batch["attention_mask"][1, :1] = 0
    batch["labels"][1, :2] = -100
    return batch


def test_gradients_are_those_of_rows():
    """With prefixes, branches and rows of any number and length, by one graph; the first without a mask has its own."""
    sides = ("", "none", "right", "left")
    ours, plain = pair(lambda: attending().double())
    batches = [(40, 56, 3), (40, 57, 3), (64, 70, 2), (37, 45, 5), (50, 51, 4), (36, 100, 3)]

    def step(batch):
        """(batches, tokens, tokens of rows) that it shared."""
        before = shared(ours)
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), **EXACT)
        return tuple(now - then for now, then in zip(shared(ours), before))

    for side, (seed, (prefix, length, rows)) in product(sides, enumerate(batches)):
        step(branches(prefix, length, rows, seed, side))
    count, tokens, of_rows = shared(ours)
    region = tunecompile.report(ours).regions[0]
    assert not fell_back(ours) and 0 < tokens < of_rows and count == len(sides) * len(batches) - 1
    assert region.compiles == 2 and region.providers["branch_attention: reference"] == 1, region
    turns = [step(branches(40, 150, 6, seed, "right", more=[(4, 80), (2, 120)])) for seed in range(2)]
    assert all(tokens == rows - 5 * 40 - 3 * 40 - 40 for _, tokens, rows in turns)
    assert [step(packed_rows()) for _ in range(2)] == [(1, 80, 200)] * 2
    assert not any(step(at_other_positions())[0] for _ in range(2)) and step(behind_padding())[0] <= 1
    for model in (ours, plain):
        model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    assert not any(step(branches(seed=seed))[0] for seed in range(2)), "hooks see rows"


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(zoo.NAMES))
def test_families(family):
    """Sinks, soft-caps, experts, windows; what cannot share says why."""
    torch.manual_seed(0)
    ours, plain = pair(lambda: zoo.make(family))
    for side in ("right", "", ""):
        batch = branches(side=side)
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), limit=2e-3, floor=1e-3)
    kept = any(has(ours, code) for code in ("prefixes-kept", "padding-kept", "sizes-kept"))
    assert shared(ours)[0] or kept, tunecompile.report(ours)


def test_a_window_is_counted_in_each_row():
    """It is shorter than the prefix, and a branch's first tokens see into it."""
    ours, plain = pair(lambda: attending(family="mistral", sliding_window=16).double())
    for side in ("right", "left"):
        batch = branches(side=side)
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), **EXACT)
    assert shared(ours)[0] == 2 and tunecompile.report(ours).regions[0].compiles == 1


def test_scores_are_those_of_training():
    """Bit for bit, as the old policy of GRPO has to be; and so are two steps."""
    ours = tunecompile.optimize(attending(), executor="eager")
    batch = branches()
    _, *again = (zoo.step(ours, batch) for _ in range(3))
    assert_equal(*again)
    given = {"input_ids": batch["input_ids"], "use_cache": False}
    trained = ours(**given).logits
    with torch.no_grad():
        assert torch.equal(ours(**given).logits, trained)
    assert shared(ours)[0] == 3


def test_gradients_of_copies_are_summed_in_fp32():
    """Of 300 rows in bf16: a running sum in bf16 would stand still at 256."""
    rows = torch.tensor([7] * 4).repeat(300)
    forest = forest_of(rows[None], [4] * 300, 1)
    made = SharedPrefixes.of(forest, torch.ones(300, 4, dtype=torch.bool), torch.device("cpu"))
    values = torch.ones(len(made.index), 2, dtype=torch.bfloat16, requires_grad=True)
    made.batch_of(values).sum().backward()
    assert torch.equal(values.grad, torch.tensor([[300.0]] * 4 + [[0.0]] * 4).expand(-1, 2).bfloat16())


def test_with_adapters_and_checkpoints():
    def make():
        model = zoo.adapt(attending().double())
        model.gradient_checkpointing_enable()
        return model

    ours, plain = pair(make)
    for seed in range(2):
        batch = branches(seed=seed, side="right")
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), **EXACT)
    assert shared(ours)[0] == 2, tunecompile.report(ours)


# -- where copies differ -------------------------------------------------------------------------------------------------


def not_shared(ours, plain, batches, code, **limits):
    for batch in batches:
        torch.manual_seed(1)
        found = zoo.step(ours, batch)
        torch.manual_seed(1)
        assert_close(found, zoo.step(plain, batch), **limits)
    assert not shared(ours)[0] and has(ours, "prefixes-kept", reason=code), tunecompile.report(ours)


def test_dropout_in_layers():
    """Padding is left out, too: dropout draws for other tokens then, so that the mean alone is the same."""
    ours = tunecompile.optimize(adapted_layers(lora_dropout=0.5), executor="eager")
    for seed in range(2):
        zoo.step(ours, branches(seed=seed, side="right"))
    assert not shared(ours)[0] and has(ours, "prefixes-kept", reason="draws-random") and not fell_back(ours)


def test_dropout_behind_embeddings_that_is_switched_on_later():
    """When what the layers are given is long known to be alike. The same tokens come to them as others then."""

    def make():
        model = token_wise().double()
        model.model.embed_tokens = nn.Sequential(model.model.embed_tokens, nn.Dropout(0.0))
        return model

    ours, plain = pair(make)
    for rate in (0.0, 0.0, 0.0, 0.3):
        for model in (ours, plain):
            model.model.embed_tokens[1].p = rate
        before = shared(ours)[0]
        steps = [zoo.step(model, branches(side="right"), loss=seeded) for model in (ours, plain)]
        assert_close(*steps, **EXACT)
        assert shared(ours)[0] == before + (not rate)
    assert has(ours, "prefixes-kept", reason="copies-differ")


def seeded(model, batch):
    torch.manual_seed(1)
    return model(**batch).loss


def test_chunks_go_on_from_each_other_in_other_layers():
    """Equal chunks behind other ones: layers of chunks alone would take them for one."""
    kinds = ["full_attention", "chunked_attention"]
    settings = dict(attn_temperature_tuning=False, attention_chunk_size=40, no_rope_layers=[1] * 2, num_hidden_layers=2)

    ours, plain = pair(lambda: without_mlps(zoo.make("llama4", layer_types=kinds, **settings)).double())
    for alike, side in ((True, "right"), (True, "right"), (False, "right")):
        batch = branches(80, 80, 4, 0, side)
        if not alike:
            batch["input_ids"][:, :40] = zoo.batch(rows=4, length=40)["input_ids"]
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), **EXACT)
    assert shared(ours)[0] == 2


def test_what_cannot_be_compared_is_of_each_row():
    ids = torch.zeros(3, 40, dtype=torch.long)
    for beside in ([0, 1, 2], [ids, ids], {"full_attention": ids}, ids.float(), ids[:, 0], object()):
        assert PrefixSearch().begin({"input_ids": ids, "beside": beside}, lambda: None) is None
        assert PrefixSearch().begin({"input_ids": ids, "attention_mask": {"sliding": ids}}, lambda: None) is None
    assert PrefixSearch().begin({"input_ids": ids, "use_cache": False, "positions": ids[:1]}, lambda: None) is not None


def test_tokens_at_other_places_are_others():
    """Where no positions are given. Of several kinds of positions none goes on from the document before."""
    real, starts = torch.ones(2, 81, dtype=torch.bool), torch.zeros(2, 81, dtype=torch.bool)
    starts[:, 0] = True
    ids, anew = torch.arange(81).expand(2, -1), torch.cat([torch.arange(40), torch.arange(41)])

    def shares(ids, real, starts, **given):
        return PrefixSearch().begin({"input_ids": ids, **given}, lambda: None).shared(real, starts) is not None

    assert shares(ids, real, starts)
    shifted = [each.clone() for each in (ids, real, starts)]
    for each in shifted:
        each[1] = each[1].roll(1)
    shifted[1][1, 0] = False
    assert not shares(*shifted)
    starts[:, 40] = True
    for kinds, shared_too in (([anew, anew], True), ([anew, torch.arange(81)], False)):
        assert shares(ids % 40, real, starts, position_ids=torch.stack(kinds)[:, None].expand(-1, 2, -1)) is shared_too


def test_encoders_see_what_comes_behind():
    """Also where padded batches came first, so that layers are known to read documents without a mask."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= dict(d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=256, dropout=0.0)
    ours, plain = pair(lambda: BartForConditionalGeneration(BartConfig(**sizes, pad_token_id=0)).double())
    for side in ("right", "", "", ""):
        batch = branches(side=side)
        batch["decoder_input_ids"] = batch["input_ids"].roll(1, 1)
        assert_close(zoo.step(ours, batch), zoo.step(plain, batch), floor=1e-6, **EXACT)
    assert not shared(ours)[0]


def test_router_losses_count_tokens():
    ours, plain = pair(lambda: zoo.make("olmoe", output_router_logits=True))
    not_shared(ours, plain, [branches(side="right")], "output-required")


# -- where it is looked for ----------------------------------------------------------------------------------------------


def test_few_batches_are_looked_at_where_none_shares(monkeypatch):
    looks = []
    monkeypatch.setattr(search, "forest_of", lambda *given: looks.append(1))
    ours = tunecompile.optimize(attending(), executor="eager")
    for seed in range(search.LOOKS + 2 * search.FEW):
        zoo.step(ours, zoo.batch(seed=seed, rows=2, length=40))
    searching = state_of(ours).paddings[0].prefixes
    assert len(looks) <= search.LOOKS + 2 and searching.alone >= search.LOOKS


def test_trls_grpo(tmp_path):
    """Losses and gradients' norms of four steps are those of the trainer alone."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tests.support.matrix.runs import SETTINGS
    from tests.support.matrix.trl import reward, words

    def text(length, seed):
        draw = random.Random(seed)
        return " ".join(f"w{draw.randint(3, 250)}" for _ in range(length))

    rows = [{"prompt": text(48 + i, i)} for i in range(8)]
    options = dict(max_completion_length=12, num_generations=4, per_device_train_batch_size=8, beta=0.04)
    options["gradient_accumulation_steps"] = 1

    def curve(optimize):
        settings = {**SETTINGS, "optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 3, **options}
        config = arguments(trl.GRPOConfig, tmp_path, gradient_checkpointing=False, **settings)
        model = zoo.adapt(attending(max_position_embeddings=256), target_modules=["q_proj"])
        if optimize:
            tunecompile.optimize(model, executor="eager")
        made = trl.GRPOTrainer(
            model, reward, config, processing_class=words(), train_dataset=datasets.Dataset.from_list(rows)
        )
        draw = random.Random(3)
        made._generate_single_turn = lambda prompts, *_, **__: (
            [[draw.randint(3, 250) for _ in range(draw.randint(3, 12))] for _ in prompts],
            None,
        )
        made.train()
        return [(each["loss"], each["grad_norm"]) for each in made.state.log_history[:3]], model

    (plain, _), (ours, model) = curve(False), curve(True)
    assert sum(ours, ()) == pytest.approx(sum(plain, ()), rel=2e-4, abs=2e-6) and plain != [(0.0, 0.0)] * 3
    count, tokens, of_rows = shared(model)
    assert count >= 3 and of_rows > 1.5 * tokens, tunecompile.report(model)
