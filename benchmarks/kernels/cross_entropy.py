"""Cross entropy of a chunk of logits, loss and gradient: bytes are two reads and one write (4 + 2 B in bf16).

Who works in place gets a copy of the logits before the clock starts.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs without an installation, too

from benchmarks._harness import DEVICE, INDUCTOR, TEMPLATE, Before, attempt, compiled, main, randn, relative_error
from tunecompile.templates import cross_entropy
from tunecompile.templates._tiles import Tile


def inputs(rows, vocabulary):
    def make(seed):
        g = torch.Generator(DEVICE).manual_seed(seed)
        return randn(rows, vocabulary, seed=seed), torch.randint(0, vocabulary, (rows,), generator=g, device=DEVICE)

    return make


@compiled
def reference(logits, labels):
    z = logits.float()
    lse = torch.logsumexp(z, 1, keepdim=True)
    grad = torch.exp(z - lse) - (torch.arange(z.shape[1], device=z.device) == labels[:, None]).float()
    return grad.to(logits.dtype), lse[:, 0] - z.gather(1, labels[:, None])[:, 0]


def liger():
    """Its forward pass writes the gradient over the logits; the backward pass has nothing to do for d(loss) = 1."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    def prepare(logits, labels):
        own = logits.clone().requires_grad_()

        def call():
            liger_cross_entropy(own, labels, reduction="sum")
            return own.detach()

        return call

    return Before(prepare)


def unsloth():
    from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss

    def prepare(logits, labels):
        own, ones = logits.detach().clone().requires_grad_(), torch.ones(len(labels), device=logits.device)

        def call():
            loss = Fast_CrossEntropyLoss.apply(own, labels, 0, 0)
            return *torch.autograd.grad(loss, own, ones), loss.detach()

        return call

    return Before(prepare)


def template(**options):
    def prepare(logits, labels):
        own = logits.clone()
        return lambda: (own, cross_entropy.loss_and_grad_(own, labels, **options))

    return Before(prepare)


def exactness(rows, vocabulary):
    logits, labels = inputs(rows, vocabulary)(0)
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    _, loss = template().prepare(logits, labels)()
    print(f"{rows}x{vocabulary}: loss error {relative_error(loss, expected):.1e}")


def tiles():
    sizes = (2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32), (32768, 32)
    return {
        f"block {block}, {warps} warps, {stages} stages": template(tile=Tile(block, num_warps=warps, num_stages=stages))
        for block, warps in sizes
        for stages in (1, 2, 3)
    }


def run(bench):
    for rows, vocabulary in ((1024, 128256), (4096, 49152)):
        rows, vocabulary, first = bench.size(rows), bench.size(vocabulary), vocabulary == 128256
        exactness(rows, vocabulary)
        name, size = f"{rows}x{vocabulary}", rows * vocabulary
        bench(
            name,
            {
                INDUCTOR: reference,
                "Liger, in place": attempt(liger),
                "Unsloth": attempt(unsloth),
                TEMPLATE: template(),
                **bench.tiles(tiles),
            },
            inputs(rows, vocabulary),
            bytes=size * 6,
            check=relative_error,
            shown="cross-entropy and its gradient" if first else "",
        )
        bench(
            f"{name} variants",
            {"softcap 30": template(softcap=30.0), "loss only": template(grad=False)},
            inputs(rows, vocabulary),
            bytes=size * 6,
        )


if __name__ == "__main__":
    main({"cross_entropy": run})
