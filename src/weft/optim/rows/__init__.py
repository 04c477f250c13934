"""Adam on the rows of tables that a batch touches."""
