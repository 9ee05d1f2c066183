"""Recorded steps on a GPU: real CUDA graphs, generated code, and 4-bit weights that are read packed."""

import copy

import pytest
import torch

import tunecompile
from tests.runtime.rollouts.calls import greedy, prompts
from tests.support import zoo
from tests.support.models import packed
from tunecompile.runtime.model_state import state_of
from tunecompile.runtime.parts import Rollouts

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def on_gpu(inputs):
    return {name: value.cuda() for name, value in inputs.items()}


def autocast():
    return torch.autocast("cuda", dtype=torch.bfloat16)


def loop_of(model):
    return state_of(model).part(Rollouts).loop


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "olmoe"])
def test_tokens_are_those_of_transformers(family):
    """In fp32, of several lengths and numbers of rows, with windows that are shorter than a row."""
    model = zoo.make(family).float().eval().cuda()
    ours = tunecompile.optimize(copy.deepcopy(model))
    for rows, length in ((3, 11), (4, 30), (1, 11)):
        inputs = on_gpu({name: value[:rows] for name, value in prompts(rows, length).items()})
        settings = greedy(max_new_tokens=40)
        assert torch.equal(ours.generate(**inputs, **settings), model.generate(**inputs, **settings)), (rows, length)
    loop = loop_of(ours)
    in_loops = family == "olmoe"  # in fp32 products of experts are a loop on the host, which no graph holds
    assert loop.calls == 3 and (loop.refused is not None) is in_loops, loop.notes()


def test_packed_weights_are_read_as_exactly_as_dequantised_ones():
    """QLoRA in bf16, as trainers have it: logits of each step, by the weights that the last optimizer step left."""
    shape = dict(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=3)
    model = zoo.adapt(zoo.quantize(zoo.make("llama", **shape).to(torch.bfloat16), torch.bfloat16)).eval().cuda()
    ours = tunecompile.optimize(copy.deepcopy(model))
    settings = greedy(return_dict_in_generate=True, output_logits=True, eos_token_id=None)
    for scale in (0.1, 0.3):
        for each in (model, ours):
            for name, parameter in each.named_parameters():
                if "lora_B" in name:
                    parameter.data.fill_(scale).mul_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter).cuda())
        with autocast():
            made = ours.generate(**on_gpu(prompts()), **settings)
        mask = torch.nn.functional.pad(on_gpu(prompts())["attention_mask"], (0, 20), value=1)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad(), autocast():
            scored = model(made.sequences, attention_mask=mask, position_ids=places).logits[:, 10:-1].float()
        then = torch.stack(made.logits, 1)
        assert (then - scored).norm() / scored.norm() < 2e-2
    with autocast(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ours.generate(**on_gpu(prompts()), **settings)
    launched = {event.key for event in profile.key_averages()}
    assert any("product_kernel" in name for name in launched), "\n".join(sorted(launched))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_have_rows_are_read_where_they_are(family):
    """Adapted NF4 stacks of Qwen3, dense ones of gpt-oss; each token goes to all experts, which no rounding changes."""
    shape = dict(hidden_size=256, intermediate_size=128, head_dim=64, num_hidden_layers=2)
    shape |= packed.SIZES[family] | ({"moe_intermediate_size": 128} if family == "qwen3_moe" else {})
    dense = zoo.make(family, **shape).to("cuda", torch.bfloat16).eval()
    model, dense = packed.pair_of(dense, packed.OVER, ["q_proj"]) if family == "qwen3_moe" else [zoo.adapt(dense)] * 2
    ours = tunecompile.optimize(copy.deepcopy(model).eval())
    settings = greedy(return_dict_in_generate=True, output_logits=True, eos_token_id=None)
    with autocast(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        made = ours.generate(**on_gpu(prompts()), **settings)
    mask = torch.nn.functional.pad(on_gpu(prompts())["attention_mask"], (0, 20), value=1)
    with torch.no_grad(), autocast():
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        scored = dense(made.sequences, attention_mask=mask, position_ids=places).logits[:, 10:-1].float()
    assert (torch.stack(made.logits, 1) - scored).norm() / scored.norm() < 2e-2
    launched = {event.key for event in profile.key_averages()}
    wanted = {"expert_rows_kernel", "part_kernel"}  # sinks among the queries' scores, too
    assert wanted <= {name for name in wanted if any(name in each for each in launched)}, "\n".join(sorted(launched))
