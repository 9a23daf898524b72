"""What was planned and measured, for people to look at: tables and pictures."""
