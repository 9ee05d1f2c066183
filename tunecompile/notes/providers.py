"""Why providers refuse a call: the report shows it beside the op, and in notes about a precision."""

from tunecompile.notes.kind import NoteKind

REASONS = {
    "arguments-not-supported": NoteKind("its arguments are not supported"),
    "not-in-4-bits": NoteKind("its weights are not in 4 bits"),
    "not-on-gpu": NoteKind("not on a GPU"),
    "not-half-precision": NoteKind("in {detail}, not in half precision"),
    "factor-not-positive": NoteKind("the factor of the logits is {detail}, and it is for positive ones"),
    "no-triton": NoteKind("Triton is not installed", "Install Triton."),
    "dtypes-differ": NoteKind("{subject} differ in dtype"),
    "not-contiguous": NoteKind("{subject} not contiguous"),
    "not-bfloat16": NoteKind("it is for bfloat16 alone, and this is {detail}"),
    "not-16-bytes": NoteKind("rows of matrices are no multiples of 16 bytes"),
    "row-not-contiguous": NoteKind("the elements of a row are not contiguous"),
    "activation-not-supported": NoteKind("the activation {detail} is not supported"),
    "rank-too-large": NoteKind("rank {rank} is more than {limit}", "Use adapters of a smaller rank."),
    "rows-change": NoteKind("the number of rows changes from call to call"),
    "too-many-rows": NoteKind("{rows} rows are more than {limit}"),
    "rows-too-short": NoteKind("rows of {length} values: it is for {limit} and more"),
    "head-widths": NoteKind(
        "heads of {queries} and {values}: they must be equal, a multiple of 8 and at most 256",
    ),
    "softcap-not-supported": NoteKind("scores are soft-capped"),
    "template-head-widths": NoteKind("heads of {queries} and {values}: they must be equal, and of 16 to 512"),
    "key-and-value-widths": NoteKind("keys of {keys} and values of {values}: multiples of 16, keys of at most {limit}"),
    "states-of-a-channel": NoteKind("a channel has {states} states: at most {limit}"),
    "package-not-installed": NoteKind("{detail} is not installed"),
    "state-or-documents": NoteKind("it begins with a state, or documents share a row"),
    "state-to-begin-with": NoteKind("it begins with a state of 0, and one is given"),
    "torch-is-faster": NoteKind("torch's kernels are faster for {subject}"),
    "instructions-of-nvidia": NoteKind("its kernel has instructions of NVIDIA's"),
    "gpu-before-ampere": NoteKind("the GPU is older than Ampere"),
    "compiler-fails": NoteKind("its kernel cannot be compiled: {detail}"),
    "gpu-without-bfloat16": NoteKind(
        "the GPU does not compute in bfloat16",
        "Train in float16: load the model in it, and ask the trainer for fp16.",
    ),
    "registers-spill": NoteKind("the GPU has too few registers for it"),
    "bitsandbytes-not-loaded": NoteKind("bitsandbytes is not loaded"),
    "fp8-gives-bfloat16": NoteKind(
        "it computes in {detail}, and FP8 products give bfloat16",
        "Train in bfloat16: load the model in it, or use autocast; or take precision='int8'.",
    ),
    "eight-bits-few-rows": NoteKind("few rows: a weight is read once as it is, rounding it would write it, too"),
    "eight-bits-shape": NoteKind(
        "the weight is {rows}x{columns}, and products in 8 bits need multiples of 16 up to {limit}",
    ),
    "fp8-gpu": NoteKind(
        "torch scales FP8 products by row on compute capability 8.9, 9.0 and 10.0; this GPU has {detail}",
        "Take precision='int8', or '8bit' for what the GPU has.",
    ),
    "int8-gpu": NoteKind("INT8 products need compute capability 7.5 (Turing) or newer"),
    "eight-bits-packed-weight": NoteKind("the packed weight is not contiguous, or begins at an odd byte"),
    "backward-not-joined": NoteKind("its backward cannot be joined"),
    "tiled": NoteKind("it is tiled", "Give more memory: the plan tiles an MLP only where nothing else fits."),
}
