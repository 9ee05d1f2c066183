"""Arguments for every kernel of the templates, as models call them: no values are needed, so no memory is touched."""

import contextlib
import functools
import sys

import torch


def templates():
    """All modules of templates that were imported."""
    return [module for name, module in list(sys.modules.items()) if name.startswith("tunecompile.templates")]


@contextlib.contextmanager
def launching(by):
    """Inside, templates launch by `by(kernel, grid, *args, **options)`."""
    known = {module: module.launch for module in templates() if hasattr(module, "launch")}
    for module in known:
        module.launch = by
    try:
        yield
    finally:
        for module, launch in known.items():
            module.launch = launch


def recorded(function, args):
    """The launches of a call: kernel, grid, arguments, constants."""
    launches = []
    with launching(lambda kernel, grid, *args, **options: launches.append((kernel, grid, args, options))):
        function(*args)
    return launches


def cases(many=1, batch=1, device="cpu"):
    """name -> (function, arguments as a list of tensors), each of one launch: all of `axes`, and of each kernel that is
    not among them the first launch of an op's example, with `many` times the tokens.
    """
    found = axes(many, batch, device)
    on_meta = found if torch.device(device).type == "meta" else axes(device="meta")
    known = {launch[0] for case in on_meta.values() for launch in recorded(*case)}
    for name, run in examples(many):
        for number, (kernel, _, given, _) in enumerate(recorded(run, ())):
            if kernel not in known:
                known.add(kernel)
                tensors = [each for each in given if isinstance(each, torch.Tensor)]
                found[f"example_{name}_{number}"] = functools.partial(alone, run, number), tensors
    return found


def examples(many):
    """(name, call) of each provider of an op that launches a template, by the op's example at a real size."""
    import tunecompile.ops  # noqa: F401
    from tunecompile.ir.eager_call import outputs, run_provider
    from tunecompile.ir.example import Draw, arguments_of
    from tunecompile.ir.op import OPS
    from tunecompile.passes.plan.probe import BY_TEMPLATE

    draw = Draw(torch.device("meta"), torch.bfloat16, 64 * many, 4096)
    for op in OPS.values():
        for provider in (each for each in op.providers if each.name in BY_TEMPLATE):
            with contextlib.suppress(NotImplementedError):  # its reference reads values
                given = arguments_of(op, draw)
                if given is not None:
                    used = (True,) * len(outputs(op.reference(*given)))
                    yield op.name, functools.partial(run_provider, provider.run, given, used)


def alone(run, number, *tensors):
    """One launch of a call, with these tensors."""
    from tunecompile.templates import _launch

    (kernel, grid, args, options), given = recorded(run, ())[number], iter(tensors)
    _launch.launch(kernel, grid, *(next(given) if isinstance(each, torch.Tensor) else each for each in args), **options)


