"""A model spread over devices, and a batch cut into microbatches."""
