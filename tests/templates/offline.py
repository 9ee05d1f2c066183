"""Launches of every template, recorded with fake arguments: for what can be checked of the kernels without a GPU.

Run as a script, in a process without TRITON_INTERPRET (the interpreter replaces triton.jit): ``offline.py compile 90 100``
prints a JSON line for each kernel compiled for sm_90 and sm_100, ``offline.py trace`` one for each launch function traced as
Inductor's passes trace it.
"""

import json
import re
import sys

import torch


def cases(
    nf4,
    mxfp4,
    cross_entropy,
    rms_norm,
    swiglu,
    lora,
    lora_mlp,
    fp8,
    experts,
    delta_chunks,
    delta_forward,
    delta_backward,
    delta_gradients,
    layer_norm,
    attention,
    attention_backward,
):
    """name -> (function, arguments as a list of tensors). Representative axes, each template at a real size."""

    def e(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype)

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
                (1024, 4096),
                torch.bfloat16,
                *rest,
                absmax_code=code,
                absmax_scale=scale,
                absmax_offset=offset,
                **options,
            )

        return call, packed(1024, 4096) + list(extra)

    def to_fp8(transposed):
        def call(out, scales, p, a, code, scale, offset):
            return fp8.write_nf4(
                p,
                a,
                (1024, 4096),
                scales,
                out,
                transposed=transposed,
                absmax_code=code,
                absmax_scale=scale,
                absmax_offset=offset,
            )

        rows, width = (4096, 1072) if transposed else (1024, 4144)
        return call, [e(rows, width, dtype=torch.float8_e4m3fn), e(1, rows, dtype=torch.float32), *packed(1024, 4096)]

    def piece(d, gate_up, y, xa, parts):
        both = torch.cat([gate_up, gate_up.new_zeros(64, 64)], 1)
        lora_mlp.backward_of_piece(d, both[:, :28672], y, xa, (16, 16), "silu", parts, both)
        return both

    def product(x, order, weight, inner, up, table, offsets):
        return experts.rows(x, weight, offsets, table, 512, turned=True, order=order, choices=8, inner=inner, up=up)

    def forward():
        total, square, state = e(1, 32, 256, dtype=torch.float32), e(1, 200, 32, 64), e(1, 4, 32, 128, 128)
        final, values = e(1, 32, 128, 128, dtype=torch.float32), e(1, 200, 32, 128)
        return delta_chunks.Chunks(total, square, values, values), delta_forward.States(values, state, final)

    def delta(function, *rest):
        """A step of the rule's backward, under documents."""

        def call(q, k, v, beta, ends, numbers, *given):
            made = delta_gradients.Operands(v, q, k, v, beta, ends, numbers, 0.1)
            return function(made, *given)

        return call, [*heads, rates, ends, numbers, *rest]

    heads, values, rates = (
        [e(1, 200, 16, 128), e(1, 200, 16, 128), e(1, 200, 32, 128)],
        e(1, 200, 32, 128),
        e(1, 200, 32),
    )
    ends, numbers, sums = e(5, dtype=torch.int32), e(200, dtype=torch.int32), e(1, 200, 32, dtype=torch.float32)
    documents, level = [e(64, 16, 256), e(64, 8, 256), e(64, 8, 256)], e(16, 64, dtype=torch.float32)
    order, offsets, table = e(512, dtype=torch.int64), e(128, dtype=torch.int32), e(133, 4, dtype=torch.int32)
    tokens, stack, xa, ups = e(64, 2048), e(128, 1536, 2048), e(512, 16), e(128, 16, 1536)
    labels = e(8, dtype=torch.int64)
    q = e(2, 64, 32, 128).transpose(1, 2)
    w, x, wide = e(4096), e(64, 4096), e(64, 2 * 14336)
    gate, up = wide[:, :14336], wide[:, 14336:]
    return {
        "nf4": nested(nf4.dequantize),
        "nf4_siblings": (
            lambda p, a, code, scale, offset, b: nf4.dequantize_siblings(
                [nf4.Weight(p, a, code, scale, offset, 1024)] * 3,
                4096,
                torch.empty(3072, 4160, dtype=torch.bfloat16),
                [nf4.Adapter(b, 2.0, 16 * i) for i in range(3)],
            ),
            packed(1024, 4096) + [e(1024, 16, dtype=torch.float32)],
        ),
        "mxfp4": (
            lambda p, s: mxfp4.dequantize(p, s, (1024, 4096), torch.bfloat16),
            [e(1024, 2048, dtype=torch.uint8), e(1024, 128, dtype=torch.uint8)],
        ),
        "fp8_quantize": (
            lambda x, extra: fp8.quantize_rows(x, extra, 4096 + 48),
            [e(64, 4096), e(64, 16, dtype=torch.float32)],
        ),
        "fp8_quantize_wide": (lambda x: fp8.quantize_rows(x, None, 28672), [e(8, 28672)]),
        "fp8_adapter": (
            lambda m, b: fp8.begin_weight(m, b, 4096, 4096, 4096 + 64),
            [e(dtype=torch.float32), e(4096, 16, dtype=torch.float32)],
        ),
        "fp8_dense": (
            lambda w, s, out: fp8.write_dense(w, s, out),
            [e(1024, 4096), e(1, 1024, dtype=torch.float32), e(1024, 4144, dtype=torch.float8_e4m3fn)],
        ),
        "fp8_dense_transposed": (
            lambda w, s, out: fp8.write_dense(w.t(), s, out),
            [e(1024, 4096), e(1, 4096, dtype=torch.float32), e(4096, 1040, dtype=torch.float8_e4m3fn)],
        ),
        "fp8_nf4": to_fp8(transposed=False),
        "fp8_nf4_transposed": to_fp8(transposed=True),
        "cross_entropy": (lambda z, y: cross_entropy.loss_and_grad_(z, y), [e(8, 128256), labels]),
        "cross_entropy_all": (
            lambda z, y: cross_entropy.loss_and_grad_(z, y, softcap=30.0, label_smoothing=0.1, z_loss=1e-4),
            [e(8, 49152), labels],
        ),
        "cross_entropy_rows": (
            lambda z, y, f: cross_entropy.loss_and_grad_(z, y, factors=f),
            [e(8, 128256), labels, e(8, dtype=torch.float32)],
        ),
        "cross_entropy_statistics": (
            lambda z, y, f: cross_entropy.statistics_and_grad_(
                z, y, cross_entropy.STATISTICS, factors=f, entropy_factors=f, softcap=30.0
            ),
            [e(8, 151936), labels, e(8, dtype=torch.float32)],
        ),
        "rms_norm": (lambda x, w, r: rms_norm.forward(x, w, residual=r), [x, w, x]),
        "rms_norm_wide": (lambda x, w: rms_norm.forward(x, w), [e(8, 28672), e(28672)]),
        "rms_norm_backward": (
            lambda g, x, w, r: rms_norm.backward(g, x, w, residual_grad=r, need_weight_grad=True),
            [x, x, w, x],
        ),
        "rms_norm_heads": (
            lambda g, x, w: rms_norm.backward(g, x, w, offset=1.0, round_before_scale=False),
            [q, q, e(128)],
        ),
        "attention": (lambda *given: attention.forward(*given, 512, 0.06, 128, 50.0), [*documents, ends]),
        "attention_wide": (
            lambda *given: attention.forward(*given, 512, 0.06),
            [e(64, 8, 512), e(64, 1, 512), e(64, 1, 512), ends],
        ),
        **{
            f"attention_{name}": (
                lambda *given, back=back: back(*given, 512, 0.06, 0, 50.0),
                [documents[0], *documents, level, level, ends],
            )
            for name, back in (
                ("keys", attention_backward.gradients_of_keys),
                ("queries", attention_backward.gradients_of_queries),
            )
        },
        "layer_norm_backward": (
            lambda g, x, w, r: layer_norm.backward(g, x, w, residual_grad=r, need_parameter_grads=True),
            [x, x, w, x],
        ),
        "swiglu": (lambda g, u: swiglu.forward(g, u), [gate, up]),
        "clamped_gate": (lambda both: swiglu.clamped(both, 1.702, 7.0), [wide]),
        "clamped_gate_backward": (lambda d, both: swiglu.clamped_backward(d, both, 1.702, 7.0), [e(64, 14336), wide]),
        "lora_rows": (lambda a, out: lora.append_rows(a, out, 4), [e(16, 4096, dtype=torch.float32), e(20, 4096)]),
        "lora_columns": (
            lambda xa, out: lora.append_columns(xa, out, 4096),
            [e(64, 16, dtype=torch.float32), e(64, 4112)],
        ),
        "lora_beside": (lambda x, xa, out: lora.write_beside(x, xa, out), [e(64, 4096), e(64, 32), e(64, 4160)]),
        "lora_mlp_piece": (piece, [gate, wide, e(64, 16), e(64, 32), e(1, 3, 16, 14336, dtype=torch.float32)]),
        "lora_mlp": (
            lambda d, gu, y, xa: lora_mlp.backward(d, gu, y, xa, (16, 16), width=28736),
            [gate, wide, e(64, 16), e(64, 32)],
        ),
        "experts_tiles": (lambda offsets, like: experts.tiles(offsets, 512, like), [offsets, tokens]),
        "experts_rows": (product, [tokens, order, stack, xa, ups, table, offsets]),
        "experts_input": (
            lambda grad, stack, table, offsets: experts.rows(grad, stack, offsets, table, 512, turned=False),
            [e(512, 1536), stack, table, offsets],
        ),
        "experts_narrow": (
            lambda x, a, table, offsets: experts.rows(x, a, offsets, table, 512, turned=True),
            [e(512, 2048), e(128, 16, 2048), table, offsets],
        ),
        "experts_outer": (
            lambda xa, x, order, offsets: experts.outer(xa, x, offsets, order=order, choices=8),
            [xa, tokens, order, offsets],
        ),
        "experts_collect": (
            lambda y, places: experts.collect(y, places, 8, torch.float32),
            [e(512, 2048), order],
        ),
        "experts_zero_idle": (experts.zero_idle, [e(128, 768, 2048), offsets]),
        "experts_zero_behind": (experts.zero_behind, [e(512, 2048), offsets]),
        "delta_prepare": (
            lambda k, v, g, beta, numbers: delta_chunks.prepare(k, v, g, beta, numbers),
            [*heads[1:], sums, rates, numbers],
        ),
        "delta_scan": (lambda k, v, ends: delta_forward.scan(forward()[0], k, v, ends), [*heads[1:], ends]),
        "delta_outputs": (
            lambda q, k, v, numbers: delta_forward.outputs(*forward(), q, k, v, numbers, 0.1),
            [*heads, numbers],
        ),
        "delta_pending": delta(lambda call: delta_backward.pending(call, forward()[0].total)),
        "delta_scan_back": delta(
            lambda call, waiting, final: delta_backward.scan(call, forward()[0], waiting, final),
            values,
            e(1, 32, 128, 128, dtype=torch.float32),
        ),
        "delta_products": delta(lambda call, given: delta_gradients.products(call, forward()[0], given, given), values),
        "delta_operands": delta(
            lambda call, states, square, missing, one, other: delta_gradients.operands(
                call, *forward(), states, square, square, missing, one, other
            ),
            *(e(1, 4, 32, 128, 128), e(1, 200, 32, 64), values, sums, e(1, 200, 32, dtype=torch.float32)),
        ),
        "swiglu_backward": (lambda d, g, u: swiglu.backward(d, g, u, "gelu_tanh", recompute=True), [gate, gate, up]),
    }


TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def target_of(architecture):
    """("90" or "gfx942") -> (its target, the compute capability whose tiles it takes)."""
    from triton.backends.compiler import GPUTarget

    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64 if architecture.startswith("gfx9") else 32), 80
    return GPUTarget("cuda", int(architecture), 32), int(architecture)


def spilled(asm):
    """Bytes or registers that AMD's assembler says were spilled."""
    counts = re.findall(r"(?:vgpr_spill_count|sgpr_spill_count|ScratchSize): (\d+)", asm.get("amdgcn", ""))
    return sum(map(int, counts))


def half(args, cc):
    """Arguments with fp16 in the place of bf16, which cards before Ampere lack."""
    return [a.to(torch.float16) if cc < 80 and a.dtype == torch.bfloat16 else a for a in args]


def refused_on(architecture, cc):
    """Kernels whose ops are torch's there: no e4m3, older than Ampere, registers that would spill."""
    products = ("experts", "delta", "attention")
    return ("fp8",) * (cc < 89) + products * (cc < 80) + products[1:] * (architecture == "gfx1100")


def compile_for(architectures, modules):
    import triton
    from triton.compiler import ASTSource

    launches = []
    for module in modules:
        module.launch = lambda kernel, grid, *args, **options: launches.append((kernel, args, options))
    _tiles = modules[0]._tiles
    for architecture in architectures:
        target, cc = target_of(architecture)
        warp = target.warp_size
        _tiles.pick = lambda kernel, tensor, size, cc=cc, warp=warp: _tiles.find(
            kernel, cc, tensor.element_size(), size, warp
        )
        for name, (function, args) in cases(*modules).items():
            if name.startswith(refused_on(architecture, cc)):
                continue
            launches.clear()
            function(*half(args, cc))
            ((kernel, args, options),) = launches
            warps, stages = options.pop("num_warps"), options.pop("num_stages", 3)
            fuses = options.pop("fuse_products", True)
            signature, constants, attributes = {}, dict(options), {}
            for i, (argument, value) in enumerate(zip(kernel.arg_names, args)):
                if value is None or isinstance(value, int) and value == 1:
                    constants[argument] = value  # as triton's launcher specialises
                else:
                    signature[argument] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
                    if isinstance(value, torch.Tensor) or value % 16 == 0:
                        attributes[(i,)] = [["tt.divisibility", 16]]
            signature = {a: signature.get(a, "constexpr") for a in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
            compiled = triton.compile(
                source,
                target=target,
                options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuses},
            )
            ptx = compiled.asm.get("ptx", "")
            print(
                json.dumps(
                    {
                        "name": name,
                        "architecture": architecture,
                        "shared": compiled.metadata.shared,
                        "spilled": spilled(compiled.asm),
                        "wide_stores": "st.global.v4.b32" in ptx,
                        "wide_loads": "ld.global.v4.b32" in ptx or "cp.async.cg" in ptx,
                    }
                ),
                flush=True,
            )