def axes(many=1, batch=1, device="cpu"):
    """name -> (function, arguments as a list of tensors). Representative axes, each template at a real size.

    `many` multiplies tokens, and makes weights and experts larger, too; `batch` is the number of rows of recurrences.
    """
    from tunecompile.templates import (
        adapters,
        cross_entropy,
        eight_bits,
        experts,
        int8_product,
        lora,
        lora_mlp,
        mxfp4,
        nf4,
        norms,
        swiglu,
    )
    from tunecompile.templates.attention import backward_pass as attention_backward
    from tunecompile.templates.attention import causal_softmax, one_query
    from tunecompile.templates.attention import forward_pass as attention
    from tunecompile.templates.few_rows import experts as few_experts
    from tunecompile.templates.few_rows import launches as few_rows
    from tunecompile.templates.recurrent import selective_scan
    from tunecompile.templates.recurrent.channel_rule import backward_pass as channel_backward
    from tunecompile.templates.recurrent.channel_rule import chunks as channel_chunks
    from tunecompile.templates.recurrent.channel_rule import forward_pass as channel_forward
    from tunecompile.templates.recurrent.channel_rule import gradients as channel_gradients
    from tunecompile.templates.recurrent.delta_rule import backward_pass as delta_backward
    from tunecompile.templates.recurrent.delta_rule import chunks as delta_chunks
    from tunecompile.templates.recurrent.delta_rule import forward_pass as delta_forward
    from tunecompile.templates.recurrent.delta_rule import gradients as delta_gradients
    from tunecompile.templates.recurrent.operands import Operands, States

    rows, choices, length = 64 * many, 512 * many, 200 * many
    weight, experts_of = max(many >> 7, 1) * 1024, max(many >> 8, 1) * 128
    inner = 2048 if many == 1 else 512  # of experts in 4 bits, whose blocks are counted in 32 bits
    sibling, siblings = max(weight >> 3, 1024), 3 if many == 1 else 1
    chunks, parts = (length + 63) // 64, (length + 31) // 32

    def e(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device=device)

    def packed(n, k):
        blocks = n * k // 64
        return [
            e(n * k // 2, 1, dtype=torch.uint8),
            e(blocks, dtype=torch.uint8),
            e(256, dtype=torch.float32),
            e(blocks // 256, dtype=torch.float32),
            e(dtype=torch.float32),
        ]

    def nested(function, *extra, **options):
        def call(p, a, code, scale, offset, *rest):
            return function(
                p,
                a,
                (weight, 4096),
                torch.bfloat16,
                *rest,
                absmax_code=code,
                absmax_scale=scale,
                absmax_offset=offset,
                **options,
            )

        return call, packed(weight, 4096) + list(extra)

    whole, scale = dict(dtype=torch.int8), dict(dtype=torch.float32)
    factors = [e(rows, 4096, **whole), e(rows, 1, **scale), e(weight, 4096, **whole), e(weight, **scale)]

    def to_8_bits(transposed, dtype=torch.float8_e4m3fn, by_column=False):
        def call(out, scales, p, a, code, scale, offset):
            return eight_bits.write_nf4(
                p,
                a,
                (weight, 4096),
                scales,
                out,
                transposed=transposed,
                by_column=by_column,
                absmax_code=code,
                absmax_scale=scale,
                absmax_offset=offset,
            )

        height, width = (4096, weight + 48) if transposed else (weight, 4144)
        return call, [
            e(height, width, dtype=dtype),
            e(1, weight if by_column else height, dtype=torch.float32),
            *packed(weight, 4096),
        ]

    def piece(d, gate_up, y, xa, parts):
        both = torch.cat([gate_up, gate_up.new_zeros(rows, 64)], 1)
        lora_mlp.backward_of_piece(d, both[:, :28672], y, xa, (16, 16), "silu", parts, both)
        return both

    def product(x, order, weight, inner, up, table, offsets):
        return experts.rows(x, weight, offsets, table, choices, turned=True, order=order, choices=8, inner=inner, up=up)

    def by_channel(function, *rest):
        """A step of the rule with decays of channels, from values within chunks."""

        def call(total, through, keys, squares, values, rates, numbers, *given):
            call = Operands(keys, keys, values, keys, rates, None, numbers, 0.1, grad=values)
            made = channel_chunks.Chunks(total, keys, keys, through, squares, squares, squares, keys, values)
            return function(call, made, *given)

        through = e(batch, chunks, 32, 128, dtype=torch.float32)
        return call, [sums_of_keys, through, keys, e(batch, length, 32, 64), values, rates, numbers, *rest]

    def delta(function, *rest):
        """A step of the rule under documents, from values within chunks."""

        def call(q, k, v, g, beta, ends, numbers, total, squares, *given):
            call = Operands(q, k, v, g, beta, ends, numbers, 0.1, grad=v)
            return function(call, delta_chunks.Chunks(total, squares, v, v), *given)

        total = e(batch, 32, 64 * chunks, dtype=torch.float32)
        return call, [*heads, sums, rates, ends, numbers, total, e(batch, length, 32, 64), *rest]

    heads, values, rates = (
        [e(batch, length, 16, 128), e(batch, length, 16, 128), e(batch, length, 32, 128)],
        e(batch, length, 32, 128),
        e(batch, length, 32),
    )
    ends, numbers, sums = (
        e(5, dtype=torch.int32),
        e(length, dtype=torch.int32),
        e(batch, length, 32, dtype=torch.float32),
    )
    keys, walked = e(batch, length, 32, 128), e(batch, chunks, 32, 128, 128)
    sums_of_keys = e(batch, 64 * chunks, 32, 128, dtype=torch.float32)
    scores = e(2 * many, 64, 2048, dtype=torch.float32)  # of two heads' 32 queries each
    documents, level = [e(rows, 16, 256), e(rows, 8, 256), e(rows, 8, 256)], e(16, rows, dtype=torch.float32)
    tree = e(2, ends.shape[0] - 1, dtype=torch.int32), e(rows, dtype=torch.int32)
    order, offsets, table = (
        e(choices, dtype=torch.int64),
        e(experts_of, dtype=torch.int32),
        e(experts_of + choices // 128 + 1, 4, dtype=torch.int32),
    )
    tokens, stack, xa, ups = e(rows, 2048), e(experts_of, 1536, 2048), e(choices, 16), e(experts_of, 16, 1536)
    labels = e(8 * many, dtype=torch.int64)
    wide_x, wide_dt, wide_a = e(batch, length, 1024), e(batch, length, 1024), e(1024, 16, dtype=torch.float32)
    spaces, wide_b, total = (
        e(batch, parts, 1024, 16, dtype=torch.float32),
        e(batch, length, 16),
        e(batch, parts, 1024, dtype=torch.float32),
    )
    scan = [wide_x, wide_dt, wide_a, wide_b, wide_b]
    q = e(2 * many, 64, 32, 128).transpose(1, 2)
    w, x, wide = e(4096), e(rows, 4096), e(rows, 2 * 14336)
    gate, up = wide[:, :14336], wide[:, 14336:]
    return {
        "nf4": nested(nf4.dequantize),
        "nf4_siblings": (
            lambda p, a, code, scale, offset, b: nf4.dequantize_siblings(
                [nf4.Weight(p, a, code, scale, offset, sibling)] * 3,
                4096,
                e(3 * sibling, 4160),
                [nf4.Adapter(b, 2.0, 16 * i) for i in range(3)],
            ),
            packed(sibling, 4096) + [e(sibling, 16, dtype=torch.float32)],
        ),
        "mxfp4": (
            lambda p, s: mxfp4.dequantize(p, s, (weight, 4096), torch.bfloat16),
            [e(weight, 2048, dtype=torch.uint8), e(weight, 128, dtype=torch.uint8)],
        ),
        "fp8_quantize": (
            lambda x, extra: eight_bits.quantize_rows(x, extra, 4096 + 48),
            [x, e(rows, 16, dtype=torch.float32)],
        ),
        "fp8_quantize_wide": (lambda x: eight_bits.quantize_rows(x, None, 28672), [e(8 * many, 28672)]),
        "fp8_adapter": (
            lambda m, b: eight_bits.begin_weight(m, b, 4 * weight, 4096, 4096 + 64),
            [e(dtype=torch.float32), e(4 * weight, 16, dtype=torch.float32)],
        ),
        "fp8_dense": (
            lambda w, s, out: eight_bits.write_dense(w, s, out),
            [e(weight, 4096), e(1, weight, dtype=torch.float32), e(weight, 4144, dtype=torch.float8_e4m3fn)],
        ),
        "fp8_dense_transposed": (
            lambda w, s, out: eight_bits.write_dense(w.t(), s, out),
            [e(weight, 4096), e(1, 4096, dtype=torch.float32), e(4096, weight + 16, dtype=torch.float8_e4m3fn)],
        ),
        "fp8_nf4": to_8_bits(transposed=False),
        "fp8_nf4_transposed": to_8_bits(transposed=True),
        "int8_quantize": (
            lambda x, f: eight_bits.quantize_rows(x, None, 4096, torch.int8, f),
            [x, e(4096, dtype=torch.float32)],
        ),
        "int8_nf4": to_8_bits(False, torch.int8),
        "int8_nf4_transposed": to_8_bits(True, torch.int8, by_column=True),
        "int8_product": (
            lambda a, of_a, b, of_b, xa, adapter: int8_product.product(a, of_a, b, of_b, xa, adapter, torch.bfloat16),
            [*factors, e(rows, 48, dtype=torch.float32), e(weight, 48, dtype=torch.float32)],
        ),
        "int8_product_plain": (
            lambda a, of_a, b: int8_product.product(a, of_a, b, None, None, None, torch.float16),
            factors[:3],
        ),
        "cross_entropy": (lambda z, y: cross_entropy.loss_and_grad_(z, y), [e(8 * many, 128256), labels]),
        "cross_entropy_all": (
            lambda z, y: cross_entropy.loss_and_grad_(z, y, softcap=30.0, label_smoothing=0.1),
            [e(8 * many, 49152), labels],
        ),
        "cross_entropy_rows": (
            lambda z, y, f: cross_entropy.loss_and_grad_(z, y, factors=f),
            [e(8 * many, 128256), labels, e(8 * many, dtype=torch.float32)],
        ),
        "cross_entropy_statistics": (
            lambda z, y, f: cross_entropy.statistics_and_grad_(
                z, y, cross_entropy.STATISTICS, factors=f, entropy_factors=f, softcap=30.0
            ),
            [e(8 * many, 151936), labels, e(8 * many, dtype=torch.float32)],
        ),
        "rms_norm_backward": (
            lambda g, x, w, r: norms.backward(g, x, w, centred=False, round_first=True, residual_grad=r, sums=1),
            [x, x, w, x],
        ),
        "rms_norm_wide": (
            lambda g, x, w: norms.backward(g, x, w, centred=False),
            [e(8 * many, 28672), e(8 * many, 28672), e(28672)],
        ),
        "rms_norm_heads": (
            lambda g, x, w: norms.backward(g, x, w, offset=1.0, centred=False),
            [q, q, e(128)],
        ),
        "attention": (
            lambda *given: attention.forward(*given, max(rows // 2, 512), 0.06, 128, 50.0),
            [*documents, ends],
        ),
        "attention_dropped": (
            lambda *given: attention.forward(
                *given[:-1], max(rows // 2, 512), 0.06, causal=False, dropped=(0.1, given[-1])
            ),
            [*(each[..., :64].contiguous() for each in documents), ends, e(1, dtype=torch.int64)],
        ),
        **{
            f"attention_dropped_{name}": (
                lambda *given, back=back: back(
                    *given[:-1], max(rows // 2, 512), 0.06, causal=False, dropped=(0.1, given[-1])
                ),
                [
                    *(each[..., :64].contiguous() for each in (documents[0], *documents)),
                    *(level, level, ends, e(1, dtype=torch.int64)),
                ],
            )
            for name, back in (
                ("keys", attention_backward.gradients_of_keys),
                ("queries", attention_backward.gradients_of_queries),
            )
        },
        "attention_wide": (
            lambda *given: attention.forward(*given, max(rows // 2, 512), 0.06),
            [e(rows, 8, 512), e(rows, 1, 512), e(rows, 1, 512), ends],
        ),
        **{
            f"attention_{name}": (
                lambda *given, back=back: back(*given, max(rows // 2, 512), 0.06, 0, 50.0),
                [documents[0], *documents, level, level, ends],
            )
            for name, back in (
                ("keys", attention_backward.gradients_of_keys),
                ("queries", attention_backward.gradients_of_queries),
            )
        },
        "attention_branches": (
            lambda q, k, v, ends, *tree: attention.forward(
                *(q, k, v, ends, max(rows // 2, 512), 0.06, 128), tree=tree[0], places=tree[1]
            ),
            [*documents, ends, *tree],
        ),
        **{
            f"attention_branches_{name}": (
                lambda *given, back=back: back(
                    *given[:-2], max(rows // 2, 512), 0.06, 0, 50.0, tree=given[-2], places=given[-1]
                ),
                [documents[0], *documents, level, level, ends, *tree],
            )
            for name, back in (
                ("keys", attention_backward.gradients_of_keys),
                ("queries", attention_backward.gradients_of_queries),
            )
        },
        "causal_softmax": (lambda scores: causal_softmax.softmax(scores, 2016, 32, 0.06, torch.bfloat16), [scores]),
        "causal_softmax_backward": (
            lambda *given: causal_softmax.softmax_backward(*given, 2016, 32, 0.06, torch.bfloat16),
            [scores, scores, scores[..., 0].contiguous(), scores[..., 0].contiguous()],
        ),
        "layer_norm_backward": (
            lambda g, x, w, r: norms.backward(g, x, w, residual_grad=r, sums=2),
            [x, x, w, x],
        ),
        "modulated_norm_backward": (
            lambda g, x, w, r: norms.backward(g, x, w, offset=1.0, residual_grad=r, sums=2),
            [x, x, e(4, 3 * 4096)[:, :4096], x],
        ),
        "modulated_rms_norm_backward": (
            lambda g, x, w: norms.backward(g, x, w, offset=1.0, centred=False, sums=2),
            [x, x, e(4, 4096)],
        ),
        "swiglu": (lambda g, u: swiglu.forward(g, u), [gate, up]),
        "lora_rows": (
            lambda a, out: lora.append_rows(a, out, 4),
            [e(weight, 4096, dtype=torch.float32), e(weight + 4, 4096)],
        ),
        "lora_columns": (
            lambda xa, out: lora.append_columns(xa, out, 4096),
            [e(rows, 16, dtype=torch.float32), e(rows, 4112)],
        ),
        "lora_beside": (lambda x, xa, out: lora.write_beside(x, xa, out), [x, e(rows, 32), e(rows, 4160)]),
        "lora_mlp_piece": (
            piece,
            [gate, wide, e(rows, 16), e(rows, 32), e(max(rows // 512, 1), 3, 16, 14336, dtype=torch.float32)],
        ),
        "few_rows_begin": (
            lambda x, p, absmax, code, scale, offset, a: few_rows.begin(
                x, x, [nf4.Weight(p, absmax, code, scale, offset, weight)] * siblings, [a] * siblings
            ),
            [e(8, 4096), *packed(weight, 4096), e(16, 4096, dtype=torch.float32)],
        ),
        "few_rows_dense": (
            lambda x, w: few_rows.begin(
                x, x, [nf4.Weight(w, None, None, None, None, weight)] * siblings, [], quant_type="dense"
            ),
            [e(8, 4096), e(weight, 4096)],
        ),
        "few_rows_experts": (
            lambda x, p, absmax, code, scale, offset, ends, xa, b: few_experts.rows(
                x, nf4.Weight(p, absmax, code, scale, offset, experts_of * 1536), ends, xa=xa, b=b
            ),
            [
                e(choices, inner),
                *packed(experts_of * 1536, inner),
                offsets,
                e(8, choices, 16, dtype=torch.float32),
                e(1536, 16 * experts_of, dtype=torch.float32),
            ],
        ),
        "few_rows_experts_mxfp4": (
            lambda x, p, exponents, ends, bias: few_experts.rows(
                x, nf4.Weight(p, exponents, None, None, None, experts_of * 1536), ends, quant_type="mxfp4", bias=bias
            ),
            [
                e(choices, 2048),
                *(e(experts_of * 1536 * 2048 // each, dtype=torch.uint8) for each in (2, 32)),
                *(offsets, e(experts_of, 1536)),
            ],
        ),
        "few_rows_experts_dense": (
            lambda x, w, ends: few_experts.rows(
                x, nf4.Weight(w, None, None, None, None, experts_of * 1536), ends, quant_type="dense"
            ),
            [e(choices, 2048), stack, offsets],
        ),
        "few_rows_downs": (
            few_experts.downs,
            [e(choices, 2048), e(16 * experts_of, 2048, dtype=torch.float32), offsets],
        ),
        "few_rows_finish": (
            lambda parts, xa, b: few_rows.finish(parts, xa, [b] * 3, [2.0, 2.0, 1.0], torch.bfloat16),
            [e(8, 8, 3 * weight, dtype=torch.float32), e(8, 8, 48, dtype=torch.float32), e(weight, 16)],
        ),
        "one_query_split": (
            lambda q, k, v, mask: one_query.split(q, k, v, mask, 0.1),
            [e(8, 32, 1, 128), *[e(8, 8, 10 * rows, 128)] * 2, e(8, 1, 1, 10 * rows, dtype=torch.bool)],
        ),
        "one_query_split_added": (
            lambda q, k, v, mask: one_query.split(q, k, v, mask, 0.1, 50.0),
            [e(8, 32, 1, 128), *[e(8, 8, 10 * rows, 128)] * 2, e(8, 1, 1, 10 * rows)],
        ),
        "one_query_combine": (
            lambda sums, tops, v, mask, sinks: one_query.combine(sums, tops, v, mask, sinks),
            [
                *(e(8, 8, 8, *shape, dtype=torch.float32) for shape in ((4, 128), (2, 4))),
                *(e(8, 8, 10 * rows, 128), e(8, 1, 1, 10 * rows), e(32)),
            ],
        ),
        "lora_mlp": (
            lambda d, gu, y, xa: lora_mlp.backward(d, gu, y, xa, (16, 16), width=28736),
            [gate, wide, e(rows, 16), e(rows, 32)],
        ),
        "experts_tiles": (lambda offsets, like: experts.tiles(offsets, choices, like), [offsets, tokens]),
        "experts_rows": (product, [tokens, order, stack, xa, ups, table, offsets]),
        "experts_input": (
            lambda grad, stack, table, offsets: experts.rows(grad, stack, offsets, table, choices, turned=False),
            [e(choices, 1536), stack, table, offsets],
        ),
        "experts_narrow": (
            lambda x, a, table, offsets: experts.rows(x, a, offsets, table, choices, turned=True),
            [e(choices, 2048), e(experts_of, 16, 2048), table, offsets],
        ),
        "experts_outer": (
            lambda xa, x, order, offsets: experts.outer(xa, x, offsets, order=order, choices=8),
            [xa, tokens, order, offsets],
        ),
        "experts_collect": (
            lambda y, places: experts.collect(y, places, 8, torch.float32),
            [e(choices, 2048), order],
        ),
        "adapters_project": (adapters.project, [e(choices, 2112)[:, :2048], e(2048, 48, dtype=torch.float32)]),
        "adapters_reduce": (
            lambda x, u: adapters.reduce(x, u),
            [e(choices, 2112)[:, :2048], e(choices, 48, dtype=torch.float32)],
        ),
        "experts_zero_idle": (experts.zero_idle, [e(experts_of, 768, 2048), offsets]),
        "experts_zero_behind": (experts.zero_behind, [e(choices, 2048), offsets]),
        "scan_ends": (
            lambda x, dt, a, b, c, numbers: selective_scan.chunk_ends(x, dt, a, b, numbers),
            [*scan, numbers],
        ),
        "scan_ends_reverse": (
            lambda x, dt, a, b, c, numbers: selective_scan.chunk_ends(x, dt, a, c, numbers, True),
            [*scan, numbers],
        ),
        "scan_starts": (
            lambda states, total, a, numbers, last: selective_scan.starts(states, total, a, numbers, length, last),
            [spaces, total, wide_a, numbers, spaces[:, 0]],
        ),
        "scan_outputs": (selective_scan.outputs, [*scan, numbers, spaces]),
        "scan_gradients": (
            lambda g, x, dt, a, b, c, numbers, states, ahead: selective_scan.gradients(
                g, x, dt, a, b, c, numbers, states, ahead
            ),
            [wide_x, *scan, numbers, spaces, spaces],
        ),
        "channel_sums": by_channel(lambda call, made: channel_chunks.sums(call)),
        "channel_prepare": by_channel(lambda call, made: channel_chunks.prepare(call, made.total)),
        "channel_scan": by_channel(channel_forward.scan),
        "channel_outputs": by_channel(
            lambda call, made, state: channel_forward.outputs(call, made, States(made.u, state, state)), walked
        ),
        "channel_scan_back": by_channel(channel_backward.scan_back, walked[:, 0]),
        "channel_products": by_channel(lambda call, made: channel_gradients.products(call, made, made.u, made.u)),
        "channel_operands": by_channel(
            lambda call, made, state, to_rate: channel_gradients.operands(
                call, made, States(made.u, state, state), state, (made.scores,) * 2, made.u, to_rate
            ),
            walked,
            sums,
        ),
        "delta_prepare": delta(lambda call, made: delta_chunks.prepare(call)),
        "delta_scan": delta(delta_forward.scan),
        "delta_outputs": delta(
            lambda call, made, state: delta_forward.outputs(call, made, States(made.u, state, state)), walked
        ),
        "delta_pending": delta(lambda call, made: delta_backward.pending(call, made.total)),
        "delta_scan_back": delta(
            lambda call, made, final: delta_backward.scan(call, made, made.u, final),
            e(batch, 32, 128, 128, dtype=torch.float32),
        ),
        "delta_products": delta(lambda call, made: delta_gradients.products(call, made, made.u, made.u)),
        "delta_operands": delta(
            lambda call, made, state, to_total, to_rate: delta_gradients.operands(
                call, made, States(made.u, state, state), state, (made.inverse,) * 2, made.u, to_total, to_rate
            ),
            walked,
            *(e(batch, length, 32, dtype=torch.float32) for _ in range(2)),
        ),
        "swiglu_backward": (lambda d, g, u: swiglu.backward(d, g, u, "gelu_tanh"), [gate, gate, up]),
    }
