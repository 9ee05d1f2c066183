"""Notes about the model and its training steps: layers, head and loss, loops, CUDA graphs."""

from tunecompile.notes.kind import NoteKind

NOTES = {
    # layers
    "no-layers-found": NoteKind("no repeated layers were found: the model is compiled as one region"),
    "compiled-already": NoteKind(
        "{subject} is compiled already and left as it is", "Leave out torch.compile(model) or model.compile()."
    ),
    "optimized-already": NoteKind(
        "this {subject} is optimized already, with other settings: they stay",
        "Call restore(model), then optimize(model) with the settings that you want.",
    ),
    "taken-over": NoteKind(
        "its layers were optimized as parts of another {subject}, which is restored: settings of the last call count",
        "Call optimize once, on the model that is trained.",
    ),
    "new-layers": NoteKind(
        "{count} layers came after `optimize` and are not compiled: call `restore`, then `optimize`",
        "Call restore(model), then optimize(model).",
    ),
    "backward-left-out": NoteKind(
        "the losses of {count} batches, {rows} completions, had no gradient (equal rewards): they got no backward pass"
    ),
    "hooks-replaced": NoteKind(
        "a dictionary of hooks inside a layer was replaced by another while the first was kept: this was noticed "
        "within {steps} steps, in which layers ran with the hooks they had before",
        "Add hooks by register_forward_hook and the like, and remove them by their handles.",
    ),
    "called-again": NoteKind(
        "{subject} is called more than once in a forward, and training goes without the cache that the model makes by "
        "default: where two calls share a place in it, the later one does not see the keys of the earlier one",
        "Nothing, if the model keeps its loops apart. Else pass use_cache=True, and layers get the cache.",
    ),
    "weights-read": NoteKind(
        "attention weights of {subject} were read, though output_attentions is False: its layers ran once more for "
        "them, and return them since",
        "Pass output_attentions=True where you read them, or do not read them: without them no scores are kept.",
    ),
    "weights-outside-layers": NoteKind(
        "most weights are in none of the repeated layers that were found ({subject}), and are not compiled",
        "Report the model's structure.",
    ),
    "sharded-linears": NoteKind(
        "linears of the layers are sharded (tensor parallelism): their communication is unchanged, and adapters "
        "are not "
        "fused with them"
    ),
    "parametrizing-modules": NoteKind(
        "{count} modules ({subject}) parametrise other modules at every call (adapters over experts): they run "
        "eagerly, and their layers have graph breaks there: {detail}"
    ),
    "packed-stacks": NoteKind(
        "{count} modules ({subject}) have 4-bit stacks that bitsandbytes' own code dequantises: {detail}"
    ),
    "merging-modules": NoteKind(
        "{count} modules ({subject}) merge their adapter into the weights at every call: they run eagerly, and their "
        "layers have graph breaks there",
        "Nothing: PEFT adapts nn.MultiheadAttention in this way. Layers of separate linears are compiled whole.",
    ),
    "packed-for-evaluation": NoteKind(
        "{count} 4-bit weights were evaluated on this CPU before `optimize`, and bitsandbytes packed them for good: "
        "gradients stop at them. Load the model anew to train it",
        "Load the model anew, and optimize it before any evaluation.",
    ),
    # loops
    "eval-mode": NoteKind(
        "forwards with gradients ran in eval mode, which counts as evaluation and is not compiled: call model.train() "
        "before training steps",
        "Call model.train() before training steps.",
    ),
    "evaluation-compiled": NoteKind("evaluations run compiled, without logits that nobody reads ({count} batches)"),
    "evaluation-left": NoteKind("an evaluation ran by the model's own code: {detail}"),
    "generation-runs": NoteKind("generate() ran recorded steps: {count} calls, {tokens} new tokens a row in all"),
    "generation-left": NoteKind("a call of generate() ran by transformers' own loop: {detail}"),
    "generation-memory": NoteKind(
        "generate() ran out of memory, with a cache of {rows} rows of {tokens} tokens",
        "Generate for fewer rows at a time, or fewer new tokens: the cache is as long as the longest row may become.",
    ),
    "generation-made-room": NoteKind(
        "generate() had no room for {rows} rows of {tokens} tokens beside what training steps hold, and gave that back",
        "The next steps record their launches anew. Generate for fewer rows at a time, or set a smaller memory=.",
    ),
    "generation-not-recorded": NoteKind(
        "steps of generate() are not recorded: {detail}",
        "Nothing needs to be done: they run one launch after the other.",
    ),
    "replicas": NoteKind(
        "nn.DataParallel's replicas ran without tunecompile: start one process a GPU (torchrun), or show it one GPU",
        "Start the training with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU.",
    ),
    "compiled-from-outside": NoteKind(
        "the whole model was compiled by torch.compile or model.compile: such steps run without tunecompile",
        "Leave out torch.compile(model) or model.compile().",
    ),
    "transformed": NoteKind(
        "torch.func, or forward-mode differentiation, transformed the model: such steps run without tunecompile"
    ),
    "custom-checkpointing": NoteKind(
        "{count} layers are checkpointed by a function that does more than torch's, such as copying to the host "
        "(offload=True): it is called around the compiled layers. memory= plans recomputation and copies itself",
        "Leave out offload=True, and set memory= instead.",
    ),
    "liger-kernels": NoteKind(
        "{subject}: these modules run Liger's kernels, as use_liger_kernel=True requires, and are not rewritten",
        "Leave out use_liger_kernel=True.",
    ),
    # head and loss
    "no-output-embedding": NoteKind("no output embedding was found: what comes behind the layers runs by its own code"),
    "head-replaced": NoteKind("the head became a {subject} after `optimize`"),
    "fused-head-left": NoteKind("TRL's fused head computes scores by its own function: {detail}"),
    "head-not-called": NoteKind("the head is never called: {detail} from its weight"),
    # CUDA graphs
    "cuda-graphs": NoteKind("launch-bound layers are replayed as CUDA graphs ({count} recordings, {detail})"),
    "cuda-graphs-full": NoteKind(
        "recordings hold {detail}: further layers or shapes get no CUDA graph",
        "Use fewer lengths of batches: each shape is recorded for itself.",
    ),
    "no-cuda-graph": NoteKind("no CUDA graph: {detail}"),
    "stacks-replayed": NoteKind("layers that follow each other are replayed together ({count} recordings)"),
    "no-stack-recorded": NoteKind("layers are recorded one by one: {detail}"),
}

