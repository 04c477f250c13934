"""Which package of weft defines each public name."""

# Operations and modules: `weft.NAME`.
PUBLIC = {
    "weft.comm": ("Axis", "record"),
    "weft.ops.attention": ("attention", "head_strides"),
    "weft.ops.delta_rule": ("delta_rule",),
    "weft.ops.embedding": ("BigramHashEmbedding", "RowExchange", "ShardedEmbedding"),
    "weft.ops.linear_attention": ("linear_attention",),
    "weft.ops.mamba2": ("mamba2",),
    "weft.ops.scan": ("exclusive_scan",),
    "weft.ops.selective_scan": ("selective_scan",),
    "weft.ops.sequence": ("Mask", "Sequence", "mean_loss", "sequence", "shard", "unshard"),
    "weft.ops.short_conv": ("short_conv",),
    "weft.optim": ("broadcast_parameters", "clip_grad_norm_"),
    "weft.world": ("launch",),
}
# Where they are now: at the top they are aliases until 0.3.
MOVED = {
    "weft.optim": ("REKLS", "OverlappedStep", "RowAdam", "ShardedAdamW", "StepPart"),
    "weft.world": ("Machine", "VirtualWorld"),
}
# Packages that are attributes of weft.
PACKAGES = ("comm", "errors", "integrations", "ops", "optim", "parallel", "world")
