"""Models nobody prepared us for, torch alone: right numbers everywhere, and the report says what was refused."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tunecompile

pytestmark = pytest.mark.filterwarnings("ignore")
VOCABULARY, WIDTH, HEADS = 61, 32, 4


def weighted(out: Tensor) -> Tensor:
    """A loss in which every element has its own weight. (The mean square of a norm's output is a constant: its gradient is rounding.)"""
    return (out * torch.cos(torch.arange(out.numel())).reshape(out.shape)).mean()


def check(model: nn.Module, *args, loss=None, steps: int = 2, **kwargs) -> tunecompile.report:
    """A few optimizer steps beside the same model as it was; returns the report."""
    reference = copy.deepcopy(model).train()
    model = tunecompile.optimize(model.train(), executor="eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model, reference)]
    for _ in range(steps):
        losses = []
        for m, optimizer in zip((model, reference), optimizers):
            torch.manual_seed(3)
            optimizer.zero_grad()
            out = m(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            value = loss(out) if loss else weighted(out)
            value.backward()
            losses.append(value.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters()):
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                assert (ours.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm().clamp_min(1e-4), name
        for optimizer in optimizers:
            optimizer.step()
    return tunecompile.report(model)


def matches(report) -> dict[str, tuple[int, int]]:
    return {m.family: (m.found, m.rewritten) for m in report.matches if m.found}


def ids(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


# -- two transformers, written in different styles -----------------------------------------------------------------------


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring channels, as in the papers and in Meta's own code."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.scale, 1e-5)


class ModernBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6), Norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, tables):
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(rotate_pairs(q, *tables), rotate_pairs(k, *tables), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Modern(nn.Module):
    def __init__(self, layers: int = 3):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(ModernBlock() for _ in range(layers))

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens, labels):
        x, half = self.embed(tokens), WIDTH // HEADS // 2
        angles = torch.arange(tokens.shape[1])[:, None] / 100 ** (torch.arange(half) / half)
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()))
        return {"loss": F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten()), "hidden": (x,)}


def test_modern_style():
    report = check(Modern(), ids(), labels=ids(), loss=lambda out: out["loss"] + 0.1 * out["hidden"][0].square().mean())
    assert report.compiles == 1 and report.regions[0].layers == 3
    found = matches(report)
    assert found["rms_norm"] == (2, 2) and found["linear_cross_entropy"] == (1, 1), report
    for family, (seen, done) in found.items():  # what is not rewritten is explained
        assert seen == done or next(m for m in report.matches if m.family == family).refused, report


class OldBlock(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2) for part in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = F.softmax(weights.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        x = x + self.c_proj((self.dropout(weights) @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.dropout(self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)))))


class NanoGPT(nn.Module):
    """The layers are in a ModuleDict, whose forward nobody calls."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(VOCABULARY, WIDTH), wpe=nn.Embedding(64, WIDTH),
                                              h=nn.ModuleList(OldBlock(dropout) for _ in range(3)), ln_f=nn.LayerNorm(WIDTH)))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def test_gpt_style():
    report = check(NanoGPT(), ids(), ids(), loss=lambda out: out[1])
    assert report.compiles == 1 and report.regions[0].layers == 3
    assert any("no output embedding" in note for note in report.notes)


def test_gpt_style_with_dropout():
    """Masks are drawn from the same generator: reproducible, and the gradient is that of the loss."""
    model = tunecompile.optimize(NanoGPT(0.1).train(), executor="eager")

    def losses():
        torch.manual_seed(7)
        return [model(ids(), ids())[1].item() for _ in range(3)]

    assert losses() == losses() and len(set(losses())) == 3


# -- other shapes of model ----------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """No repeated layers: one region."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, scale: float = 1.0):
        gate, up = self.first(x).chunk(2, -1)
        return {"out": self.norm(self.second(F.silu(gate) * up)) * scale, "aux": (gate.mean(), None, [up])}


def test_no_repeated_layers():
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    report = check(Plain(), x, scale=2.0, loss=lambda out: weighted(out["out"]) + out["aux"][0] + out["aux"][2][0].mean())
    assert report.compiles == 1 and any("no repeated layers" in note for note in report.notes)
    assert matches(report)["rms_norm"] == (1, 1)


