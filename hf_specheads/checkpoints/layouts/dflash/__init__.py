"""Block drafters (DFlash-1/2, JetSpec, DSpark, Domino) as z-lab, DeepSpec, SpecForge, JetSpec and NeMo save them."""
