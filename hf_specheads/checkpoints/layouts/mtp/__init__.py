"""Fine-tuned MTP layers in Qwen's layout, as stored in a target's checkpoint."""
