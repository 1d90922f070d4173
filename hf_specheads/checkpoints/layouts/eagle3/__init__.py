"""EAGLE-3 as its authors, SpecForge, SGLang and ModelOpt save it."""
