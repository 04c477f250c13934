"""The delta rule: the local kernel, and ranks beside what people use today."""
