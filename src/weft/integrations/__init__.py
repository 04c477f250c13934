"""Adapters for other libraries' users. Nothing here is imported by weft itself, and theirs only on use."""
