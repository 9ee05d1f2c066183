"""Other packages in the process: what an import brings in, and that nothing of theirs is assigned to."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.models.pairs import attending, checkpoint, optimized

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def run(code: str, folder) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_importing_is_light(tmp_path):
    """Beside torch's own compiler, which brings triton where there is one, nothing heavy comes in."""
    code = """
import sys, torch, torch._dynamo.backends.common, torch._inductor.decomposition, torch._inductor.custom_graph_pass, torch._functorch.partitioners
before = set(sys.modules)
import tunecompile
heavy = ("transformers", "peft", "trl", "triton", "bitsandbytes", "accelerate", "tunecompile.templates")
print(sorted(name for name in set(sys.modules) - before if name.startswith(heavy)))
"""
    assert run(code, tmp_path) == "[]"


@pytest.mark.slow
def test_imported_before_everything_else(tmp_path):
    code = """
import tunecompile
import peft, transformers
from tests.support import zoo
from tests.support.models.pairs import attending
model, reference = zoo.adapt(attending()), zoo.adapt(attending())
(loss, mine), (expected, exact) = zoo.step(tunecompile.optimize(model, executor="eager"), zoo.batch()), zoo.step(reference, zoo.batch())
print(abs(loss - expected).item() < 1e-4 and max(zoo.errors(mine, exact).values()) < 1e-4 and tunecompile.report(model).compiles > 0)
"""
    assert run(code, tmp_path) == "True"


def test_nothing_of_another_package_is_assigned_to():
    import peft.tuners.lora.layer
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    import transformers.models.llama.modeling_llama

    def attributes(module) -> dict:
        return {key: id(value) for key, value in vars(module).items()}

    def snapshot() -> dict:
        seen = {
            m.__name__: attributes(m)
            for m in (
                torch.nn.functional,
                nn,
                nn.Module,
                nn.Linear,
                torch.Tensor,
                torch.utils.checkpoint,
                transformers.models.llama.modeling_llama,
                peft.tuners.lora.layer,
            )
        }
        seen |= {
            cls.__qualname__: attributes(cls)
            for cls in (
                transformers.LlamaForCausalLM,
                transformers.models.llama.modeling_llama.LlamaRMSNorm,
                peft.tuners.lora.layer.Linear,
            )
        }
        seen |= {
            c.__name__: copy.deepcopy(c.get_config_copy())
            for c in (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
        }
        return seen

    model = zoo.adapt(attending())
    zoo.step(model, zoo.batch())  # what others do lazily at their first step
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1, requires_grad=True))
    before = snapshot()
    optimized(model)
    zoo.step(model, zoo.batch())
    checkpoint(model, use_reentrant=False)
    zoo.step(model, zoo.batch())
    after = snapshot()
    changed = {name: {key for key in before[name] if before[name][key] != after[name].get(key)} for name in before}
    assert not {name: keys for name, keys in changed.items() if keys}


def test_decoding_is_compiled_once_by_who_compiles_it():
    """`generate` with a static cache compiles the model's forward: nothing that changes from call to call may be read."""
    from transformers import StaticCache

    plain = zoo.adapt(attending())
    model = tunecompile.optimize(copy.deepcopy(plain), executor="eager", memory="64GiB")
    zoo.step(model, zoo.batch())
    model.eval(), plain.eval()
    graphs, prompt = [], zoo.batch()["input_ids"]

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def decoded(model, call):
        cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + 8)
        made = [model(prompt, past_key_values=cache, use_cache=True).logits]
        for place in range(4):
            at = torch.tensor([[prompt.shape[1] + place]] * len(prompt))
            made.append(
                call(prompt[:, place : place + 1], position_ids=at, past_key_values=cache, use_cache=True).logits
            )
        return torch.cat(made, 1)

    with torch.no_grad():
        expected, made_by_ours = decoded(plain, plain), decoded(model, torch.compile(model, backend=backend))
    torch.testing.assert_close(made_by_ours, expected)
    assert len(graphs) == 1
