"""Block drafters as z-lab, DeepSpec, SpecForge, JetSpec and NeMo save them: DFlash-1/2, JetSpec, DSpark, Domino."""
