"""Stand-in for the few enums of the Neuron kernel library that model code names."""
