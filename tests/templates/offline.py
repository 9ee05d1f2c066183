"""Launches of every template, recorded with fake arguments: for what can be checked of the kernels without a GPU.

Run as a script, in a process without TRITON_INTERPRET (the interpreter replaces triton.jit): ``offline.py compile 90 100``
prints a JSON line for each kernel compiled for sm_90 and sm_100, ``offline.py NAME 90`` for one kernel, refused there or
not, and ``offline.py trace`` one for each launch function traced as Inductor's passes trace it. ``offline.py trace compile
90`` prints both.
"""

import json
import re
import subprocess
import sys
import tempfile

import torch
from offline_cases import cases, recorded

from tunecompile._torch import card, known_bugs

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
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


def used(asm):
    """(registers of a thread, bytes or registers that were spilled), as the assembler or `cuobjdump` says."""
    if "amdgcn" in asm:
        (registers,) = set(re.findall(r"^\s*\.vgpr_count:\s*(\d+)", asm["amdgcn"], re.M))
        # scalar registers are spilled into lanes of vector registers, which count
        counts = re.findall(r"(?:vgpr_spill_count|ScratchSize): (\d+)", asm["amdgcn"])
        return int(registers), sum(map(int, counts))
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", said).groups())
    return registers, stack + local


def half(args, cc):
    """Arguments with fp16 in the place of bf16, which cards before Ampere lack."""
    return [a.to(torch.float16) if cc < 80 and a.dtype == torch.bfloat16 else a for a in args]


def refused_on(architecture, cc):
    """Kernels whose ops are torch's there: no e4m3, older than Ampere, registers that would spill."""
    products = (
        "experts",
        "adapters",
        "delta",
        "channel",
        "attention",
        "lora_mlp",
        "few_rows",
        "one_query",
        "int8_product",
    )
    spills = ("channel", "few_rows") * architecture.startswith("gfx")  # these have NVIDIA's instructions
    spills += ("one_query", "int8_product") * (architecture == "gfx1100")
    faulty = ("delta_operands",) * (architecture == "100" and known_bugs.DELTA_RULE_ON_SM_100.present)
    return ("fp8",) * (cc < 89) + products * (cc < 80) + products[1:5] * (architecture == "gfx1100") + spills + faulty


def compile_for(architectures, only=None):
    import triton
    from triton.compiler import ASTSource

    from tunecompile.templates import _tiles

    made = cases()
    for architecture in architectures:
        target, cc = target_of(architecture)
        warp = target.warp_size
        shared = card.SHARED.get(divmod(cc, 10), card.LDS) if architecture.isdigit() else card.LDS
        _tiles.pick = lambda kernel, tensor, size, shared=shared, warp=warp: _tiles.find(
            kernel, shared, tensor.element_size(), size, warp
        )
        for name, (function, args) in made.items():
            if name != only if only else name.startswith(refused_on(architecture, cc)):
                continue
            ((kernel, _, args, options),) = recorded(function, half(args, cc))
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
            ptx, (registers, spilled) = compiled.asm.get("ptx", ""), used(compiled.asm)
            print(
                json.dumps(
                    {
                        "name": name,
                        "architecture": architecture,
                        "shared": compiled.metadata.shared,
                        "registers": registers,
                        "spilled": spilled,
                        "wide_stores": "st.global.v4.b32" in ptx,
                        "wide_loads": "ld.global.v4.b32" in ptx or "cp.async.cg" in ptx,
                    }
                ),
                flush=True,
            )


def trace():
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
    for name, (function, args) in cases().items():
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
    what, *rest = sys.argv[1:]
    if what == "trace":
        trace()
        what, *rest = rest or [""]
    if what:
        compile_for(rest, only=None if what == "compile" else what)
