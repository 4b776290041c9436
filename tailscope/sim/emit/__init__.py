"""Writers of the files that real emitters write, from an outcome, with their blind spots."""
