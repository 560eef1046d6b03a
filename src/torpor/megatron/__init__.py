"""Everything that knows Megatron-Core: the CPU host, specs, models, parallel state, checkpoints."""
