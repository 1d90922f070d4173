"""Fine-tuned MTP layers as they lie in a target's checkpoint, in Qwen's layout."""
