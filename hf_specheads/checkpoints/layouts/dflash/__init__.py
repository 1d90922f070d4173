"""Block drafters as z-lab, DeepSpec, SpecForge, JetSpec and NeMo save them: DFlash and JetSpec."""
