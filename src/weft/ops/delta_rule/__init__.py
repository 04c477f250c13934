"""The delta rule over a sharded sequence: DeltaNet, gated delta net and KDA around one scan of dense maps."""

from weft.ops.delta_rule.operation import delta_rule

__all__ = ["delta_rule"]
