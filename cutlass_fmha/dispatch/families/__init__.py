"""What a family of rows can run, what it costs, and how it is launched: ``family.Family``, once for each."""
