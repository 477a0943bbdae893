"""Faults that a tired person might write, each with the tests of its room that should notice it."""

from typing import NamedTuple


class Fault(NamedTuple):
    what: str
    file: str
    right: str
    wrong: str
    tests: str  # files and folders of tests, those that should notice first

    @property
    def room(self) -> str:
        """The package that has the fault."""
        parts = self.file.split("/")
        return parts[parts[0] == "jaxmem"]


FAULTS = {
    # ------------------------------------------------------------------ step
    "micro-batch": Fault(
        "the last micro-batch is dropped",
        "jaxmem/step/gradients.py",
        "looped = (batch, keys) if local is None else",
        "looped = jax.tree.map(lambda x: x[:-1], (batch, keys)) if local is None else",
        "tests/step/test_step.py",
    ),
    "mask": Fault(
        "the mask of the loss is counted twice",
        "jaxmem/step/objective.py",
        '"count": jnp.sum(mask)}',
        '"count": 2 * jnp.sum(mask)}',
        "tests/step/test_step.py",
    ),
    "accumulated": Fault(
        "the gradients of all micro-batches but the last are not reduced",
        "jaxmem/step/gradients.py",
        "return reduced(before + g.astype(before.dtype)).astype(self.dtype)",
        "return reduced(g.astype(before.dtype)).astype(self.dtype)",
        "tests/step/test_layouts.py tests/step/test_experts.py tests/step/test_step.py",
    ),
    "dpo": Fault(
        "DPO prefers the rejected answer",
        "jaxmem/step/objective.py",
        "margins = cfg.beta * (gained[:, 0] - gained[:, 1])",
        "margins = cfg.beta * (gained[:, 1] - gained[:, 0])",
        "tests/training/test_preference.py",
    ),
    # ------------------------------------------------------------------ stack
    "schedule": Fault(
        "a recomputed layer reads the boundary of the layer before",
        "jaxmem/stack/recompute_plan.py",
        "slot + min(i, 1), slot + 1)",
        "slot, slot + 1)",
        "tests/stack",
    ),
    "shared": Fault(
        "the gradient of shared inputs is that of one layer",
        "jaxmem/stack/scheduled.py",
        "of_shared = jax.tree.map(jnp.add, carry.of_shared, of_layer_shared)",
        "of_shared = of_layer_shared",
        "tests/stack tests/step/test_step.py",
    ),
    "hook": Fault(
        "every layer is added to the sum of layer 0",
        "jaxmem/stack/apply.py",
        "hook(g, take_layer(results, layer))), None",
        "hook(g, take_layer(results, 0 * layer))), None",
        "tests/step/test_step.py tests/stack",
    ),
    # ------------------------------------------------------------------ pipeline
    "order": Fault(
        "the rounds and the stages of a circular pipeline are exchanged",
        "jaxmem/pipeline/stages.py",
        "(round_ * self.stages + stage) * self.group + position",
        "(stage * self.rounds + round_) * self.group + position",
        "tests/pipeline tests/step/test_pipeline.py",
    ),
    "fetched": Fault(
        "without micro-batches every layer is that of the first round",
        "jaxmem/pipeline/stages.py",
        "round_index = group // self.stages",
        "round_index = group * 0",
        "tests/pipeline tests/step/test_pipeline.py",
    ),
    # ------------------------------------------------------------------ sharding
    "axes": Fault(
        "two mesh axes are exchanged in a rule: the optimizer state is sharded as for a lower ZeRO stage",
        "jaxmem/sharding/table.py",
        "optimizer=sharded_state if zero >= 1 else gathered",
        "optimizer=gathered if zero >= 1 else sharded_state",
        "tests/step/test_layouts.py",
    ),
    "zero-2": Fault(
        "ZeRO-2 keeps whole gradients",
        "jaxmem/sharding/table.py",
        "gradients=sharded if zero >= 2 else gathered",
        "gradients=sharded if zero >= 3 else gathered",
        "tests/step/test_layouts.py tests/planning/test_volume.py",
    ),
    "argument": Fault(
        "the sum of gradients is added to itself",
        "jaxmem/sharding/weights.py",
        "(None, hook(g, argument), None)",
        "(None, hook(argument, argument), None)",
        "tests/step/test_step.py",
    ),
    # ------------------------------------------------------------------ optim
    "adam": Fault(
        "the wrong sign in the bias correction of Adam's moments",
        "jaxmem/optim/rules/plain.py",
        "return 1 - jnp.float32(beta) ** count.astype(jnp.float32)",
        "return 1 + jnp.float32(beta) ** count.astype(jnp.float32)",
        "tests/optim",
    ),
    "galore": Fault(
        "a projection that is never computed again",
        "jaxmem/optim/rules/galore.py",
        "due = turn | (context.count == 1)",
        "due = context.count == 1",
        "tests/optim/test_galore.py",
    ),
    "nesterov": Fault(
        "Muon without Nesterov momentum",
        "jaxmem/optim/rules/muon.py",
        "ahead = self.momentum * m + (1 - self.momentum) * g",
        "ahead = m",
        "tests/optim",
    ),
    "clipping": Fault(
        "the norm of all layers clips each layer",
        "jaxmem/optim/clipping.py",
        "first = int(is_stacked(names) and layer is None)",
        "first = 0",
        "tests/optim/test_clipping.py",
    ),
    "previous": Fault(
        "the norm of the previous update is never stored",
        "jaxmem/optim/clipping.py",
        'new = PreviousNorm(norm) if by == "previous" else state',
        "new = state",
        "tests/optim/test_clipping.py",
    ),
    # ------------------------------------------------------------------ quant
    "rounding": Fault(
        "stochastic rounding that always rounds down",
        "jaxmem/quant/precision.py",
        "noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)",
        "noise = jnp.zeros(x.shape, jnp.uint32)",
        "tests/quant/test_precision.py",
    ),
    "codebook": Fault(
        "stochastic rounding with the probabilities exchanged",
        "jaxmem/quant/formats.py",
        "x - low > draws * (high - low)",
        "high - x > draws * (high - low)",
        "tests/quant/test_quantize.py",
    ),
    "scales": Fault(
        "double quantization without the mean",
        "jaxmem/quant/qtensor.py",
        'quantize(scale - mean, "dynamic8"',
        'quantize(scale, "dynamic8"',
        "tests/quant/test_quantize.py",
    ),
    "last block": Fault(
        "zeros pad the last block, also where its minimum is above zero",
        "jaxmem/quant/qtensor.py",
        'for d in range(x.ndim)], mode="edge")',
        'for d in range(x.ndim)], mode="constant")',
        "tests/quant/test_quantize.py",
    ),
    # ------------------------------------------------------------------ models
    "segments": Fault(
        "packed documents attend to each other",
        "jaxmem/models/attention.py",
        '"segment_ids": ids, "sinks"',
        '"segment_ids": None, "sinks"',
        "tests/models/test_decoder.py",
    ),
    "rope": Fault(
        "a rotation that is none",
        "jaxmem/models/rope.py",
        "b * cos + a * sin",
        "b * cos - a * sin",
        "tests/models/test_rope.py",
    ),
    "dropout": Fault(
        "dropout does not scale what it keeps",
        "jaxmem/models/layers.py",
        "x / (1.0 - rate)",
        "x",
        "tests/models/test_decoder.py",
    ),
    "smoothing": Fault(
        "label smoothing the wrong way round",
        "jaxmem/models/losses.py",
        "partition - (1.0 - s) * label_logit - s * mean()",
        "partition - s * label_logit - (1.0 - s) * mean()",
        "tests/models/test_losses.py",
    ),
    "preference": Fault(
        "the loss of preferences falls with the wrong answer",
        "jaxmem/models/losses.py",
        "(1.0 - s) * jax.nn.softplus(-margins) + s * jax.nn.softplus(margins)",
        "(1.0 - s) * jax.nn.softplus(margins) + s * jax.nn.softplus(-margins)",
        "tests/models/test_losses.py tests/training/test_preference.py",
    ),
    # ------------------------------------------------------------------ adapters
    "lora": Fault(
        "LoRA without its scale",
        "jaxmem/config/adapter.py",
        "LowRank(rank, alpha, alpha / (math.sqrt(rank) if settings.rslora else rank))",
        "LowRank(rank, alpha, 1.0)",
        "tests/adapters/test_lora.py",
    ),
    "layer scale": Fault(
        "merging ignores that layers have other scales",
        "jaxmem/adapters/low_rank.py",
        'factor = scale * f32.get("layer_scale", jnp.float32(1))',
        "factor = jnp.float32(scale)",
        "tests/adapters/test_lora.py",
    ),
    "dora": Fault(
        "half of the mixed term in the norms of DoRA",
        "jaxmem/adapters/low_rank.py",
        "+ 2 * scale * cross +",
        "+ scale * cross +",
        "tests/adapters/test_lora.py tests/hf/test_peft.py",
    ),
    # ------------------------------------------------------------------ checkpoint
    "checksum": Fault(
        "a checksum that does not see exchanged elements",
        "jaxmem/checkpoint/record.py",
        "return plain | weighted << 32",
        "return plain",
        "tests/checkpoint/test_checksum.py",
    ),
    "layers": Fault(
        "layers are read in the order of this run instead of the saved one",
        "jaxmem/checkpoint/saved_state.py",
        "np.array([positions[layer] if layer < layers",
        "np.array([layer if layer < layers",
        "tests/checkpoint tests/step/test_pipeline.py",
    ),
    "best": Fault(
        "the worst checkpoint is kept as the best",
        "jaxmem/checkpoint/manager.py",
        "min(self._finite(steps), default=(math.inf, None))[1]",
        "max(self._finite(steps), default=(math.inf, None))[1]",
        "tests/checkpoint tests/training/test_run.py",
    ),
    # ------------------------------------------------------------------ data
    "target": Fault(
        "a document that is continued loses a target",
        "jaxmem/data/packing.py",
        "known = min(used, len(left) - 1)",
        "known = min(used, len(left)) - 1",
        "tests/data",
    ),
    "positions": Fault(
        "positions are counted from the row instead of the document",
        "jaxmem/data/packing.py",
        "= np.arange(used)",
        "= np.arange(index, index + used)",
        "tests/data",
    ),
    "answers": Fault(
        "the mask of answers is not shifted like the targets",
        "jaxmem/data/packing.py",
        "is_target[offset + 1 : offset + known + 1]",
        "is_target[offset : offset + known]",
        "tests/data",
    ),
    "epoch": Fault(
        "every epoch has the order of the first",
        "jaxmem/data/record_order.py",
        "permutation(len(self._lengths), mix_seed(self._seed, epoch))",
        "permutation(len(self._lengths), mix_seed(self._seed))",
        "tests/data/test_order.py",
    ),
    # ------------------------------------------------------------------ hf
    "interleaved": Fault(
        "a slice of an interleaved tensor begins at the wrong row",
        "jaxmem/hf/tensors.py",
        "slice(entry.start + r.start * step,",
        "slice(entry.start + r.start,",
        "tests/hf/test_tensors.py tests/hf/test_convert.py",
    ),
    "fused": Fault(
        "the parts of an interleaved tensor are written one after the other",
        "jaxmem/hf/tensors.py",
        "np.stack(arrays, axis=how.dim + 1)",
        "np.stack(arrays, axis=how.dim)",
        "tests/hf/test_tensors.py tests/hf/test_convert.py",
    ),
    "nested": Fault(
        "scales of another group of a bitsandbytes file",
        "jaxmem/hf/quantized.py",
        "[first // group]",
        "[first // (2 * group)]",
        "tests/hf/test_quantized.py",
    ),
    # ------------------------------------------------------------------ planning and estimate
    "wire": Fault(
        "a collective sends its whole array",
        "jaxmem/planning/communication.py",
        "(group - 1) / group",
        "1.0",
        "tests/planning/test_communication.py tests/planning/test_volume.py",
    ),
    "link": Fault(
        "transfers do not wait for their link",
        "jaxmem/planning/timeline.py",
        "transmission.begins = max(self.now, self.link_free[message.link])",
        "transmission.begins = self.now",
        "tests/planning/test_timeline.py",
    ),
    "runs": Fault(
        "a loop in a loop runs as often as one loop",
        "jaxmem/planning/hlo.py",
        "times[called] += times[caller] * count",
        "times[called] += count",
        "tests/planning/test_hlo.py",
    ),
    "shards": Fault(
        "the estimate rounds shards down",
        "jaxmem/estimate/state.py",
        "-(-size // count)",
        "size // count",
        "tests/estimate/test_state.py",
    ),
    "gathered": Fault(
        "the estimate of gathered weights is that of their shards",
        "jaxmem/estimate/state.py",
        "int(used * gathered) if",
        "int(stored * gathered) if",
        "tests/estimate/test_state.py",
    ),
    # ------------------------------------------------------------------ search
    "phases": Fault(
        "the memory of initialization and evaluation is ignored",
        "jaxmem/search/largest.py",
        "candidate.phases = self._compilers.phases(cfg)",
        "self._compilers.phases(cfg)",
        "tests/search/test_largest.py",
    ),
    "given": Fault(
        "a search leaves out the values of the config itself",
        "jaxmem/search/candidates.py",
        "return choices if given in choices else [given, *choices]",
        "return choices",
        "tests/search/test_candidates.py",
    ),
    "front": Fault(
        "slower candidates that need more memory stay",
        "jaxmem/search/candidates.py",
        "candidate.total < (1 - MIN_MEMORY_GAIN) * chosen[-1].total",
        "candidate.total < (1 + MIN_MEMORY_GAIN) * chosen[-1].total",
        "tests/search",
    ),
    # ------------------------------------------------------------------ inference
    "noise": Fault(
        "every token is sampled with the same noise",
        "jaxmem/inference/generate.py",
        "jax.random.fold_in(jax.random.key(self._sampling.seed), length + last)",
        "jax.random.key(self._sampling.seed)",
        "tests/inference",
    ),
    "top_p": Fault(
        "top_p excludes the token that crosses the limit",
        "jaxmem/inference/generate.py",
        "jnp.cumsum(share, axis=-1) - share < self.top_p",
        "jnp.cumsum(share, axis=-1) < self.top_p",
        "tests/inference",
    ),
    # ------------------------------------------------------------------ kernels
    "window": Fault(
        "a window that includes one key too many",
        "kernels/fused_attention/arguments.py",
        "seen & (distance < window)",
        "seen & (distance <= window)",
        "tests/kernels/test_attention.py",
    ),
    "log-sum-exp": Fault(
        "the log-sum-exp of a row without its maximum",
        "kernels/fused_attention/blockwise.py",
        "top + jnp.log(total)",
        "jnp.log(total)",
        "tests/kernels/test_attention.py",
    ),
    "soft cap": Fault(
        "the slope of the soft cap without its square",
        "kernels/fused_attention/blockwise.py",
        "(1.0 - capped * capped)",
        "(1.0 - capped)",
        "tests/kernels/test_attention.py",
    ),
    "second moment": Fault(
        "the second moment is an average of gradients instead of squares",
        "kernels/quantized_update/reference.py",
        "(1 - adam.beta2) * wide * wide",
        "(1 - adam.beta2) * wide",
        "tests/kernels/test_quantized_update.py",
    ),
    "groups": Fault(
        "the last expert of a token overwrites the others",
        "kernels/grouped_matmul/blocks.py",
        "y.at[rows].add(results.astype(jnp.float32)",
        "y.at[rows].set(results.astype(jnp.float32)",
        "tests/kernels/test_grouped_matmul.py",
    ),
}
