"""Rules that decide which path of a draft tree the target accepts: one file per rule, named in [`rules.RULES`]."""
