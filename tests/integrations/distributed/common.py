"""What the cases share: a model, its part of a batch, and gradients of one process to compare with."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tunecompile
from tests.support import zoo
from tests.support.notes import fell_back

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  #: of this rank


def model(full: bool = False, **changes) -> nn.Module:
    made = zoo.make("llama", num_hidden_layers=2, **changes)
    return (made if full else zoo.adapt(made, r=8)).to(DEVICE).train()


def packed() -> nn.Module:
    """In NF4, as loading leaves it: the state of a weight is its module's as well. Stored as floats, since FSDP2 shards no others (torch 2.11)."""
    made = (
        zoo.adapt(zoo.quantize(zoo.make("llama", num_hidden_layers=2), storage=torch.bfloat16), r=8).to(DEVICE).train()
    )
    for module in made.modules():
        if (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
            module.quant_state = state
    return made


def optimized(made: nn.Module, **options) -> nn.Module:
    """Code is generated on a GPU only: on a CPU it takes half a minute a layer."""
    return tunecompile.optimize(made, executor="inductor" if DEVICE == "cuda" else "eager", **options)


def of_docs(told: str, names: dict) -> nn.Module | None:
    """The model, if there is one, after the lines of the guides in which this is said."""
    guides = Path(__file__).parents[3] / "docs" / "pages" / "guides"
    text = "".join((guides / name).read_text(encoding="utf-8") for name in ("several-gpus.md", "loading-big-models.md"))
    names["tunecompile"] = SimpleNamespace(optimize=optimized)
    exec(next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if told in block), names)  # noqa: S102 - our own docs
    return names.get("model")


def whole(of: nn.Module) -> None:
    """Layers were compiled once, and run so."""
    report = tunecompile.report(of)
    assert report.compiles == 1 and not fell_back(report), report


def unrecorded(of: nn.Module) -> None:
    """A CUDA graph would read weights where they were gathered when it was recorded."""
    assert all(region.replays is None for region in of._tunecompile.regions)


def batch(seed: int = 0, rows: int = 4, length: int = 24) -> dict[str, torch.Tensor]:
    return zoo.batch(rows=rows, length=length, seed=seed, device=DEVICE)


def part(whole: dict[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Every rank as many labels, so that the mean of their means is the batch's."""
    return {name: value[rank::ranks] for name, value in whole.items()}


def gradients(of: nn.Module) -> dict[str, torch.Tensor]:
    """By the names they have without a wrapper; those of shards put together."""
    found = {name.removeprefix("module."): p.grad for name, p in of.named_parameters() if p.grad is not None}
    return {
        name: (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone() for name, grad in found.items()
    }


def alike(ours: nn.Module, one: nn.Module, limit: float = 1e-3 if DEVICE == "cuda" else 1e-4) -> None:
    """The gradients of both are the same ones."""
    worst = zoo.errors(gradients(ours), gradients(one))
    assert max(worst.values()) < limit, max(worst.items(), key=lambda item: item[1])


def resumed(wrap: Callable[[nn.Module], nn.Module], rank: int, ranks: int, saved: int = 2, count: int = 4) -> None:
    """A run that ends behind a step and begins again from torch's distributed checkpoint has the losses of one that goes on."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)

    def run(first: int, last: int) -> list[float]:
        torch._dynamo.reset()
        made = wrap(model(full=True, attention_dropout=0.1))
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        if first:
            held = dict(zip(("model", "optimizer"), get_state_dict(made, optimizer)))
            dcp.load(held, checkpoint_id=folder[0])
            set_state_dict(made, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
        losses = []
        for seed in range(first, last):
            torch.manual_seed(seed)
            losses.append(made(**part(batch(seed), rank, ranks)).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        if last == saved:
            dcp.save(dict(zip(("model", "optimizer"), get_state_dict(made, optimizer))), checkpoint_id=folder[0])
        return [loss.item() for loss in losses]

    whole = run(0, count)
    # to the bit where two ranks sum: DDP's first buckets are other ones than those of later steps, and so is the order of more sums
    expected = whole if ranks == 2 else pytest.approx(whole, rel=1e-6)
    assert run(0, saved) + run(saved, count) == expected and len(set(whole)) == count


def steps(ours: nn.Module, one: nn.Module, rank: int, ranks: int, count: int = 2) -> None:
    """A few batches through both."""
    for seed in range(count):
        for each in (ours, one):
            each.zero_grad()
        one(**batch(seed)).loss.backward()
        ours(**part(batch(seed), rank, ranks)).loss.backward()
        alike(ours, one)
