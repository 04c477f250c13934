"""The operations: each family of them in a package of its own, over sequences that ranks share."""
