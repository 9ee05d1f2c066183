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
        self.embed, self.norm, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.blocks = nn.ModuleList(ModernBlock() for _ in range(layers))

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens, labels):
        x, half = self.embed(tokens), WIDTH // HEADS // 2
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] / 100 ** (
            torch.arange(half, device=x.device) / half
        )
        for block in self.blocks:
            x = block(x, (angles.cos(), angles.sin()))
        return {"loss": F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten()), "hidden": (x,)}


def test_modern_style():
    report = check(Modern(), ids(), labels=ids(), loss=lambda out: out["loss"] + 0.1 * out["hidden"][0].square().mean())
    assert report.compiles == 1 and report.regions[0].layers == 3
    found = matches(report)
    assert found["rms_norm"] == (2, 2) and found["linear_cross_entropy"] == (1, 1) and found["rope"] == (2, 2), report
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
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(VOCABULARY, WIDTH),
                wpe=nn.Embedding(64, WIDTH),
                h=nn.ModuleList(OldBlock(dropout) for _ in range(3)),
                ln_f=nn.LayerNorm(WIDTH),
            )
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(idx.size(1), device=idx.device))
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
    report = check(
        Plain(), x, scale=2.0, loss=lambda out: weighted(out["out"]) + out["aux"][0] + out["aux"][2][0].mean()
    )
    assert report.compiles == 1 and any("no repeated layers" in note for note in report.notes)
    assert matches(report)["rms_norm"] == (1, 1)


class Crossing(nn.Module):
    """Layers of two classes in one list, as models of text and images have them: some read a memory, and are left out where there is none."""

    def __init__(self):
        super().__init__()
        kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        self.layers = nn.ModuleList(kinds[i % 2](WIDTH, HEADS, WIDTH, 0.0, batch_first=True) for i in range(4))

    def forward(self, x, memory=None):
        for layer in self.layers:
            if isinstance(layer, nn.TransformerEncoderLayer):
                x = layer(x)
            elif memory is not None:
                x = layer(x, memory)
        return x


def test_layers_of_two_classes_in_one_list():
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    report = check(Crossing(), x, memory)
    assert [(r.layers, r.compiles) for r in report.regions] == [(2, 1), (2, 1)] and not report.notes[1:], report
    report = check(Crossing(), x)
    assert [(r.layers, r.compiles) for r in report.regions] == [(2, 1), (2, 0)], report


class Beside(nn.Module):
    """A small tower of layers beside a large part that has none."""

    def __init__(self, width: int):
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.embed, self.parts = nn.Embedding(1000, 8), nn.ModuleList([nn.Sequential(nn.Linear(8, width)), Wide(width)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for part in (*self.tower, *self.parts):
            x = part(x)
        return x


class Wide(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.out = nn.Linear(width, 8)

    def forward(self, x):
        return self.out(x)


@pytest.mark.parametrize("width, said", [(64, True), (2, False)])
def test_most_weights_in_no_layer_are_told(width, said):
    report = check(Beside(width), ids())
    assert [r.layers for r in report.regions] == [2], report
    assert said == any(
        "most weights are in none of the repeated layers that were found (tower)" in note for note in report.notes
    ), report


def test_no_parameters_and_no_layers():
    x = torch.randn(2, 3, requires_grad=True)
    model = tunecompile.optimize(nn.Identity().train(), executor="eager")
    model(x).sum().backward()
    assert x.grad.eq(1).all() and str(tunecompile.report(model))


def test_encoder_of_torch_itself():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 4:] = True
    report = check(
        nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
        torch.randn(3, 7, WIDTH),
        src_key_padding_mask=padding,
    )
    assert report.regions[0].layers == 3 and report.compiles >= 1


class Sequence(nn.Module):
    """Layers in an nn.Sequential, and an encoder beside a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(2))
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, HEADS, WIDTH, 0.0, batch_first=True) for _ in range(2)
        )

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
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 5:] = 0
    report = check(
        transformers.BertForMaskedLM(config), ids(), attention_mask=mask, labels=ids(), loss=lambda out: out.loss
    )
    assert report.regions[0].layers == 2 and report.compiles == 1, report
    assert matches(report)["linear_cross_entropy"] == (1, 1), report


@pytest.mark.slow
def test_encoder_decoder_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    report = check(transformers.T5ForConditionalGeneration(config), ids(), labels=ids(2, 7), loss=lambda out: out.loss)
    assert report.compiles >= 4 and not [note for note in report.notes if "eagerly" in note], report
