"""transformers' own tests that hold for every model, of a table of families: what its tests of one model are made from, without those of one model alone.

For suites.py, whose docstring has the commands: copied into the folder that transformers' sources were unpacked into, those of the version that is installed. Their tests
need the package `parameterized`. Sources of a release have the mixins in tests/, but neither tests/models nor the tests of generation and export. Models are
tests/support/zoo.py's with two layers; every one of a family's heads is tested.

Three of the tests are left out, since they cannot pass with optimized models: `test_training_gradient_checkpointing` and its two variants put a mock in the place of the
function that checkpoints a layer, and count how often that calls the layer. A layer that is compiled computes again inside of its compiled backward pass, and calls nothing.
`test_gradients`, which is not theirs, asks for what they are after: the same gradients with and without checkpointing, those of the model before it was optimized.
"""

from __future__ import annotations

import copy
import importlib
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from tests.support import zoo

THEIRS = (
    "tests_of_transformers"  #: what their folder `tests` is imported as: that name is taken by the repository's own
)
LEFT_OUT = {
    "exporters.test_export": "ExportTesterMixin",
    "generation.test_utils": "GenerationTesterMixin",
}  #: mixins that their release lacks and that others inherit from
ROWS, LENGTH = 3, 7
HEADS = (
    "Model",
    "ForCausalLM",
    "LMHeadModel",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMaskedLM",
    "ForConditionalGeneration",
)

SMALL = {**zoo.SMALL, "num_hidden_layers": 2, "vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

UNCOUNTABLE = tuple(
    f"test_training_gradient_checkpointing{variant}" for variant in ("", "_use_reentrant_false", "_use_reentrant_true")
)
WITHOUT = {
    "t5": ("ForSequenceClassification",)
}  #: heads that are not tested: this one reads at end tokens, and takes no embeddings

#: families that zoo.py has not, or that learn too slowly as it makes them, for their logits are divided: Cohere's by 16, Granite's by 4
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (
        "T5",
        {
            "d_model": 64,
            "d_ff": 128,
            "d_kv": 16,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 1.0}),
    "cohere2": ("Cohere2", {"logit_scale": 1.0}),
    "granite": ("Granite", {**zoo.NAMES["granite"][1], "logits_scaling": 1.0}),
    "modernbert": ("ModernBert", {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}),
}


def import_theirs() -> None:
    """Their folder of tests as a package; what it lacks is empty."""
    package = ModuleType(THEIRS)
    package.__path__ = [str(Path(__file__).parent / "tests")]
    sys.modules[THEIRS] = package
    for path, mixin in LEFT_OUT.items():
        folder = f"{THEIRS}.{path.partition('.')[0]}"
        sys.modules[folder] = ModuleType(folder)
        sys.modules[f"{THEIRS}.{path}"] = ModuleType(f"{THEIRS}.{path}")
        setattr(sys.modules[f"{THEIRS}.{path}"], mixin, type(mixin, (), {}))


class Tester:
    """What their mixins ask for a model, its inputs and its sizes."""

    __test__ = False
    is_training = True
    batch_size, seq_length = ROWS, LENGTH
    num_hidden_layers, hidden_size, num_attention_heads = (
        SMALL[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )

    def __init__(self, parent: unittest.TestCase, config: type, settings: dict[str, Any], trained: type):
        self.parent, self.config, self.settings, self.causal_lm_class = parent, config, settings, trained

    def get_config(self) -> Any:
        return self.config(**{**SMALL, **self.settings, "pad_token_id": SMALL["pad_token_id"]})

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        ids = torch.randint(3, config.vocab_size, (ROWS, LENGTH))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": torch.ones_like(ids)}
        return config, inputs


class Gradients:
    """Theirs only ask that a backward pass ends; this one that gradients are a model's own, with and without gradient checkpointing.

    A model is in training when it is made: it is optimized, if it is to be, by the call of `train()`.
    """

    def test_gradients(self) -> None:
        for kind in self.all_model_classes:
            with self.subTest(kind.__name__):
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                inputs = self._prepare_for_class(inputs, kind, return_labels=True)
                inputs["attention_mask"][0, -2:] = 0
                torch.manual_seed(0)
                model = kind(config)
                expected = gradients(copy.deepcopy(model), inputs)
                model.train()
                self.same(gradients(model, inputs), expected, "")
                for reentrant in (False, True) if model.supports_gradient_checkpointing else ():
                    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                    model.enable_input_require_grads()
                    self.same(gradients(model, inputs), expected, f"checkpointed, {reentrant=}")

    def same(self, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str) -> None:
        self.assertEqual(found.keys(), expected.keys(), where)
        for name, gradient in expected.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-3, atol=1e-5, msg=lambda said: f"{where} {name}: {said}"
            )


def gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    said = model(**inputs)
    loss = getattr(said, "loss", None)
    (said[0].square().mean() if loss is None else loss).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def tests_of(family: str, name: str, settings: dict[str, Any]) -> type[unittest.TestCase]:
    """A class of all tests, of every head that the family has."""
    common, training = (
        importlib.import_module(f"{THEIRS}.{module}") for module in ("test_modeling_common", "test_training_mixin")
    )
    config = getattr(transformers, f"{name}TextConfig" if family in ("gemma3", "llama4") else f"{name}Config")
    found = {
        head: getattr(transformers, candidate)
        for head in HEADS
        if head not in WITHOUT.get(family, ())
        for candidate in (f"{name}Text{head}", f"{name}{head}")
        if getattr(getattr(transformers, candidate, None), "config_class", None) is config
    }
    trained = next(
        (
            found[head]
            for head in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
            if head in found
        ),
        None,
    )
    able = any(model.can_generate() for model in found.values())
    bases = (
        Gradients,
        common.ModelTesterMixin,
        *([common.GenerationTesterMixin] if able else []),
        *([training.TrainingTesterMixin] if trained in (found.get("ForCausalLM"), found.get("LMHeadModel")) else []),
        unittest.TestCase,
    )

    def setUp(self: unittest.TestCase) -> None:
        torch.manual_seed(0)
        self.model_tester = Tester(self, config, settings, trained)

    # `model_tester` is abstract in one mixin and an attribute in the other
    return type(
        f"{name}Test",
        bases,
        {
            "all_model_classes": tuple(found.values()),
            "setUp": setUp,
            "model_tester": None,
            "is_encoder_decoder": family == "t5",
            "test_all_params_have_gradient": False,
            "__module__": __name__,
            **dict.fromkeys(UNCOUNTABLE),
        },
    )


import_theirs()
for family, (name, settings) in {**zoo.NAMES, **OTHERS}.items():
    globals()[f"{name}Test"] = tests_of(family, name, settings)
