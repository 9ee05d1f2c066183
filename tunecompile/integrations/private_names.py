"""Undocumented names of transformers, diffusers, PEFT, accelerate, bitsandbytes, DeepSpeed, TRL and Lightning in use.

Code that uses one reads it with `getattr`, or looks in `sys.modules`, so that a lost name switches its feature off. The
table says which feature that is. `report` checks the packages that are imported; `tunecompile doctor` imports those
that are installed, and checks all. Names of attributes stand below the function that sets or reads them, where no class
has them.
"""

from __future__ import annotations

from functools import partial

from tunecompile._torch.private_names import PrivateName, group

_transformers = partial(group, since="5.0", last_checked=("5.0", "5.24"))
_peft = partial(group, since="0.18", last_checked=("0.18", "0.21"))
_accelerate = partial(group, since="1.4", last_checked=("1.4", "1.15"))
_bitsandbytes = partial(group, since="0.50", last_checked=("0.50",))
_deepspeed = partial(group, since="0.19", last_checked=("0.19",))
_lightning = partial(group, since="2.4", last_checked=("2.6",))
_trl = partial(group, since="1.0", last_checked=("1.0", "1.16"))

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    *_transformers(
        "context parallelism leaves layers eager",
        "transformers.AttentionInterface.register",
        "transformers.PreTrainedConfig._attn_implementation_internal",
        "transformers.PreTrainedModel._supports_attention_backend",
    ),
    *_transformers(
        "`tunecompile.register` ends with an error",
        "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS",
        "transformers.integrations.moe.grouped_mm_experts_forward",
        "transformers.integrations.sdpa_attention.repeat_kv",
        "transformers.masking_utils.eager_mask",
        "transformers.masking_utils.sdpa_mask",
    ),
    *_transformers(
        "`verify` compares attention and experts by the name `tunecompile` with themselves",
        "transformers.PreTrainedConfig._experts_implementation_internal",
        "transformers.PreTrainedModel._supports_sdpa",
    ),
    *_transformers(
        "context parallelism ends with an error, and attention of towers is a loop over images",
        "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    ),
    *_transformers(
        "transformers' gradient checkpointing recomputes around compiled layers, beside their own plan",
        "transformers.modeling_utils.PreTrainedModel._set_gradient_checkpointing._gradient_checkpointing_func",
    ),
    *group(
        "diffusers' gradient checkpointing recomputes around compiled blocks, beside their own plan",
        "diffusers.models.modeling_utils.ModelMixin.enable_gradient_checkpointing._gradient_checkpointing_func",
        since="0.36",
        last_checked=("0.42",),
    ),
    *_transformers("`merge_accumulation` leaves batches as they are", "transformers.trainer.Trainer._train_batch_size"),
    *group(
        "attention of towers is a loop over images, with graph breaks",
        "transformers.utils.generic.is_flash_attention_requested",
        "transformers.utils.generic.get_max_seqlen",
        since="5.17",
        last_checked=("5.17", "5.24"),
    ),
    *group(
        "`generate()` runs by transformers' own loop",
        "transformers.generation.GenerationMixin._prefill",
        "transformers.generation.GenerationMixin._update_model_kwargs_for_generation",
        "transformers.generation.utils.GENERATION_MODES_MAPPING",
        "transformers.PreTrainedModel._can_compile_fullgraph",
        since="5.17",
        last_checked=("5.17", "5.24"),
    ),
    *group(
        "models that return hidden states keep their padding, and FSDP2's layers are not repeated when memory runs out",
        "transformers.utils.output_capturing",
        since="5.2",
        last_checked=("5.24",),
    ),
    *group(
        "written-out attention of layers that return weights which nobody reads keeps its scores (Bamba)",
        "transformers.PreTrainedModel._can_record_outputs",
        since="5.2",
        last_checked=("5.24",),
    ),
    *group(
        "layers whose router logits are requested have graph breaks",
        "transformers.utils.output_capturing._active_collector",
        since="5.2",
        last_checked=("5.24",),
    ),
    *_peft("a linear with DoRA has graph breaks", "peft.utils.integrations.dequantize_module_weight.module"),
    *_peft(
        "a linear with DoRA has graph breaks, if it stores its weight transposed",
        "peft.utils.other.transpose.weight",
        "peft.utils.other.transpose.fan_in_fan_out",
    ),
    *_peft(
        "layers are compiled once more after adapters were switched",
        "peft.tuners.tuners_utils.BaseTunerLayer._active_adapter",
    ),
    *_peft(
        "layers with adapters over experts are compiled anew in every step, up to Dynamo's limit",
        "peft.tuners.lora.layer.ParamWrapper._activate_lora.register_parametrization",
    ),
    *group(
        "adapters over experts are not traced, and run eagerly",
        "peft.tuners.lora.layer.ParamWrapper.update_layer._did_swap_in_out_features",
        since="0.21",
        last_checked=("0.21",),
    ),
    *_transformers(
        "adapters over experts are not traced, and run eagerly", "transformers.PreTrainedConfig._experts_implementation"
    ),
    *_accelerate(
        "layers that accelerate placed (`device_map`) have graph breaks",
        "accelerate.hooks.add_hook_to_module._hf_hook",
        "accelerate.hooks.add_hook_to_module._old_forward",
    ),
    *_accelerate(
        "layers that accelerate placed (`device_map`) run eagerly",
        *("execution_device", "offload"),
        under="accelerate.hooks.AlignDevicesHook",
    ),
    *_accelerate("layers that accelerate placed (`device_map`) run eagerly", "accelerate.hooks.ModelHook.no_grad"),
    *_accelerate(
        "`verify` computes its references under accelerate's autocast",
        "accelerate.Accelerator.prepare_model._original_forward",
    ),
    *_bitsandbytes(
        "4-bit linears are not fused",
        "bitsandbytes.nn.modules.Params4bit.quant_state",
        *(f"bitsandbytes.functional.QuantState.{name}" for name in ("quant_type", "blocksize", "nested", "state2")),
    ),
    *_bitsandbytes(
        "4-bit stacks of experts are dequantised by bitsandbytes' code, in a graph for each layer",
        "bitsandbytes.nn.parametrize.Bnb4bitParametrization.__init__.quant_state",
    ),
    *_bitsandbytes("`quantize_experts` ends with an error", "bitsandbytes.nn.parametrize.replace_parameter_4bit"),
    *_transformers(
        "`nf4_config` ends with an error",
        "transformers.integrations.bitsandbytes.Bnb4bitQuantize.convert",
        "transformers.quantizers.quantizer_bnb_4bit.Bnb4BitHfQuantizer.param_needs_quantization",
    ),
    *_bitsandbytes(
        "4-bit layers that FSDP2 shards have a graph break at each linear",
        "bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module",
    ),
    *_bitsandbytes(
        "on CPUs with AVX512-BF16 an evaluation packs 4-bit weights, and later steps have no gradient through them",
        "bitsandbytes.nn.modules.Linear4bit.support_avx512bf16_for_cpu",
        "bitsandbytes.nn.modules.Linear4bit.forward.packing_format_for_cpu",
    ),
    *_deepspeed(
        "layers whose weights ZeRO-3 gathers have a graph break at each module",
        "deepspeed.utils.z3_leaf_module.z3_leaf_module._z3_leaf",
        "deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param.ds_id",
        "deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param.ds_numel",
        "deepspeed.runtime.zero.partition_parameters.Init._convert_to_deepspeed_param.ds_shape",
    ),
    *_deepspeed("losses under a DeepSpeed engine are refused: it hooks the logits", "deepspeed.runtime.utils"),
    *_deepspeed("linears under ZeRO-3 have a graph break", "deepspeed.runtime.zero.linear.zero3_linear_wrap"),
    *_trl("batches that TRL's losses see keep their padding", "trl.trainer.utils"),
    *group(
        "scores under TRL's fused head are TRL's own",
        "trl.trainer.utils._ChunkedLogProbFunction",
        since="1.15",
        last_checked=("1.15", "1.16"),
    ),
    *group(
        "scores under TRL's fused head are computed of rows without a label, too, off GPUs",
        "trl.trainer.utils._use_triton",
        since="1.16",
        last_checked=("1.16",),
    ),
    *_accelerate(
        "scores under TRL's fused head are TRL's own in mixed precision without adapters",
        "accelerate.utils.operations.ConvertOutputsToFp32.model_forward",
    ),
    *_lightning("Fabric's models compute their logits", "lightning.fabric.wrappers._backward_hook"),
)
