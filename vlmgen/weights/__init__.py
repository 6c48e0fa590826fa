"""The weight table: which checkpoint keys fill which parameter, and how."""

from vlmgen.weights.table import WeightEntry, WeightTable, weight_table

__all__ = ["WeightEntry", "WeightTable", "weight_table"]