REASONS = {
    # why adapters over parameters are not traced
    "adapter-over-parameters-unknown": NoteKind("only PEFT's LoRA over parameters is known, one for each"),
    "adapted-value-not-plain": NoteKind("{subject} is no plain stack of two-byte or wider matrices"),
    "forward-replaced": NoteKind("{subject}.forward was replaced, or the module is parametrised already"),
    "reads-itself": NoteKind("the code of {subject} sets attributes, has properties or calls super()"),
    "loops-over-experts": NoteKind(
        "{subject} loops over its experts", "Load the model with experts_implementation='grouped_mm'."
    ),
    "loop-computes-loss": NoteKind("the loop computes the loss"),
    "package-computes-loss": NoteKind("{subject} replaced the model's forward and computes the loss"),
    "layer-number-read": NoteKind("its code depends on its number among the layers, in generate()"),
    # why transformers' own loop generates
    "generation-argument": NoteKind("{subject} was given"),
    "generation-mode": NoteKind("{subject} is requested", "Greedy search and sampling are recorded."),
    "generation-sharded": NoteKind("ranks gather the weights together, and have to call the model equally often"),
    "generation-encoder": NoteKind("the model has an encoder"),
    "generation-in-training": NoteKind(
        "the model is in training mode, and has {subject}", "Call model.eval() before generate()."
    ),
    "generation-device": NoteKind("there is nothing to record on {subject}"),
    "generation-not-static": NoteKind("{subject} does not take a cache of a fixed size"),
    "generation-cache": NoteKind("its cache is {subject}"),
    "generation-own-steps": NoteKind("{subject}() is not transformers' own, and may count tokens"),
    "generation-hooked": NoteKind("a hook is on {subject}, which recorded steps do not call", "Remove the hook."),
    "generation-devices": NoteKind("its weights are on several devices"),
    # why an evaluation is not compiled
    "not-verified-yet": NoteKind("verify=True compiles nothing before the first training step is verified"),
    "cache-in-tuple": NoteKind(
        "it returns a tuple with a cache", "Pass use_cache=False, or leave out return_dict=False."
    ),
    "cache-read-late": NoteKind(
        "the cache of an evaluation was read when weights had changed: it was made with the new weights",
        "Read it before optimizer.step(), or pass use_cache=True to the evaluation.",
    ),
    # why a layer is not recorded
    "weights-of-several-processes": NoteKind(
        "several processes share the layers' weights, which are elsewhere at every call"
    ),
    "budgets-of-several-devices": NoteKind("layers are on several devices, each with a budget of its own"),
    # why TRL's function computes scores
    "fused-head-parameters": NoteKind("its parameters are not known in this version of TRL ({subject})"),
    "fused-head-without-function": NoteKind("its forward calls no function that is known"),
    "fused-head-computes-else": NoteKind("it computes something else than log-probabilities of a linear head"),
    "fused-head-not-compared": NoteKind("it could not be compared with ours ({subject})"),
    "fused-head-weight": NoteKind("the head's weight is a {subject}"),
    # why logits are computed
    "logits-computed": NoteKind(
        "logits are computed: {subject} uses them before the cross-entropy",
        "Compute the loss from the logits before they are used otherwise.",
    ),
    "logits-used-before-loss": NoteKind(
        "logits are read, or written to, before the loss, which then takes them as they are",
        "Compute the loss from the logits before they are used otherwise.",
    ),
    "logits-read-late": NoteKind(
        "logits of a step were read when the head's weights had changed: they were made of the new weights, and are "
        "computed at once since",
        "Read logits before optimizer.step(), or within the forward.",
    ),
    "head-eager": NoteKind("the head runs eagerly: {detail}"),
    "head-gathered": NoteKind("{subject} gathers its weight for each call, and {detail}"),
    "model-without-loss": NoteKind("the model computes no loss", "Give the model labels."),
    "head-no-linear": NoteKind("it is no linear"),
    "head-with-other-hooks": NoteKind("it has other hooks"),
    "head-in-fsdp1": NoteKind(
        "FullyShardedDataParallel (FSDP1) has its weight while the model's forward runs, and no longer: fully_shard "
        "(FSDP2) keeps it",
        "Use fully_shard (FSDP2).",
    ),
    "head-resharded": NoteKind(
        "FSDP2 gathers its weight for each call: fully_shard([norm, head], reshard_after_forward=False) keeps it "
        "for the "
        "loss",
        "Call fully_shard([norm, head], reshard_after_forward=False).",
    ),
    "logits-in-other-dtype": NoteKind("FSDP2 returns logits in another dtype", "Leave out output_dtype."),
    # what a head is that is no linear
    "head-is": NoteKind("the head is a {subject} {detail}"),
    "cannot-be-traced": NoteKind("which cannot be traced: {detail}"),
    "not-traced": NoteKind("which was not traced"),
    "keeps-results": NoteKind("that keeps what it computes"),
    "returns-more": NoteKind("that returns more than a product"),
    "adapter-with-dropout": NoteKind("whose adapter has dropout", "Leave dropout out of the head's adapter."),
    "several-weights": NoteKind("of several weights"),
    "no-linear": NoteKind("that is no linear, with or without an adapter"),
    "computed-weights": NoteKind("whose weights are computed"),
    "more-than-product": NoteKind("that does more than multiply"),
    "with-hooks": NoteKind("with hooks"),
    # what a loss does that is not computed without logits
    "two-tanh": NoteKind("two tanh in a row"),
    "softcap-not-positive": NoteKind("a tanh is scaled by a number that is not positive"),
    "bias-not-of-product": NoteKind("a bias is added to logits that were scaled or normalised"),
    "logits-of-another-kind": NoteKind("logits become whole numbers or other bits, or move to another device"),
    "no-step-to-loss": NoteKind("{subject} is no step from a head to its loss"),
    "logits-used-elsewhere": NoteKind("the logits are used elsewhere too"),
    "sizes-not-known": NoteKind("rows are sliced after they were reshaped to sizes that are not known"),
    "scale-not-constant": NoteKind("logits are scaled by a value that is no constant"),
    "slice-not-understood": NoteKind("logits are sliced in a way that is not understood"),
    "vocabulary-reshaped": NoteKind("the vocabulary is reshaped"),
    "log-probs-changed": NoteKind("log-probabilities are changed"),
    "log-probs-normalised-again": NoteKind("log-probabilities are normalised again"),
    "log-probs-in-fp64": NoteKind("log-probabilities are computed in torch.float64"),
    "nll-without-log-probs": NoteKind("nll_loss takes values that are no log-probabilities"),
    "class-weights": NoteKind("class weights, or a reduction by old names"),
    "not-one-class-a-row": NoteKind("labels are not one class a row"),
    "loss-in-dtype": NoteKind("the loss is computed in {detail}"),
    "rows-and-labels": NoteKind("rows and labels differ in number"),
    "row-loss-in-fp64": NoteKind("each row's loss is computed in torch.float64"),
}
