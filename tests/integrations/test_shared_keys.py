"""Which layers keep keys while they are compiled: where nobody can tell, all that could."""

import pytest
from torch import nn

import tunecompile
from tests.support import zoo
from tests.support.matrix.families import EMBEDDED
from tunecompile.integrations.shared_keys import KeptKeys
from tunecompile.runtime.attach import restore


def layers(*kinds, **more):
    """One for each word: its kind of attention, "k" for those that keep keys, "r" for those that read them."""
    made = []
    for kind in kinds:
        attention = nn.Module()
        attention.layer_type, attention.is_kv_shared_layer = kind[0], "r" in kind
        attention.store_full_length_kv = "k" in kind
        vars(attention).update(more)
        made.append(nn.Module())
        made[-1].attention = attention
    return made


def keep(made):
    return [layer.attention.store_full_length_kv for layer in made]


@pytest.mark.parametrize(
    "kinds, more, read",
    [
        ("s f s sk fk sr fr", {}, [False, False, False, True, True]),
        ("s sk s sr", {}, []),  # what a later one keeps would be read
        ("s f sk sr", {}, []),  # the same, of a kind that nobody reads now
        ("s sk", {}, []),
        ("s sk sr", {"kv_shared_layer_index": 1}, []),
    ],
)
def test_all_keep_keys_where_the_last_ones_are_read(kinds, more, read):
    made = layers(*kinds.split(), **more)
    before = keep(made)
    kept = KeptKeys(made)
    assert [*kept.read.values()] == read and keep(made) == ([True] * len(read) + before[len(read) :])
    kept.restore()
    assert keep(made) == before


def test_a_model_is_as_it_was_without_its_compiler():
    pytest.importorskip("transformers")
    model = zoo.make("gemma4", **{**EMBEDDED, "num_hidden_layers": 6, "layer_types": EMBEDDED["layer_types"][:2] * 3})
    before = [layer.self_attn.store_full_length_kv for layer in model.model.layers]
    tunecompile.optimize(model, executor="eager")
    assert model.model.layers[0].self_attn.store_full_length_kv is not before[0]
    restore(model)
    assert [layer.self_attn.store_full_length_kv for layer in model.model.layers] == before
