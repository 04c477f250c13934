"""Any causal transformers model over a sharded sequence: `ContextParallel`."""

from weft.integrations.transformers.context_parallel import ContextParallel

__all__ = ["ContextParallel"]