def test_no_parameters_and_no_layers():
    x = torch.randn(2, 3, requires_grad=True)
    model = tunecompile.optimize(nn.Identity().train(), executor="eager")
    model(x).sum().backward()
    assert x.grad.eq(1).all() and str(tunecompile.report(model))


def test_encoder_of_torch_itself():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 4:] = True
    report = check(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(3, 7, WIDTH), src_key_padding_mask=padding)
    assert report.regions[0].layers == 3 and report.compiles >= 1


class Sequence(nn.Module):
    """Layers in an nn.Sequential, and an encoder beside a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(2)))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, HEADS, WIDTH, 0.0, batch_first=True) for _ in range(2))

    def forward(self, source, target):
        memory = self.encoder(source)
        for layer in self.decoder:
            target = layer(target, memory)
        return target


def test_encoder_and_decoder():
    report = check(Sequence(), torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH))
    assert len(report.regions) == 2 and all(r.compiles >= 1 and r.layers == 2 for r in report.regions), report


def test_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=64,
                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 5:] = 0
    report = check(transformers.BertForMaskedLM(config), ids(), attention_mask=mask, labels=ids(), loss=lambda out: out.loss)
    assert report.regions[0].layers == 2 and report.compiles == 1, report
    assert matches(report)["linear_cross_entropy"] == (1, 1), report


def test_encoder_decoder_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=HEADS, dropout_rate=0.0,
                                   decoder_start_token_id=0)
    report = check(transformers.T5ForConditionalGeneration(config), ids(), labels=ids(2, 7), loss=lambda out: out.loss)
    assert report.compiles >= 4 and not [note for note in report.notes if "eagerly" in note], report


# -- layers with habits -------------------------------------------------------------------------------------------------


class Habit(nn.Module):
    """A layer to inherit from, and below it the model that runs three of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def step(self, x):
        return x + torch.tanh(self.linear(x))

    def forward(self, x, **_):
        return self.step(x)


class Stack(nn.Module):
    def __init__(self, layer: type, count: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(4))


class OnlyKeywords(Habit):
    def forward(self, *, hidden, scale=1.0, mask=None):
        return self.step(hidden) * scale if mask is None else self.step(hidden) * mask


class KeywordStack(Stack):
    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(hidden=x, scale=0.5, mask=None if index else torch.ones(2, 1, 1))
        return x


def test_layers_called_by_keyword_only():
    report = check(KeywordStack(OnlyKeywords), X)
    assert report.compiles == 2 and not report.notes[1:], report


class Appending(Habit):
    def forward(self, x, seen: list, counts: dict):
        x = self.step(x)
        seen.append(x)
        counts["layers"] = counts.get("layers", 0) + 1
        return x


class AppendingStack(Stack):
    def forward(self, x):
        seen, counts = [], {}
        for layer in self.layers:
            x = layer(x, seen, counts)
        assert len(seen) == len(self.layers) == counts["layers"]
        return sum(h.square().mean() * (i + 1) for i, h in enumerate(seen))


def test_layers_that_append_to_an_argument():
    check(AppendingStack(Appending), X, loss=lambda out: out)


class InPlace(Habit):
    def forward(self, x):
        h = self.linear(x)
        h += x
        h[:, 0] = 0
        return h.relu_()


def test_layers_that_write_in_place():
    check(Stack(InPlace), X)


