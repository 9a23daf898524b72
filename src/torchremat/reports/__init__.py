"""Tables and pictures of plans and measurements."""
