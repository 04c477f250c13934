"""Which part of weft defines each public name."""

PARTS = {
    "weft.attention": ("attention", "head_strides"),
    "weft.comm": ("Axis", "record"),
    "weft.embedding": ("BigramHashEmbedding", "RowExchange", "ShardedEmbedding"),
    "weft.linear_attention": ("linear_attention",),
    "weft.optim": (
        "REKLS",
        "OverlappedStep",
        "RowAdam",
        "ShardedAdamW",
        "StepPart",
        "broadcast_parameters",
        "clip_grad_norm_",
    ),
    "weft.scan": ("exclusive_scan",),
    "weft.sequence": ("mean_loss", "sequence", "shard", "unshard"),
    "weft.world": ("Machine", "VirtualWorld", "launch"),
}
