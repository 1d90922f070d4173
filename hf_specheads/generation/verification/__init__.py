"""Which path of a draft tree the target accepts; one file per rule, and [`rules.RULES`] names them."""