def trace(modules):
    """make_fx over fake tensors, functionalised, as passes/lower does; a stub driver lets torch analyse what a kernel writes."""
    import triton
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

    triton.runtime.driver.set_active(Driver())
    for name, (function, args) in cases(*modules).items():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            graph = make_fx(torch.func.functionalize(function))(*(mode.from_tensor(a) for a in args)).graph
        nodes = [n for n in graph.nodes if "triton_kernel_wrapper" in str(n.target)]
        written = [sorted(n.kwargs.get("tensors_to_clone", ())) for n in nodes]
        copies = [str(n.target) for n in graph.nodes if any(s in str(n.target) for s in ("clone", "copy", "scatter"))]
        print(
            json.dumps({"name": name, "targets": [str(n.target) for n in nodes], "written": written, "copies": copies}),
            flush=True,
        )


if __name__ == "__main__":
    from tunecompile.templates import (
        cross_entropy,
        experts,
        fp8,
        layer_norm,
        lora,
        lora_mlp,
        mxfp4,
        nf4,
        rms_norm,
        swiglu,
    )
    from tunecompile.templates.attention import backward_pass as attention_backward
    from tunecompile.templates.attention import forward_pass as attention_forward
    from tunecompile.templates.delta_rule import backward_pass as delta_backward
    from tunecompile.templates.delta_rule import chunks as delta_chunks
    from tunecompile.templates.delta_rule import forward_pass as delta_forward
    from tunecompile.templates.delta_rule import gradients as delta_gradients

    everything = (
        nf4,
        mxfp4,
        cross_entropy,
        rms_norm,
        swiglu,
        lora,
        lora_mlp,
        fp8,
        experts,
        delta_chunks,
        delta_forward,
        delta_backward,
        delta_gradients,
        layer_norm,
        attention_forward,
        attention_backward,
    )
    compile_for(sys.argv[2:], everything) if sys.argv[1] == "compile" else trace(everything)
