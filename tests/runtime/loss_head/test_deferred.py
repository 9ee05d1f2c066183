"""What is read of deferred logits: when it is made, and of which hidden states."""

import torch

from tests.support.heads import deferred, head_of, linear, states


def padded_logits():
    """(logits of hidden states that are zero at padding, the whole ones, how often these were asked for)."""
    whole, asked = states(), []
    dropped = whole.detach().clone()
    dropped[0, 3:] = 0
    head = head_of(linear(), padded=lambda: True, read=lambda hidden, autocast: asked.append(hidden) or whole)
    return deferred(head, dropped.requires_grad_()), whole, asked


def test_what_trains_reads_logits_of_whole_hidden_states():
    """Else it would train on the head of zeros, at each token of padding."""
    logits, whole, asked = padded_logits()
    found, expected = logits.sigmoid(), linear()(whole).sigmoid()
    torch.testing.assert_close(found, expected)
    assert len(asked) == 1
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), whole) for each in (found, expected)))


def test_a_metric_does_not_run_the_model_again():
    """It is of the step that ran; what stands at padding is none of its tokens."""
    logits, whole, asked = padded_logits()
    with torch.no_grad():
        found = logits.argmax(-1)
    assert torch.equal(found[1], linear()(whole).argmax(-1)[1]) and not asked