class Counting(Habit):
    """A buffer is written in each step, and a running mean kept."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.step(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_layers_that_keep_state():
    model = Stack(Counting)
    check(model, X)
    assert [layer.calls.item() for layer in model.layers] == [2, 2, 2]
    assert all(layer.norm.num_batches_tracked == 2 for layer in model.layers)


class Printing(Habit):
    def forward(self, x):
        h = self.linear(x)
        print("inside a layer")
        return x + torch.tanh(h)


def test_a_graph_break_inside_a_layer(capsys):
    report = check(Stack(Printing), X)
    assert capsys.readouterr().out.count("inside a layer") == 12
    assert any("in pieces" in note and "test_custom_models.py" in note for note in report.notes), report


class Reading(Habit):
    def forward(self, x):
        return self.step(x) if x.abs().max().item() > 1e9 else self.step(-x)


def test_a_layer_that_reads_a_number(capsys):
    report = check(Stack(Reading), X)
    assert any("in pieces" in note or "eagerly" in note for note in report.notes), report


class NotUnderCompile(Habit):
    def forward(self, x):
        if torch.compiler.is_compiling():
            raise RuntimeError("this layer is not to be compiled")
        return self.step(x)


def test_a_layer_that_refuses_to_be_compiled():
    report = check(Stack(NotUnderCompile), X)
    assert any("eagerly" in note for note in report.notes), report


class Disabled(Habit):
    @torch.compiler.disable
    def forward(self, x):
        return self.step(x)


def test_a_layer_that_is_kept_from_dynamo():
    report = check(Stack(Disabled), X)
    assert report.compiles == 0 and any("eagerly" in note for note in report.notes), report


class Failing(Habit):
    def forward(self, x):
        if x.shape[1] == 5:
            raise ValueError("rows of five are not supported")
        return self.step(x)


def test_a_layers_own_error_reaches_the_user():
    model = tunecompile.optimize(Stack(Failing).train(), executor="eager")
    with pytest.raises(ValueError, match="rows of five"):
        model(X)
    x = torch.randn(2, 6, WIDTH)
    expected = copy.deepcopy(model)(x)
    assert torch.allclose(model(x), expected, atol=1e-6)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3  # deliberately not the derivative


class OwnFunction(Habit):
    def forward(self, x):
        return self.step(Twice.apply(x))


def test_a_users_autograd_function_is_obeyed():
    check(Stack(OwnFunction), X)


def test_broken_backend_leaves_the_region_eager(monkeypatch):
    from tunecompile import backend

    def fail(*_):
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(backend, "run_stage", fail)
    report = check(Stack(Habit), X)
    assert report.compiles == 0 and any("out of ideas" in note for note in report.notes), report


class Unlike(nn.Module):
    """Layers of two classes, one of them shared, one skipped in training."""

    def __init__(self):
        super().__init__()
        shared = Habit()
        self.layers = nn.ModuleList([shared, OwnFunction(), shared, Habit()])

    def forward(self, x):
        for layer in list(self.layers)[:3]:
            x = layer(x)
        return x


def test_lists_of_unlike_shared_and_unused_layers():
    report = check(Unlike(), X)
    assert report.compiles >= 1, report


def test_shared_layers():
    layer = Habit()
    model = Stack(Habit)
    model.layers = nn.ModuleList([layer, layer, Habit()])
    report = check(model, X)
    assert report.compiles == 2, report  # the first call's input needs no gradient
    tunecompile.restore(model)
    assert not [m for m in model.modules() if m._compiled_call_impl is not None]


def test_half_of_the_layers_compiled_by_the_user():
    model = Stack(Habit)
    model.layers[0].compile(backend="aot_eager")
    theirs = model.layers[0]._compiled_call_impl
    report = check(model, X)
    assert any("compiled already" in note for note in report.notes) and report.regions[0].layers == 2, report
    tunecompile.restore(model)
    assert model.layers[0]._compiled_call_impl is theirs


def test_a_part_of_a_model_was_optimized_before():
    model = Modern(2)
    tunecompile.optimize(model.blocks[0], executor="eager")
    report = check(model, ids(), labels=ids(), loss=lambda out: out["loss"])
    assert report.compiles >= 1
    tunecompile.restore(model)
    tunecompile.restore(model.blocks[0])
    assert not [m for m in model.modules() if m._compiled_call_impl is not None]


def test_generated_code():
    """The one test here that compiles for real: the head, a norm, RoPE on pairs and a fused gate, symbolic from the second shape on."""
    torch.manual_seed(0)
    model = Modern(2).train()
    reference = copy.deepcopy(model)
    tunecompile.optimize(model)
    for rows, length in ((2, 11), (3, 8), (4, 13)):
        tokens, results = ids(rows, length), []
        for m in (model, reference):
            m.zero_grad()
            m(tokens, tokens)["loss"].backward()
            results.append([p.grad for p in m.parameters()])
        for ours, theirs in zip(*results):
            assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    assert tunecompile.report(model).compiles == 2 and not [n for n in tunecompile.report(model).notes if "eager" in n]
