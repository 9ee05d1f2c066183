"""Trees of documents, and the rows that they stand for."""

import torch

#: parents and lengths of nodes, depth first: branches of several depths, an empty node, a lone row, what fills up
TREE = ((-1, 5), (0, 3), (0, 70), (2, 2), (2, 1), (-1, 4), (-1, 0), (-1, 9), (7, 6))


def tree_of(nodes, device="cpu"):
    """(offsets, tree, places), as ops take them."""
    starts = [0]
    for _, length in nodes:
        starts.append(starts[-1] + length)
    ends, begins = starts[1:], []
    for node, (parent, length) in enumerate(nodes):
        begins.append(0 if parent < 0 else begins[parent] + nodes[parent][1])
        above = parent
        while above >= 0:
            ends[above] = max(ends[above], starts[node + 1])
            above = nodes[above][0]
    places = [begin + at for begin, (_, length) in zip(begins, nodes) for at in range(length)]
    tree = [[parent for parent, _ in nodes], ends]
    return (torch.tensor(each, dtype=torch.int32, device=device) for each in (starts, tree, places))


def rows_of(nodes):
    """For each node, the tokens of its path from the root: its own come last."""
    starts, paths = [0], []
    for parent, length in nodes:
        own = list(range(starts[-1], starts[-1] + length))
        paths.append((paths[parent] if parent >= 0 else []) + own)
        starts.append(starts[-1] + length)
    return paths


def dense(q, k, v, nodes, scale, window=0, softcap=0.0, sinks=None):
    """(out, logsumexp) node by node, each with all that its tokens see in their row."""
    outs, sums = [], []
    for (_, length), path in zip(nodes, rows_of(nodes)):
        keys = torch.tensor(path, dtype=torch.long, device=q.device)
        q1 = q[keys[len(path) - length :]].transpose(0, 1)
        k1, v1 = (x[keys].repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
        scores = q1 @ k1.mT * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        place = torch.arange(len(path), device=q.device)
        back = place[len(path) - length :, None] - place
        scores = scores.masked_fill(~((back >= 0) & (back < (window or len(path) + 1))), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1)
        outs.append((scores.softmax(-1)[..., : len(path)] @ v1).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)
