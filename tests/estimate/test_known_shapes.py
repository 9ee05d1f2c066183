"""Plans of all known shapes, beside what is counted by hand from their modules."""

import pytest
from torch import nn

from tunecompile.estimate.known_shapes import SHAPES, is_mixture, shape_config
from tunecompile.estimate.meta_model import meta_model
from tunecompile.estimate.multi_gpu import Question, plan
from tunecompile.planner.datasheets import find_gpu

pytest.importorskip("peft")
LENGTH, RANK = 2048, 16
QUICK = [("mixture-tiny", "qlora")]
SLOW = [(name, mode) for name in SHAPES for mode in ("qlora", "lora", "full") if (name, mode) not in QUICK]


def multiplied(name: str, mode: str) -> int:
    """Weights that a token is multiplied by: of experts' stacks, the share that a token chooses. Adapters are left out."""
    config = shape_config(name).to_dict()
    chosen = next((config[key] for key in ("num_experts_per_tok", "top_k_experts") if config.get(key)), 0)
    counts = ("num_local_experts", "n_routed_experts", "num_experts")
    experts = next((config[key] for key in counts if config.get(key)), 1)
    total = 0
    for path, module in meta_model(name, mode, RANK).named_modules():
        if isinstance(module, nn.Linear):
            total += module.in_features * module.out_features * ("lora_" not in path)
        elif "lora_" not in path:
            stacks = [p for p in module.parameters(recurse=False) if p.dim() == 3 and len(p) == experts]
            total += sum(p.numel() * chosen // experts for p in stacks)
    return total


def attended(name: str) -> int:
    """Operations of attention in forward and backward at most: seven products, and nothing is masked."""
    config = shape_config(name).to_dict()
    heads = config["num_hidden_layers"] * config["num_attention_heads"]
    widest = max(config.get(key) or 0 for key in ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim"))
    return 7 * 2 * LENGTH**2 * heads * (widest or config["hidden_size"] // config["num_attention_heads"])


@pytest.mark.parametrize("name, mode", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_operations(name, mode):
    """Experts were multiplied in no time, where a template does it or torch's grouped product."""
    pytest.importorskip("triton")
    weights = multiplied(name, "full")
    least = (6 if mode == "full" else 4) * weights * LENGTH
    found = plan(Question(name, mode, 1, LENGTH, find_gpu("h100"))).flops
    assert found > least
    assert weights < 10**9 or found < 1.1 * least + attended(name)  # with adapters


@pytest.mark.parametrize("gpu, dtype", [("h100", "bfloat16"), ("t4", "float16")])
def test_what_full_training_holds(gpu, dtype):
    """The note said moments in fp32, where each is counted in the dtype of its weight, as torch's AdamW makes it."""
    report = plan(Question("llama-tiny", "full", 1, 64, find_gpu(gpu)))
    (held,) = report.engines
    assert held.optimizer == 2 * held.gradients and held.gradients == pytest.approx(held.weights, rel=0.01)
    (said,) = [str(each) for each in report.notes if each.code == "full-training-state"]
    assert dtype in said and "fp32" not in said


@pytest.mark.parametrize("name, mixed", [("gemma-4-e4b", False), ("gemma-4-26b-a4b", True), ("gpt-oss-20b", True)])
def test_a_dense_model_of_a_family_with_experts_is_no_mixture(name, mixed):
    """Its config has their fields."""
    assert is_mixture(shape_config(name)) == mixed
