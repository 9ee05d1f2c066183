"""The compiler, left to right: the order of the passes, and nothing but the order.

# What a pass sees

- recognize: the forward graph of a region, as plain torch calls, before autograd. It puts ops in the place of
  subgraphs. Values are in `node.meta["example_value"]`, to be read by `tunecompile.ir.canonicalize.value`.
- plan: forward and backward in one, the joint graph, as ATen calls and ops; values are in `node.meta["val"]`. It tags
  the values to recompute: `node.meta["recompute"]` is a `torch.utils.checkpoint.CheckpointPolicy`.
- lower: the forward and the backward graph, apart; values are in `node.meta["val"]`. It gives ops to providers.

Values are fake tensors: they have shape, strides, dtype and device, and sizes may be symbolic. A pass changes the
graph in place, gives every new node a value, and tells the report by its `tunecompile.compiler.pass_manager.Context`:
a `MatchCount` of what it found, or a line among the notes.

# A pass of your own

`tunecompile new-pass NAME` writes a package of one that holds. It has an op for the meaning (`tunecompile.op`), a
`tunecompile.ir.rewrite.rewrite` for each spelling, and `tunecompile.compiler.pass_manager.recognize` to make them a
pass; what patterns cannot say, a `tunecompile.compiler.pass_manager.Pass` with a function of its own does. Among
these here, a family has the same file stem everywhere: `ops/`, `passes/recognize/`, `templates/`, `tests/` and
`benchmarks/`. `tunecompile.compiler.plugins.compose` says where a package's pass stands.

# Seeing, testing, measuring

- `TUNECOMPILE_DUMP=folder` writes each graph before the first pass, and after each that changed it
  (`tunecompile.compiler.graph_dump`); `print(tunecompile.report(model))` tells near misses with the user's lines,
  providers and why others refused.
- `optimize(model, executor="eager")` runs the same passes without code generation, in seconds and on a CPU: what
  still fails is a pass's fault.
- `tunecompile check-pass FOLDER`, or `tunecompile.verification.check_pass.check`, puts a pass through five nets;
  `tunecompile.verify(model, batch)` judges the gradients of a model's step, and names the rewrite at fault. Passes
  that come with tunecompile are tested in `tests/passes/` and in models, in `tests/models/`.
- On a GPU, the `benchmark.py` of a new package times the pattern with and without the pass; `tunecompile compare
  --model llama-3.1-8b --shape 4x2048` a model's step beside eager's: tokens a second, milliseconds, peak GiB. Where
  the code is not faster, the op is better left to Inductor."""

import importlib
import pkgutil

from tunecompile.compiler.pass_manager import Pass
from tunecompile.compiler.plugins import compose

#: names of passes, in order. A pass that is not named stands as early as what it requires allows, as one of a package
ORDER = (
    "linear_cross_entropy",  # widest first: a narrow rewrite must not eat a wide one's anchor
    "document_attention",
    "attention",  # what is left of it, under masks that are not of documents
    "causal_attention",  # what torch has no fast kernel for, without a mask
    "one_query_attention",  # over a cache
    "experts",
    "expert_rows",
    "expert_biases",
    "expert_masks",  # over rows that are 0 once their biases are part of products
    "sort_keys",  # once nobody asks of what offsets are counted
    "nf4",
    "dora",
    "lora",
    "swiglu",
    "weighted_gate",  # of experts, before their second product
    "grouped_linear",  # base, then base + adapter, then siblings that share x, by what reads them
    "lora_nf4",  # and all of them as one, where a template can write the weights where they are read
    "rope",
    "layer_norm",  # before the other norm, which knows the root of a mean of squares too
    "rms_norm",
    "modulated_norm",  # of both, before the sums take those that are left
    "add_modulated_norm",
    "add_layer_norm",
    "add_rms_norm",  # the sum that ends a rotation is not a residual, if it is normed
    "lora_mlp",  # gate|up, activation and down as one, where a template joins their backward
    "linear_4bit",  # what has no adapter, in rollouts
    "packed_experts",  # of few rows, once biases and weights are in products
    "widened",
    "tile",
    "tile_rows",
    "remat",
    "providers",
    "gather_rows",
    "choose_provider",
    "attention_gradient",
    "attention_by_heads",
    "grouped_operands",
    "cleanup",
    "kernel_operands",  # on the final graph: who reads what is known
)


def _found() -> dict[str, Pass]:
    """The passes of all files, by their names."""
    files = [importlib.import_module(file.name) for file in pkgutil.walk_packages(__path__, f"{__name__}.")]
    return {each.name: each for file in files for each in vars(file).values() if isinstance(each, Pass)}


_named = _found()
#: all that come with tunecompile, in order
PIPELINE = compose([_named.pop(name) for name in ORDER], [*_named.values()])
