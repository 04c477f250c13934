"""What people use today, measured beside weft. A family has

- ``baselines``: what people use, on weft's own kernels, so that a comparison is one of what is sent and when;
- ``cases``: the cases, which take turns (`timing`), the columns of its tables, which say how a value is found in the
  samples of all ranks (`ranks.Measured`), and ``run``, which fills the tables (`ranks.fill_table`, `report`).
"""
