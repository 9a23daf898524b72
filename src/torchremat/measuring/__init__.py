"""Live bytes, flops and the timeline of one training step."""
