"""Cross entropy of a chunk of logits, loss and gradient in place: bytes are two reads and one write (4 + 2 B in bf16)."""

import torch
import torch.nn.functional as F
from _harness import Bench, attempt, compiled, randn, relative_error

from tunecompile.templates import cross_entropy
from tunecompile.templates._tiles import Tile

bench = Bench("cross_entropy")


def inputs(rows, vocabulary):
    return lambda seed: (randn(rows, vocabulary, seed=seed), torch.randint(0, vocabulary, (rows,), device="cuda"))


@compiled
def reference(logits, labels):
    z = logits.float()
    lse = torch.logsumexp(z, 1, keepdim=True)
    grad = torch.exp(z - lse) - (torch.arange(z.shape[1], device=z.device) == labels[:, None]).float()
    return lse[:, 0] - z.gather(1, labels[:, None])[:, 0], grad.to(logits.dtype)


def liger():
    from liger_kernel.transformers.functional import liger_cross_entropy
    # Its forward pass writes the gradient over the logits.
    return lambda logits, labels: liger_cross_entropy(logits.detach().requires_grad_(), labels, reduction="sum")


def unsloth():
    from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss

    def run(logits, labels):
        loss = Fast_CrossEntropyLoss.apply(logits.detach().requires_grad_(), labels, 0, 0)
        loss.sum().backward()
    return run


def template(**options):
    return lambda logits, labels: cross_entropy.loss_and_grad_(logits, labels, **options)


def exactness(rows, vocabulary):
    logits, labels = inputs(rows, vocabulary)(0)
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    _, grad = reference(logits, labels)
    loss, _ = cross_entropy.loss_and_grad_(logits, labels)
    print(f"{rows}x{vocabulary}: loss error {relative_error(loss, expected):.1e}, gradient against the reference {relative_error(logits, grad):.1e}")


for rows, vocabulary in ((1024, 128256), (4096, 49152)):
    exactness(rows, vocabulary)
    systems = {"reference, torch.compile": reference, "Liger": attempt(liger), "Unsloth": attempt(unsloth), "template": template(),
               "template, softcap 30": template(softcap=30.0), "template, loss only": template(grad=False)}
    if bench.options.sweep:
        for block, warps in ((2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16), (8192, 32), (16384, 16), (16384, 32), (32768, 32)):
            for stages in (1, 2, 3):
                systems[f"block {block}, {warps} warps, {stages} stages"] = template(tile=Tile(block, num_warps=warps, num_stages=stages))
    # In place: the logits become a gradient and then the gradient of that; the times do not depend on the values.
    bench(f"{rows}x{vocabulary} bf16", systems, inputs(rows, vocabulary), bytes=rows * vocabulary * 6)
bench.show()
