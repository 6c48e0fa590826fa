"""Host-side arithmetic: packing, tower inputs, positions; and the vision merge in the graph."""
